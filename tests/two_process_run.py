"""One of several processes that run the same batch on one mesh; started by tests/maxtext/test_two_processes.py.

For:        a sharded session over devices of more than one process, from start to results.
Not for:    being collected by pytest.
May import: the standard library, jax, numpy, benchmarks.sharding, maxtext_paged.

    python -m tests.two_process_run RANK PORT BACKEND
"""

from __future__ import annotations

import json
import sys

import jax

NUM_PROCESSES, DEVICES_EACH = 2, 2


def main() -> int:
    rank, port, backend = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    jax.config.update("jax_num_cpu_devices", DEVICES_EACH)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", NUM_PROCESSES, rank, initialization_timeout=180)
    from benchmarks.sharding import MeshCase, addresses, make_requests, open_case
    from kv_common.errors import ConfigError

    assert len(jax.devices()) == NUM_PROCESSES * DEVICES_EACH and len(jax.local_devices()) == DEVICES_EACH
    case = MeshCase({"tensor": NUM_PROCESSES * DEVICES_EACH}, 4)
    try:
        open_case("llama2", case, backend, paged_num_pages=24 + rank)
    except ConfigError as error:
        refusal = str(error)
    session = open_case("llama2", case, backend)
    before = addresses(session.runtime.pools)
    requests = make_requests()
    for request in requests:
        session.driver.submit(request)
    list(session.driver.run())
    held = sum(s.data.nbytes for leaf in jax.tree.leaves(session.runtime.pools) for s in leaf.addressable_shards)
    print(
        json.dumps(
            {
                "tokens": [request.tokens.tolist() for request in requests],
                "errors": [request.error for request in requests if request.error],
                "logprobs": [list(map(float, request.logprobs)) for request in requests],
                "refusal": refusal,
                "moved": addresses(session.runtime.pools) != before,
                "held": held,
                "counted": session.model.layout.total_pool_bytes(),
            }
        )
    )
    session.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
