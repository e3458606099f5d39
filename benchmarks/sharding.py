"""Sharded runs of tiny models against one device and against MaxText's dense forward, as one table.

For:        showing mesh x model x backend x tokens equal x bytes; the tests run a part of the same table.
Not for:    speed: eight virtual devices share this machine's cores.
May import: the standard library, numpy, jax, kv_common, kv_control, kv_execution, maxtext_paged, tests.tiny_models,
            tests.parity.

    python -m benchmarks.sharding --markdown docs/sharding.md

Leaves with status 1 if a token differs from the run on one device, a logit from the dense forward, a pool moves
between steps, or the layout counts other bytes than the devices hold.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from kv_control.plan import RequestId
from kv_control.request import Request
from kv_execution.native.library import native_available
from maxtext_paged.session import PagedSession, open_session
from tests.parity import assert_teacher_forced
from tests.tiny_models import BLOCKS, DenseModel, make_config, mesh_of

BASE, VLLM = "base.yml", "inference/vllm.yml"
RELATIVE_ERROR = 2e-5
"""Two orders of float32 summation, as a share of the largest logit."""

MODELS = {
    "llama2": "plain",
    "qwen3": "qk-norm",
    "gemma2": "window, soft cap",
    "gpt_oss": "window, sinks, MoE",
    "qwen3_moe": "qk-norm, MoE",
}
"""Decoder blocks and what is special about their attention."""

HEADS = {8: (16, 64, 256), 4: (8, 64, 256), 3: (9, 96, 258)}
"""KV heads: query heads, embedding and vocabulary. 9 and 3 are SmolLM2's; 3 shards need sizes that 3 divides."""

REQUESTS = [(3, 12), (13, 6), (9, 8), (1, 9), (6, 5)]
"""Prompt and completion lengths: chunks and decodes share steps of 8 tokens, and a fifth request waits."""


@dataclass(frozen=True)
class MeshCase:
    """One mesh. ``sizes``: axes of several devices; ``kv_heads``: of the models run on it."""

    sizes: Mapping[str, int]
    kv_heads: int
    rules: str = BASE
    models: tuple[str, ...] = ("llama2", "qwen3", "gemma2", "gpt_oss")

    @property
    def name(self) -> str:
        return " x ".join(f"{axis}={size}" for axis, size in self.sizes.items()) or "one device"


MESHES = (
    MeshCase({"tensor": 2}, 8),
    MeshCase({"tensor": 4}, 8),
    MeshCase({"tensor": 8}, 8),
    MeshCase({"tensor": 4, "fsdp": 2}, 4),
    MeshCase({"tensor": 3}, 3, models=("llama2", "gemma2", "gpt_oss")),
    MeshCase({"tensor": 2, "tensor_sequence": 2, "autoregressive": 2}, 8, models=("llama2", "gpt_oss")),
    MeshCase({"data": 8}, 4, models=("llama2", "gpt_oss")),
    MeshCase({"fsdp": 8}, 4, models=("llama2", "gpt_oss")),
    MeshCase({"tensor": 2, "data": 2, "fsdp_transpose": 2}, 4, models=("llama2",)),
    MeshCase({"expert": 4}, 4, models=("gpt_oss", "qwen3_moe")),
    MeshCase({"tensor": 2, "expert": 2}, 4, models=("gpt_oss", "qwen3_moe")),
    MeshCase({"model": 2, "expert": 2}, 4, VLLM, ("llama2", "gpt_oss", "qwen3_moe")),
    MeshCase({"data": 2, "attn_dp": 2, "model": 2}, 4, VLLM, ("llama2", "gemma2")),
)
BACKENDS = ("native", "reference")


@dataclass(frozen=True)
class Outcome:
    """What one run did.

    Attributes:
      tokens: of each request, prompt included. worst: largest logprob error against dense.
      moved: shards of pools that were elsewhere at the end than at the start.
      head_axes: mesh axes that shard KV heads. head_shards, pool_replicas: of the layout.
      counted_bytes, held_bytes: of all pools; by the layout, and summed over the devices' shards.
      device_bytes: of all pools on each device; a single number if all hold the same.
    """

    tokens: list[list[int]]
    worst: float
    moved: int
    head_axes: tuple[str, ...]
    head_shards: int
    pool_replicas: int
    counted_bytes: int
    held_bytes: int
    device_bytes: tuple[int, ...]


def options_of(model: str, kv_heads: int) -> dict[str, Any]:
    """A tiny model's sizes for so many KV heads."""
    query_heads, emb, vocab = HEADS[kv_heads]
    sizes = {
        "base_num_query_heads": query_heads,
        "base_num_kv_heads": kv_heads,
        "base_emb_dim": emb,
        "base_mlp_dim": 2 * emb,
        "vocab_size": vocab,
    }
    # Dense experts: ragged_dot is refused where an axis shards experts.
    experts = {"base_moe_mlp_dim": 2 * emb, "sparse_matmul": False}
    return sizes | (experts if "num_experts" in BLOCKS[model] else {})


@functools.cache
def dense_of(model: str, kv_heads: int) -> DenseModel:
    """MaxText's dense forward on one device, whose random weights all runs share."""
    return DenseModel(model, **options_of(model, kv_heads))


def open_case(model: str, case: MeshCase, backend: str, **options: Any) -> PagedSession:
    """A session on the case's mesh with the dense model's weights."""
    pool = {
        "paged_tokens_per_page": 4,
        "paged_num_pages": 24,
        "paged_max_num_seqs": 4,
        "paged_max_num_batched_tokens": 8,  # one rung: one program
        "paged_backend": backend,
    }
    config = make_config(model, rules=case.rules, **{**options_of(model, case.kv_heads), **pool, **options})
    return open_session(config, mesh=mesh_of(config, case.sizes), params=dense_of(model, case.kv_heads).params)


