"""Whole runs on meshes: the tokens of one device, the logits of MaxText's dense forward, pools where they were.

The cases are lines of ``benchmarks.sharding``'s table, chosen so that each mesh, model and backend occurs.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.sharding import MESHES, TITLES, key_of, one_device, read_table, run_case, table_rows, title_of
from kv_execution.native.library import native_available

pytestmark = pytest.mark.maxtext

DOCUMENT = Path(__file__).parents[2] / "docs" / "sharding.md"
BY_NAME = {case.name: case for case in MESHES}
CASES = [
    ("tensor=2", "gpt_oss", "reference"),
    ("tensor=4", "qwen3", "native"),
    ("tensor=8", "gpt_oss", "native"),
    ("tensor=4 x fsdp=2", "gemma2", "reference"),
    ("tensor=3", "llama2", "native"),
    ("data=8", "llama2", "native"),
    ("tensor=2 x expert=2", "qwen3_moe", "native"),
    ("model=2 x expert=2", "llama2", "native"),
]
REGIMES = {
    "tensor=2": (2, 1),
    "tensor=4": (4, 1),
    "tensor=8": (8, 1),
    "tensor=4 x fsdp=2": (4, 2),
    "tensor=3": (3, 1),
    "data=8": (1, 8),
    "tensor=2 x expert=2": (2, 2),
    "model=2 x expert=2": (4, 1),
}
"""Head shards and replicas. ``data=8`` runs steps of one row ``[1, T]``: batch 1 on data axes."""
IN_LONG_RUNS = CASES[:2]
"""Meshes of two and of four, whose kind of sharding three and eight have too."""


@pytest.mark.slow
@pytest.mark.multi_device
@pytest.mark.parametrize(
    ("mesh", "model", "backend"),
    [pytest.param(*case, marks=[pytest.mark.long] if case in IN_LONG_RUNS else []) for case in CASES],
)
def test_a_mesh_gives_the_tokens_of_one_device_and_the_logits_of_dense(mesh: str, model: str, backend: str) -> None:
    if backend == "native" and native_available() is not None:
        pytest.skip(str(native_available()))
    case = BY_NAME[mesh]
    outcome = run_case(model, case, backend)  # compares with dense itself
    assert outcome.tokens == one_device(model, case.kv_heads).tokens
    assert outcome.moved == 0, "donation must keep every shard where it is"
    assert (outcome.head_shards, outcome.pool_replicas) == REGIMES[mesh]
    assert outcome.counted_bytes == outcome.held_bytes
    assert len(outcome.device_bytes) == 1, "every device holds the same share"
    assert outcome.held_bytes == outcome.device_bytes[0] * outcome.head_shards * outcome.pool_replicas


def test_the_documents_table_has_every_line_and_no_difference() -> None:
    rows = {key_of(row): dict(zip(TITLES, row, strict=True)) for row in read_table(DOCUMENT)}
    assert set(rows) == {key_of(title_of(*case)) for case in table_rows()}
    for row in rows.values():
        assert row["tokens equal"] == "40 of 40"
        assert float(row["worst logprob error"]) < 1e-5
        shards, replicas = map(int, row["shards x replicas"].split(" x "))
        assert int(row["in all"]) == int(row["pool bytes a device"]) * shards * replicas
