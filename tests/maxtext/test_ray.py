"""``maxtext_paged.ray`` on a real cluster of two actors: every row once, whoever dies, in memory that does not grow.

The parts that need no ray are tested everywhere.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maxtext_paged.generation import Generation
from tests.cli_runs import POOL, ROOT, environment, tiny_model
from tests.ray_job import answer

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

from maxtext_paged.intake import id_digest  # noqa: E402
from maxtext_paged.ray import Generate, _write_batch, batch_name, finished_ids, missing, prefix_key  # noqa: E402

pytestmark = pytest.mark.maxtext
needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="ray is not installed: pip install 'maxtext-paged[ray]'"
)


class Noting:
    """Answers with prompts reversed, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    def generate(self, prompts: Any, params: Any = None) -> list[Generation]:
        self.asked += list(prompts)
        return [answer(index, row) for index, row in enumerate(prompts)]


def test_a_batch_keeps_its_columns_and_each_row_its_own_error() -> None:
    engine = Noting()
    generate = Generate(params={"max_tokens": 4, "temperature": 0.5}, make_engine=lambda: engine)
    batch = pyarrow.table(
        {"id": ["a", "b", "c"], "prompt": ["one", "", "three"], "max_tokens": [None, 2, 3], "note": [7, 8, 9]}
    )
    found = generate(batch).to_pylist()
    assert [row["note"] for row in found] == [7, 8, 9]
    assert [row["text"] for row in found] == ["eno", None, "eerht"]
    assert [row["status_code"] for row in found] == [200, 400, 200]
    assert found[1]["error"] == {"message": "prompt is empty", "code": "empty_prompt", "type": "invalid_request_error"}
    assert [row["max_tokens"] for row in engine.asked] == [4, 2, 3]
    assert all("note" not in row for row in engine.asked), "only what a row may say is asked"


def test_batches_have_the_same_columns_whatever_is_in_them() -> None:
    generate = Generate(make_engine=Noting)
    kinds = {
        str(generate(pyarrow.table({"id": ids, "prompt": prompts})).schema)
        for ids, prompts in ((["a"], ["x"]), (["b"], [""]), (["c", "d"], ["", "y"]))
    }
    assert len(kinds) == 1


def test_a_row_without_a_seed_has_the_same_one_in_whatever_batch_it_runs() -> None:
    seeds = []
    for ids in (["a", "b", "c"], ["c", "a"]):
        engine = Noting()
        Generate(make_engine=lambda engine=engine: engine)(pyarrow.table({"id": ids, "prompt": ["x"] * len(ids)}))
        seeds.append({row["id"]: row["seed"] for row in engine.asked})
    assert seeds[0]["a"] == seeds[1]["a"] and seeds[0]["c"] == seeds[1]["c"]
    assert len(set(seeds[0].values())) == 3
    engine = Noting()
    Generate(make_engine=lambda: engine)(pyarrow.table({"id": ["a"], "prompt": ["x"], "seed": [5]}))
    assert engine.asked[0]["seed"] == 5


def test_ids_that_have_a_record_are_left_out_and_a_batch_that_is_written_again_replaces_itself(tmp_path: Path) -> None:
    generate = Generate(make_engine=Noting)
    batch = generate(pyarrow.table({"id": ["a", "b"], "prompt": ["x", ""]}))
    for _ in range(2):
        assert _write_batch(batch, str(tmp_path)).to_pylist() == [{"rows": 2, "failed": 1}]
    assert [path.name for path in tmp_path.iterdir()] == [f"{batch_name(batch)}.parquet"]
    done = finished_ids(tmp_path)
    assert sorted(done.tolist()) == sorted([id_digest("a"), id_digest("b")])
    assert missing(["b", "c", None, "a"], done).tolist() == [False, True, True, False]
    with pytest.raises(ValueError, match="rows without an `id`"):
        batch_name(batch.drop_columns(["id"]))


def test_rows_of_one_prefix_sort_together() -> None:
    prompts = ["sys A. q2", "sys B. q1", "sys A. q1"]
    assert sorted(prompts, key=lambda prompt: prefix_key({"prompt": prompt})) == [
        "sys A. q1",
        "sys A. q2",
        "sys B. q1",
    ]
    tokens = [[300, 1], [2, 9], [300, 0], [2]]
    ordered = sorted(tokens, key=lambda ids: prefix_key({"tokens": ids}))
    assert ordered == [[2], [2, 9], [300, 0], [300, 1]]


# --- on a cluster ------------------------------------------------------------------------------------------


