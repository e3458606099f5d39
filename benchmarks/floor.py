"""What XLA's matrix products alone cost for a model's step: the floor under any step that uses them.

For:        the time of all projections, the MLP and an untied float32 head at some numbers of rows.
Not for:    attention, norms, sampling or transfers: they are what a step adds.
May import: the standard library, jax, maxtext_paged.cli.configuration, benchmarks.

    DECOUPLE_GCLOUD=TRUE JAX_PLATFORMS=cpu python -m benchmarks.floor .cache/models/smollm2-135m/config.yml \\
        --json out/floor.json

Each weight is an array of its own, as in the model, so a step reads as many bytes as the model's does. At few rows the
head runs on all of them; at 512, a prefill, on one.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import records

ROWS = (1, 4, 16, 32, 512)
PREFILL_ROWS = 128
"""From so many rows on a step is a prefill, and one row of it goes through the head."""


def layer_shapes(config: Any) -> list[tuple[int, int]]:
    """Of one layer's weights, ``(in, out)``: Q, K, V, output, gate, up, down."""
    emb, mlp, dim = config.emb_dim, config.mlp_dim, config.head_dim
    query, kv = config.num_query_heads * dim, config.num_kv_heads * dim
    return [(emb, query), (emb, kv), (emb, kv), (query, emb), (emb, mlp), (emb, mlp), (mlp, emb)]


def make_floor(config: Any) -> tuple[Any, Any]:
    """``(program, weights)``; the program takes weights, ``[rows, emb]`` and how many rows the head sees."""
    import jax
    import jax.numpy as jnp

    dtype = jnp.dtype(config.dtype)
    keys = iter(jax.random.split(jax.random.key(0), 8 * config.num_decoder_layers + 1))
    layers = [
        [jax.random.normal(next(keys), shape, dtype) / shape[0] ** 0.5 for shape in layer_shapes(config)]
        for _ in range(config.num_decoder_layers)
    ]
    head = jax.random.normal(next(keys), (config.emb_dim, config.vocab_size), jnp.float32)

    def step(weights: Any, hidden: Any, head_rows: int) -> Any:
        layers, head = weights
        for query, key, value, out, gate, up, down in layers:
            kept = [(hidden @ key).sum(), (hidden @ value).sum()]  # else XLA drops them
            hidden = hidden + (hidden @ query) @ out + 1e-9 * sum(kept)
            hidden = hidden + ((hidden @ gate) * (hidden @ up)) @ down
        return (hidden[:head_rows].astype(jnp.float32) @ head).argmax(-1)

    return jax.jit(step, static_argnums=2), (layers, head)


def measure(config: Any, rows: Sequence[int], *, passes: int, seconds: float, agreement: float) -> dict[int, Any]:
    """Seconds of a step at each number of rows, one figure of medians."""
    import jax
    import jax.numpy as jnp

    program, weights = make_floor(config)
    found = {}
    for count in rows:
        hidden = jnp.ones((count, config.emb_dim), jnp.dtype(config.dtype))
        head_rows = 1 if count >= PREFILL_ROWS else count
        jax.block_until_ready(program(weights, hidden, head_rows))
        medians = []
        for _ in range(passes):
            times: list[float] = []
            end = time.perf_counter() + seconds
            while time.perf_counter() < end or len(times) < 3:
                start = time.perf_counter()
                jax.block_until_ready(program(weights, hidden, head_rows))
                times.append(time.perf_counter() - start)
            medians.append(median(times))
        found[count] = records.figure(medians, agreement=agreement)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the floor; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="MaxText configuration, such as `maxtext-paged convert` writes")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0, help="of one pass at one number of rows")
    parser.add_argument("--agreement", type=float, default=records.AGREEMENT)
    parser.add_argument("--json", type=Path, help="write the record here")
    options = parser.parse_args(arguments)
    from maxtext_paged.cli.configuration import load_configuration

    config = load_configuration(options.config, options.overrides)
    found = measure(config, options.rows, passes=options.passes, seconds=options.seconds, agreement=options.agreement)
    for rows, one in found.items():
        print(f"{rows:5} rows: {one.median * 1e3:8.1f} ms a step, {rows / one.median:8.1f} rows/s  ({one.why})")
    records.write(options.json, {"floor_seconds": found, "environment": records.environment()})
    return 0


if __name__ == "__main__":
    sys.exit(main())
