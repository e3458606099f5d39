"""Model families through the one binding, each against MaxText's own dense forward, as one table.

For:        showing family x backend x tensor=2: tokens, logits, or the refusal; the tests run these cases.
Not for:    speed; other meshes (benchmarks/sharding.py).
May import: the standard library, numpy, jax, kv_common, kv_control, kv_execution, maxtext_paged, tests.tiny_models,
            tests.parity.

    python -m benchmarks.families --markdown docs/families.md

A case is a tiny model of configs/test: prompts in chunks, decodes and preemptions share flat steps of 4 or 8 tokens,
and contexts outgrow every window. Leaves with status 1 if a token is not dense's, a logit is further off than
two orders of float32 summation, or nothing was preempted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
from maxtext.common.common_types import DecoderBlockType

from kv_common.errors import KvCacheError, UnsupportedError
from kv_common.page_table import PageRow, pack_page_table
from kv_control.plan import RequestId
from kv_control.request import Request
from kv_execution.metadata import PageMetadata, SamplingInputs, StepInputs
from kv_execution.native.library import native_available
from maxtext_paged.assembly import assemble
from maxtext_paged.families import SUPPORTED_BLOCKS, require_supported_block
from maxtext_paged.session import PagedSession, open_session
from tests.parity import assert_teacher_forced
from tests.tiny_models import DenseModel, dense_model, make_config, make_mesh, mesh_of

RELATIVE_ERROR = 2e-5
"""Two orders of float32 summation, as a share of the largest logit."""

FAMILIES = {
    "default": "MaxText's default layer",
    "llama2": "plain",
    "llama3_1": "scaled, interleaved RoPE",
    "mistral": "plain",
    "mixtral": "MoE",
    "gemma": "tied head",
    "gemma2": "local and global attention in each layer, soft caps",
    "gemma3": "5 local layers to 1 global, two RoPE bases, QK norms",
    "qwen2": "QKV biases",
    "qwen3": "QK norms",
    "qwen3_moe": "QK norms, MoE",
    "gpt_oss": "local and global layers, sinks, biases, YaRN, MoE",
    "olmo3": "3 local layers to 1 global, QK norms over all heads, YaRN",
    "llama4": "chunked local layers, layers without RoPE, temperature, MoE with a shared expert",
    "envy": "QK norms, every other layer MoE",
}
"""Configurations of configs/test, and what is special about them."""

REFUSED_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama 4 past its first chunk": ("llama4", {"chunk_attn_window_size": 32}),
    "MoE that drops tokens": ("mixtral", {"capacity_factor": 1.25}),
    "MoE as interpreted Pallas": ("mixtral", {"megablox": True}),
    "quantised weights": ("llama2", {"quantization": "int8"}),
    "YaRN past its tables": ("gpt_oss", {"max_position_embeddings": 32}),
}
"""Within the families: a configuration, and what is set on top that is refused."""

BACKENDS = ("native", "reference")
SIZES = [(3, 25), (13, 6), (9, 20), (1, 9), (6, 25), (30, 8)]
"""Prompt and completion lengths. Windows hold 8 tokens; the four that run at once outgrow the pool."""

POOL = {
    "paged_tokens_per_page": 4,
    "paged_num_pages": 14,
    "paged_max_num_seqs": 4,
    "paged_max_num_batched_tokens": 4,  # two rungs: two programs
    "paged_check_invariants": True,
    "paged_poison_on_free": True,
}
LOGIT_RUNG = 8
"""Tokens of those steps; PAGE_TABLE: the pages of each request, in any order."""
PAGE_TABLE = np.array([[3, 5, 7, 2, 8, 10], [0, 13, 9, 11, 1, 4]], np.int32)  # page 0 and the last are like any other
STEPS = [
    *([(0, start, 8)] for start in (0, 8)),  # a prompt in chunks
    *([(0, 16 + i, 1), (1, 7 * i, 7)] for i in range(2)),  # decodes beside another's chunks
    *([(0, 18 + i, 1), (1, 14 + i, 1)] for i in range(4)),  # decodes alone
]
"""(request, first position, tokens) of each flat step whose every logit is compared."""


def open_family(family: str, backend: str, *, tensor: int = 1) -> PagedSession:
    """A session with the dense model's weights and a pool that must preempt."""
    config = make_config(family, paged_backend=backend, **POOL)
    mesh = make_mesh(config) if tensor == 1 else mesh_of(config, {"tensor": tensor})
    return open_session(config, mesh=mesh, params=dense_model(family).params)