def run(place: Path, **plan: Any) -> dict[str, Any]:
    (place / "seen").mkdir(exist_ok=True)
    plan = {
        "answers": str(place / "answers"),
        "seen": str(place / "seen"),
        "report": str(place / "report.json"),
        **plan,
    }
    words = [sys.executable, str(ROOT / "tests" / "ray_job.py"), json.dumps(plan)]
    env = environment(
        RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0",
        RAY_USAGE_STATS_ENABLED="0",
        RAY_AUTH_MODE="disabled",
        RAY_raylet_start_wait_time_s="120",  # a busy machine
        JAX_PLATFORMS="cpu",
    )
    ended = subprocess.run(words, capture_output=True, text=True, env=env, check=False, timeout=280)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    return json.loads((place / "report.json").read_text())


def answers(place: Path) -> list[dict[str, Any]]:
    return [row for path in (place / "answers").glob("*.parquet") for row in parquet.read_table(path).to_pylist()]


def noted(place: Path) -> list[list[dict[str, Any]]]:
    """What each actor noted of its batches."""
    return [[json.loads(line) for line in path.read_text().splitlines()] for path in (place / "seen").iterdir()]


@needs_ray
@pytest.mark.long
def test_an_actor_that_is_killed_loses_nothing_and_doubles_nothing(tmp_path: Path) -> None:
    counts = run(
        tmp_path, rows=1200, block=1200, batch=50, actors=2, batch_s=0.05, note_ids=True, grouped=True,
        kill=str(tmp_path / "killed"), kill_after=3,
    )  # fmt: skip
    assert (tmp_path / "killed").exists(), "an actor did die"
    assert len(noted(tmp_path)) >= 3, "both worked, though the rows came as one block, and another took its place"
    found = answers(tmp_path)
    assert Counter(row["id"] for row in found) == Counter(f"r{i}" for i in range(1200))
    assert counts["rows"] == 1200 and counts["failed"] == 2
    assert sum(row["text"] is None for row in found) == 2
    seeds: dict[str, set[int]] = {}
    for actor in noted(tmp_path):
        for batch in actor:
            for one, seed in zip(batch["ids"], batch["seeds"], strict=True):
                seeds.setdefault(one, set()).add(seed)
    assert all(len(given) == 1 for given in seeds.values()), "a row that was run twice was sampled alike"


@needs_ray
@pytest.mark.long
def test_a_job_goes_on_with_the_rows_that_have_no_record(tmp_path: Path) -> None:
    run(tmp_path, rows=300, block=100, batch=50, actors=1)
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "answers").iterdir()}
    gone = sorted(before)[0]
    (tmp_path / "answers" / gone).unlink()
    counts = run(tmp_path, rows=300, block=100, batch=50, actors=2, grouped=True)  # of three cores
    assert 0 < counts["rows"] < 300
    assert Counter(row["id"] for row in answers(tmp_path)) == Counter(f"r{i}" for i in range(300))
    kept = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "answers").iterdir()}
    assert all(kept[name] == before[name] for name in before if name != gone), "records that are there stay"


@needs_ray
@pytest.mark.long
def test_two_actors_give_the_completions_of_one_engine(tmp_path: Path) -> None:
    from maxtext_paged import OfflineEngine

    rows = [{"id": f"r{i}", "prompt": f"the cat and {'abc'[i % 3]}", "temperature": i % 2 * 1.0} for i in range(12)]
    rows.append({"id": "bad", "prompt": "x", "temperature": -1.0})
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    overrides = dict(word.split("=") for word in POOL)
    run(
        tmp_path, file=str(tmp_path / "in.jsonl"), blocks=4, batch=4, actors=2, config=tiny_model().config,
        overrides=overrides, params={"max_tokens": 6},
    )  # fmt: skip
    found = {row["id"]: row for row in answers(tmp_path)}
    assert found["bad"]["error"]["code"] == "bad_value" and found["bad"]["text"] is None
    with OfflineEngine(tiny_model().config, overrides=overrides) as engine:
        alone = Generate(params={"max_tokens": 6}, make_engine=lambda: engine)(
            pyarrow.table({name: [row[name] for row in rows] for name in rows[0]})
        )
        for row in alone.to_pylist():
            assert found[row["id"]]["token_ids"] == row["token_ids"], row["id"]


@needs_ray
@pytest.mark.long
@pytest.mark.timeout(600)
def test_memory_is_flat_over_a_hundred_thousand_rows(tmp_path: Path) -> None:
    (tmp_path / "few").mkdir()
    (tmp_path / "many").mkdir()
    few = run(tmp_path / "few", rows=2000, block=1000, batch=100, actors=2)
    many = run(tmp_path / "many", rows=100_000, block=1000, batch=100, actors=2)
    assert many["rows"] == 100_000 and many["failed"] == 100
    assert many["peak_kib"] - few["peak_kib"] < 64 * 1024, "of the driver"
    grown = [np.array([batch["rss"] for batch in actor]) for actor in noted(tmp_path / "many") if len(actor) > 100]
    assert grown, "an actor ran many batches"
    for rss in grown:
        assert rss[-20:].max() - rss[20:60].max() < 16 * 1024, "of an actor, KiB from its first batches to its last"