def addresses(pools: Any) -> list[int]:
    """Where every shard of every pool lies."""
    return [shard.data.unsafe_buffer_pointer() for leaf in jax.tree.leaves(pools) for shard in leaf.addressable_shards]


def make_requests(vocab_size: int = 255) -> list[Request]:
    """The requests of every run."""
    rng = np.random.default_rng(0)
    return [
        Request(RequestId(i), rng.integers(1, vocab_size, prompt), max_tokens=new, want_prompt_logprobs=True)
        for i, (prompt, new) in enumerate(REQUESTS)
    ]


def run_case(model: str, case: MeshCase, backend: str) -> Outcome:
    """Run all requests; every token is held against the dense forward.

    Raises:
      AssertionError: a token is not dense's argmax, or a logprob is not dense's.
    """
    session = open_case(model, case, backend)
    before = addresses(session.runtime.pools)
    requests = make_requests()
    for request in requests:
        session.driver.submit(request)
    list(session.driver.run())
    failed = [request.error for request in requests if request.error]
    assert not failed, failed[0]
    worst = assert_teacher_forced(requests, dense_of(model, case.kv_heads), relative=RELATIVE_ERROR, pad_to=32)
    pools = session.runtime.pools
    held: dict[Any, int] = {}
    for leaf in jax.tree.leaves(pools):
        for shard in leaf.addressable_shards:
            held[shard.device] = held.get(shard.device, 0) + shard.data.nbytes
    layout = session.model.layout
    outcome = Outcome(
        tokens=[request.tokens.tolist() for request in requests],
        worst=worst,
        moved=sum(one != other for one, other in zip(before, addresses(pools), strict=True)),
        head_axes=session.model.head_axes,
        head_shards=layout.head_shards,
        pool_replicas=layout.pool_replicas,
        counted_bytes=session.model.total_pool_bytes(),
        held_bytes=sum(held.values()),
        device_bytes=tuple(sorted(set(held.values()))),
    )
    session.close()
    return outcome


@functools.cache
def one_device(model: str, kv_heads: int) -> Outcome:
    """The run that the sharded ones are compared with: one device, the default backend."""
    return run_case(model, MeshCase({}, kv_heads), "auto")


def title_of(case: MeshCase, model: str, backend: str) -> list[str]:
    """The first cells of a line."""
    rules = " (vllm.yml)" if case.rules == VLLM else ""
    return [case.name + rules, f"{model} ({MODELS[model]})", str(case.kv_heads), backend]


def row_of(model: str, case: MeshCase, backend: str, outcome: Outcome) -> tuple[bool, list[str]]:
    """Whether a run is as it should be, and its line of the table."""
    alone = one_device(model, case.kv_heads)
    num_tokens = sum(new for _, new in REQUESTS)
    equal = outcome.tokens == alone.tokens
    good = (
        equal and not outcome.moved and outcome.counted_bytes == outcome.held_bytes and len(outcome.device_bytes) == 1
    )
    return good, [
        *title_of(case, model, backend),
        f"{num_tokens} of {num_tokens}" if equal else "NO",
        f"{outcome.worst:.0e}",
        f"{outcome.head_shards} x {outcome.pool_replicas}",
        " to ".join(map(str, outcome.device_bytes)),
        f"{outcome.held_bytes}"
        + ("" if outcome.held_bytes == outcome.counted_bytes else f" NOT {outcome.counted_bytes}"),
    ]


TITLES = [
    "mesh",
    "model",
    "KV heads",
    "backend",
    "tokens equal",
    "worst logprob error",
    "shards x replicas",
    "pool bytes a device",
    "in all",
]
BEGIN, END = "<!-- benchmarks.sharding -->", "<!-- end -->"


def table_rows() -> list[tuple[MeshCase, str, str]]:
    """Every row of the table: mesh, model and backend, in order."""
    return [(case, model, backend) for case in MESHES for model in case.models for backend in BACKENDS]


def key_of(row: Sequence[str]) -> tuple[str, ...]:
    """What identifies a line of the table: mesh, model, KV heads, backend."""
    return tuple(row[:4])


def read_table(path: Path) -> list[list[str]]:
    """The lines of a document's table, without its head."""
    inside = path.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0]
    return [line.strip("| ").split(" | ") for line in inside.strip().splitlines()[2:]]


def write_table(path: Path, rows: Sequence[Sequence[str]]) -> None:
    """Put lines into a document's table, keeping those of other runs that the matrix still has, in its order."""
    known = {key_of(row): row for row in [*read_table(path), *rows]}
    order = [key_of(title_of(*case)) for case in table_rows()]
    lines = [TITLES, ["---"] * len(TITLES), *(known[key] for key in order if key in known)]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    head, rest = path.read_text(encoding="utf-8").split(BEGIN)
    path.write_text(f"{head}{BEGIN}\n{table}\n{END}{rest.split(END, 1)[1]}", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--markdown", type=Path, help="a document to write the table into, between its marks")
    parser.add_argument("--mesh", nargs="+", help="run these meshes only, such as 'tensor=4 x fsdp=2'")
    options = parser.parse_args(arguments)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    if (missing := native_available()) is not None:
        print(f"benchmarks.sharding: the native backend is not built: {missing}", file=sys.stderr)
        return 1
    rows, all_good = [], True
    for case, model, backend in table_rows():
        if options.mesh and case.name not in options.mesh:
            continue
        good, row = row_of(model, case, backend, run_case(model, case, backend))
        all_good, _ = all_good and good, rows.append(row)
        print("  ".join(row), flush=True)
    if options.markdown and all_good:
        write_table(options.markdown, rows)
    return 0 if rows and all_good else 1


if __name__ == "__main__":
    sys.exit(main())