def run_requests(session: PagedSession, dense: DenseModel) -> float:
    """Run all requests; the largest error of a logprob.

    Raises:
      AssertionError: a token is not dense's argmax, a logprob is not dense's, or nothing was preempted.
    """
    rng = np.random.default_rng(0)
    requests = [
        Request(
            RequestId(i), rng.integers(1, session.model.vocab_size - 1, n), max_tokens=new, want_prompt_logprobs=True
        )
        for i, (n, new) in enumerate(SIZES)
    ]
    for request in requests:
        session.driver.submit(request)
    list(session.driver.run())
    failed = [request.error for request in requests if request.error]
    assert not failed, failed[0]
    assert session.driver.metrics.num_preemptions > 0
    assert session.control.num_free_pages == session.control.num_pages
    return assert_teacher_forced(requests, dense, relative=RELATIVE_ERROR)


def logits_error(session: PagedSession, dense: DenseModel) -> float:
    """Run STEPS over the bound model; the largest error of any logit, as a share of the largest logit."""
    model = session.model
    step = jax.jit(
        lambda params, pools, inputs: model.forward(params, pools, inputs.token_ids, inputs),
        donate_argnums=1,
        out_shardings=(None, None, model.pool_sharding),
    )
    tokens = np.random.default_rng(1).integers(1, model.vocab_size - 1, (2, 24))
    pools, rows = model.create_pools(), ([], [])
    for segments in STEPS:
        logits, _, pools = step(session.runtime.params, pools, _step_inputs(segments, tokens))
        row = 0
        for request, _, count in segments:
            rows[request].append(np.asarray(logits)[row : row + count])
            row += count
    worst = 0.0
    for request, parts in enumerate(rows):
        got = np.concatenate(parts)
        expected = dense.logits(tokens[request], pad_to=64)[: len(got)]
        worst = max(worst, float(np.abs(got - expected).max() / np.abs(expected).max()))
    return worst


