"""What each KV dtype costs in accuracy and saves in bytes and time, on a real model: the tables of docs/kv-dtypes.md.

For:        choosing ``paged_kv_dtype``: agreement with float32 pools, planned and real bytes, decode attention's time.
Not for:    throughput of whole runs (benchmarks/serving.py).
May import: the standard library, numpy, jax, maxtext, kv_common, kv_control, kv_execution, maxtext_paged.

    python -m benchmarks.kv_dtype .cache/models/smollm2-135m/config.yml --docs docs/kv-dtypes.md

Every arm reads the same text, teacher-forced, in this project's own loop: one request scores it, and then one request
for each of its beginnings says what would come next. Those find the whole beginning in the prefix cache, so what
is compared was read from pages of that dtype. Arms of a backend differ in ``paged_kv_dtype`` alone, and are held
against that backend's float32. Leaves with status 1 if a pool's arrays are not of the bytes that were planned, if
another backend ran than was asked for, or if a beginning was not found in the cache.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from maxtext.configs import pyconfig
from numpy.typing import NDArray

from benchmarks.attention import bandwidth, machine, matmul_rate, measure
from kv_control.plan import RequestId
from kv_control.request import Request
from maxtext_paged.config import PagedMaxTextConfig
from maxtext_paged.session import PagedSession, open_session
from maxtext_paged.tokenizer import load_tokenizer

ROOT = Path(__file__).parents[1]
TEXT = ("docs/adr/0001-binding-not-patching.md", "docs/adr/0002-native-cpu-kernels.md")
"""What is read unless another text is given."""

DTYPES = ("float32", "bfloat16", "float8_e4m3fn", "int8")
TOKENS_PER_PAGE, ROWS = 4, 16
"""Small pages: the last tokens of a beginning, those past its last whole page, are computed again."""

CONTEXT, BATCH = 4096, 4
"""Of the decode attention that is timed."""


class NotMeasured(Exception):
    """An arm did not do what it is named after."""


@dataclass(frozen=True)
class Arm:
    """One backend and dtype over the text.

    Attributes:
      planned_bytes, real_bytes: of the pools on one device, as the layout counts them and as the arrays have them.
      token_bytes: planned, for one token of all layers.
      choices: after each beginning, the most likely token. logprobs: of each token of the text, given those before it.
    """

    backend: str
    dtype: str
    planned_bytes: int
    real_bytes: int
    token_bytes: float
    choices: NDArray[np.int64]
    logprobs: NDArray[np.float64]


@dataclass(frozen=True)
class Accuracy:
    """An arm against float32 on the same backend.

    Attributes:
      top1: share of beginnings after which both would choose the same token.
      mean_difference, worst_difference: of the logprobs of the text's own tokens, absolute.
      mean_logprob: of the text under this arm.
    """

    backend: str
    dtype: str
    token_bytes: float
    share_of_bytes: float
    top1: float
    mean_difference: float
    worst_difference: float
    mean_logprob: float
    num_tokens: int


def read_text(session: PagedSession, backend: str, tokens: NDArray[np.int64]) -> Arm:
    """Run the text through a session.

    Raises:
      NotMeasured: see the module.
    """
    layout = session.model.layout
    if session.backend.name != backend:
        raise NotMeasured(f"paged_backend={backend} ran {session.backend.name}: {session.backend.reason}")
    real = sum(leaf.nbytes for leaf in jax.tree.leaves(session.runtime.pools))
    if real != layout.device_pool_bytes():
        raise NotMeasured(f"{layout.dtype}: {layout.device_pool_bytes()} bytes were planned, the arrays have {real}")
    whole = Request(RequestId(0), tokens, max_tokens=1, want_prompt_logprobs=True)
    beginnings = [Request(RequestId(n), tokens[:n], max_tokens=1) for n in range(1, len(tokens))]
    for requests in ([whole], beginnings):
        for request in requests:
            session.driver.submit(request)
        for request in session.driver.run():
            if request.error:
                raise NotMeasured(f"{backend} {layout.dtype}: {request.error}")
    page = layout.tokens_per_page
    for request in beginnings:
        if request.num_cached_tokens != (len(request.prompt) - 1) // page * page:
            raise NotMeasured(f"of {len(request.prompt)} tokens, {request.num_cached_tokens} were found in the cache")
    return Arm(
        backend=backend,
        dtype=layout.dtype,
        planned_bytes=layout.device_pool_bytes(),
        real_bytes=real,
        token_bytes=layout.page_bytes() / page,
        choices=np.array([request.tokens[-1] for request in beginnings], np.int64),
        logprobs=np.asarray(whole.prompt_logprobs[1:], np.float64),
    )


def compared(arm: Arm, exact: Arm) -> Accuracy:
    """An arm against the float32 one."""
    difference = np.abs(arm.logprobs - exact.logprobs)
    return Accuracy(
        backend=arm.backend,
        dtype=arm.dtype,
        token_bytes=arm.token_bytes,
        share_of_bytes=arm.token_bytes / exact.token_bytes,
        top1=float((arm.choices == exact.choices).mean()),
        mean_difference=float(difference.mean()),
        worst_difference=float(difference.max()),
        mean_logprob=float(arm.logprobs.mean()),
        num_tokens=len(arm.logprobs),
    )


def accuracies(
    make_config: Callable[[Mapping[str, Any]], Any],
    tokens: NDArray[np.int64],
    *,
    backends: Sequence[str],
    dtypes: Sequence[str],
    params: Any = None,
) -> list[Accuracy]:
    """Every backend and dtype over the text, each against that backend's float32.

    Args:
      make_config: a MaxText configuration with the given ``paged_*`` options on top.
      params: weights for all; by default the configuration's checkpoint.
    """
    found = []
    for backend in backends:
        exact = None
        for dtype in dict.fromkeys(["float32", *dtypes]):
            session = open_session(make_config({"paged_backend": backend, "paged_kv_dtype": dtype}), params=params)
            try:
                arm = read_text(session, backend, tokens)
            finally:
                session.close()
            exact = exact or arm
            found.append(compared(arm, exact))
            print(accuracy_row(found[-1]), flush=True)
    return found


def options_for(num_tokens: int) -> dict[str, Any]:
    """Options of every arm: a pool that holds the text and all rows' own pages, and steps of a few tokens a row."""
    pages = -(-(num_tokens + 1) // TOKENS_PER_PAGE)
    return {
        "max_target_length": num_tokens + 2,
        "paged_tokens_per_page": TOKENS_PER_PAGE,
        "paged_num_pages": pages + 2 * ROWS + 2,
        "paged_max_num_seqs": ROWS,
        "paged_max_num_batched_tokens": ROWS * TOKENS_PER_PAGE,
        "paged_enable_prefix_cache": True,
        "paged_file_order": "input",
    }


def accuracy_row(row: Accuracy) -> str:
    """One line of the accuracy table."""
    return (
        f"| {row.backend} | `{row.dtype}` | {row.token_bytes:,.0f} | {row.share_of_bytes:.3f} | {row.top1:.1%} | "
        f"{row.mean_difference:.5f} | {row.worst_difference:.4f} | {row.mean_logprob:.4f} |"
    )


def accuracy_table(rows: Sequence[Accuracy]) -> str:
    """The accuracy table, in Markdown."""
    head = (
        "| backend | `paged_kv_dtype` | bytes a token | of float32 | top-1 agreement | mean difference of logprobs | "
        "worst | mean logprob of the text |\n" + "| --- " * 8 + "|"
    )
    return "\n".join([head, *map(accuracy_row, rows)])


def speeds(shapes: Sequence[str], dtypes: Sequence[str], *, seconds: float, passes: int) -> list[dict[str, Any]]:
    """Native decode attention, ``BATCH`` rows of ``CONTEXT`` tokens: each dtype in turn, several times."""
    one_core, matmul = bandwidth(1), matmul_rate()
    cells: dict[tuple[str, str], list[Any]] = {}
    for _ in range(passes):
        for shape in shapes:
            for dtype in dtypes:
                [cell] = measure(
                    "decode", shape, dtype, CONTEXT, BATCH,
                    one_core=one_core, matmul=matmul, budget=seconds, arms=("native",),
                )  # fmt: skip
                cells.setdefault((shape, dtype), []).append(cell)
    found = []
    for (shape, dtype), measured in cells.items():
        best = min(measured, key=lambda cell: cell.seconds)
        spread = max(cell.seconds for cell in measured) / best.seconds
        found.append({"shape": shape, "dtype": dtype, "passes_spread": spread, **asdict(best)})
    return found


def speed_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The speed table, in Markdown: the best of the passes, and how far the worst was from it."""
    exact = {row["shape"]: row["seconds"] for row in rows if row["dtype"] == "float32"}
    lines = [
        "| query heads / KV heads x head size | dtype | ms | of float32 | GB/s | slowest over fastest pass |",
        "| --- " * 6 + "|",
    ]
    for row in rows:
        share = f"{row['seconds'] / exact[row['shape']]:.2f}" if row["shape"] in exact else ""
        lines.append(
            f"| {row['shape']} | `{row['dtype']}` | {row['seconds'] * 1e3:.2f} | {share} | "
            f"{row['gigabytes_per_second']:.1f} | {row['passes_spread']:.2f} |"
        )
    return "\n".join(lines)


def filled(text: str, marker: str, table: str) -> str:
    """``text`` with what stands between a marker and its end exchanged."""
    start = text.index(f"<!-- {marker} -->\n") + len(f"<!-- {marker} -->\n")
    return text[:start] + table + "\n" + text[text.index("<!-- end -->", start) :]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and write the tables; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="a model's MaxText configuration")
    parser.add_argument("--text", type=Path, help="a file to read; by default two of this project's records")
    parser.add_argument("--tokens", type=int, default=1001, help="of the text; all but the first are scored")
    parser.add_argument("--backends", nargs="*", default=("native", "reference"))
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument("--shapes", nargs="*", default=("9/3x64", "32/8x128", "8/8x128"), help="of decode attention")
    parser.add_argument("--seconds", type=float, default=1.0, help="seconds a cell of decode attention")
    parser.add_argument("--passes", type=int, default=3, help="passes over the cells of decode attention")
    parser.add_argument("--docs", type=Path, help="write the tables here, between their markers")
    parser.add_argument("--json", type=Path, help="write the record here")
    options = parser.parse_args(arguments)
    paths = [options.text] if options.text else [ROOT / name for name in TEXT]
    text = "\n".join(path.read_text(encoding="utf-8") for path in paths)

    def make_config(extra: Mapping[str, Any]) -> Any:
        words = [f"{key}={value}" for key, value in {**options_for(options.tokens), **extra}.items()]
        fixed = ["run_name=kv_dtype", "hardware=cpu", "log_config=false", "base_output_directory=unused"]
        return pyconfig.initialize(["kv_dtype", options.config, *fixed, *words], config_class=PagedMaxTextConfig)

    try:
        rows: list[Accuracy] = []
        if options.backends:
            tokens = np.array(load_tokenizer(make_config({})).encode(text)[: options.tokens], np.int64)
            if len(tokens) < options.tokens:
                raise NotMeasured(f"the text has {len(tokens)} tokens, --tokens={options.tokens} are wanted")
            rows = accuracies(make_config, tokens, backends=options.backends, dtypes=options.dtypes)
        timed = speeds(options.shapes, options.dtypes, seconds=options.seconds, passes=options.passes)
    except NotMeasured as error:
        print(f"benchmarks.kv_dtype: {error}", file=sys.stderr)
        return 1
    tables = {"accuracy": accuracy_table(rows)} if rows else {}
    if timed:
        tables["speed"] = speed_table(timed)
        print(tables["speed"])
    if options.docs:
        page = options.docs.read_text(encoding="utf-8")
        for marker, table in tables.items():
            page = filled(page, marker, table)
        options.docs.write_text(page, encoding="utf-8")
    if options.json:
        record = {"machine": machine(), "text": hashlib.sha256(text.encode()).hexdigest(), "decode": timed}
        record["accuracy"] = [asdict(row) for row in rows]
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