def _step_inputs(segments: Sequence[tuple[int, int, int]], tokens: np.ndarray) -> StepInputs:
    """One flat step that returns the logits of every row, built without the product's runtime."""
    page, rung = POOL["paged_tokens_per_page"], LOGIT_RUNG
    rows = [PageRow(start, count, PAGE_TABLE[r, : -(-(start + count) // page)]) for r, start, count in segments]
    table = pack_page_table(
        rows,
        num_pages=POOL["paged_num_pages"],
        tokens_per_page=page,
        token_rung=rung,
        row_rung=4,
        index_capacity=POOL["paged_num_pages"],
    )
    ids = np.zeros(rung, np.int32)
    fed = np.concatenate([tokens[r, start : start + count] for r, start, count in segments])
    ids[: len(fed)] = fed
    whole, floats, words = np.zeros(4, np.int32), np.zeros(4, np.float32), np.zeros(4, np.uint32)
    return StepInputs(
        token_ids=ids,
        previous_index=np.full(rung, -1, np.int32),
        segment_ids=np.where(table.row_of_token < 4, table.row_of_token + 1, 0).astype(np.int32),
        pages=PageMetadata.from_table(table),
        sample_rows=np.arange(rung, dtype=np.int32),
        num_samples=np.asarray(rung, np.int32),
        sampling=SamplingInputs(floats, whole, floats, floats, words, whole, whole),
        target_rows=np.zeros(rung, np.int32),
        targets=np.zeros(rung, np.int32),
        num_targets=np.asarray(0, np.int32),
    )


def refusal(family: str, **options: Any) -> str:
    """Why a configuration is refused, as its user reads it.

    Raises:
      AssertionError: it is not refused.
    """
    config = make_config(family, **options)
    try:
        assemble(config, mesh=make_mesh(config))
    except KvCacheError as error:
        return str(error)
    raise AssertionError(f"{family} with {options} is not refused")


def refused_blocks() -> dict[str, str]:
    """Each decoder block of MaxText that is off the allow-list, and what its user reads."""
    found = {}
    for block in sorted(set(DecoderBlockType) - SUPPORTED_BLOCKS, key=lambda block: block.value):
        try:
            require_supported_block(SimpleNamespace(decoder_block=block))
        except UnsupportedError as error:
            found[block.value] = str(error)
    return found


@dataclass(frozen=True)
class Outcome:
    """What one family did.

    Attributes:
      logits: largest error of any logit on one device, as a share of the largest logit, by backend.
      sharded: largest error of any logprob on native kernels at tensor=2.
    """

    logits: dict[str, float]
    sharded: float

    @property
    def good(self) -> bool:
        """Whether every logit is dense's; tokens and logprobs were compared when they were made."""
        return all(error <= RELATIVE_ERROR for error in self.logits.values())


def run_family(family: str) -> Outcome:
    """Both backends on one device, native kernels on two."""
    dense, logits = dense_model(family), {}
    for backend in BACKENDS:
        session = open_family(family, backend)
        run_requests(session, dense)
        logits[backend] = logits_error(session, dense)
        session.close()
    session = open_family(family, "native", tensor=2)
    sharded = run_requests(session, dense)
    session.close()
    return Outcome(logits, sharded)


TITLES = ["family", "special", *BACKENDS, "native, tensor=2", "verdict"]


def row_of(family: str, outcome: Outcome) -> list[str]:
    """A family's line of the table."""
    errors = [f"{error:.0e}" for error in (*(outcome.logits[backend] for backend in BACKENDS), outcome.sharded)]
    return [f"`{family}`", FAMILIES[family], *errors, "supported" if outcome.good else "NOT DENSE'S"]


def table_of(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Lines of a Markdown table."""
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def refusals() -> dict[str, str]:
    """The two tables of what is refused, by mark."""
    models = [
        [
            name,
            f"`{family}` with " + ", ".join(f"`{key}={value}`" for key, value in options.items()),
            refusal(family, **options),
        ]
        for name, (family, options) in REFUSED_MODELS.items()
    ]
    blocks = [[f"`{block}`", "refused", reason.split("; supported")[0]] for block, reason in refused_blocks().items()]
    return {
        "models": table_of(["what", "set", "what its user reads"], models),
        "blocks": table_of(["decoder block", "verdict", "what its user reads"], blocks),
    }


def read_table(text: str, mark: str) -> str:
    """The table between a document's marks."""
    return text.split(f"<!-- {mark} -->\n")[1].split("\n<!-- end -->")[0]


def with_table(text: str, mark: str, table: str) -> str:
    """``text`` with another table between its marks."""
    head, rest = text.split(f"<!-- {mark} -->\n")
    return f"{head}<!-- {mark} -->\n{table}\n<!-- end -->{rest.split('<!-- end -->', 1)[1]}"


def cells(table: str) -> list[list[str]]:
    """The lines of a table, without its head."""
    return [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--markdown", type=Path, help="a document to write the tables into, between their marks")
    parser.add_argument("--family", nargs="+", choices=FAMILIES, help="run these only; other lines stay as they are")
    options = parser.parse_args(arguments)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    if (missing := native_available()) is not None:
        print(f"benchmarks.families: the native backend is not built: {missing}", file=sys.stderr)
        return 1
    rows, all_good = {}, True
    for family in options.family or FAMILIES:
        outcome = run_family(family)
        all_good = all_good and outcome.good
        rows[f"`{family}`"] = row_of(family, outcome)
        print("  ".join(rows[f"`{family}`"]), flush=True)
    if options.markdown and all_good:
        text = options.markdown.read_text(encoding="utf-8")
        known = {row[0]: row for row in cells(read_table(text, "families"))} | rows
        order = [known[f"`{family}`"] for family in FAMILIES if f"`{family}`" in known]
        for mark, table in {"families": table_of(TITLES, order), **refusals()}.items():
            text = with_table(text, mark, table)
        options.markdown.write_text(text, encoding="utf-8")
    return 0 if all_good else 1


if __name__ == "__main__":
    sys.exit(main())
