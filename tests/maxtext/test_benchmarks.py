"""The benchmarks of whole runs work on a tiny model, and fail when what they are about did not run.

Each program's arms run in this process; that they also run in processes of their own is for the long tests.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from tests.tiny_models import _COMMON, BASE, BLOCKS, dense_model

pytestmark = [pytest.mark.maxtext, pytest.mark.slow]

PAGED = {"paged_tokens_per_page": 16, "paged_max_num_batched_tokens": 16, "paged_max_num_seqs": 4}
SMALL = ["--generate", "5", "--prompts", "4", "24", "--outputs", "3", "8", "--vocab-size", "255"]
QUICK = ["--passes", "1", "--no-wait"]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A configuration file of a tiny llama2, as the programs are given one."""
    left_out = ("attention", "max_target_length", "max_prefill_predict_length")
    options = {key: value for key, value in {**_COMMON, **BLOCKS["llama2"], **PAGED}.items() if key not in left_out}
    path = tmp_path_factory.mktemp("tiny") / "config.yml"
    path.write_text(yaml.safe_dump({"base_config": os.path.basename(BASE), **options}))
    return str(path)


@pytest.fixture
def record(tmp_path: Path) -> Path:
    return tmp_path / "record.json"


def read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text()))


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    """A configuration sets jax's compilation cache and MaxText's environment for the whole process."""
    import jax

    directory, environ = jax.config.jax_compilation_cache_dir, dict(os.environ)
    yield
    jax.config.update("jax_compilation_cache_dir", directory)
    os.environ.clear()
    os.environ.update(environ)


# --- serving -----------------------------------------------------------------------------------------------


def test_the_paged_arm_of_serving_records_what_was_measured(config: str, record: Path) -> None:
    from benchmarks.serving import main

    words = [config, *SMALL, *QUICK, "--prefix-cache", "on", "--kv-budget-bytes", str(40 * 16 * 512)]
    assert main([*words, "--arm", "paged-cached", "--record", str(record)]) == 0
    found = read(record)
    figures = found["figures"]
    assert figures["tokens_per_second"]["why"] == "not reportable: 1 of at least 3 passes"
    assert 0 < figures["ttft_p50"]["median"] <= figures["ttft_p99"]["median"] < found["seconds"][0]
    assert 0 < found["kv_bytes"] <= found["kv_budget_bytes"] == 40 * 16 * 512
    assert found["kind"] == "throughput" and found["preemptions"] == found["pages_left"] == 0
    assert found["occupancy"]["page_overhead"] > 1 and found["peak_running"] == 4 and sum(found["decodes"].values())
    assert found["counts"][0]["compile_events"] == 0 and found["backend"].startswith("native")
    assert {"jax", "maxtext", "numpy"} <= set(found["environment"]["versions"]) and found["environment"]["device"]


@pytest.mark.long
def test_serving_that_ran_on_the_reference_unasked_is_no_figure(
    config: str, record: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks.serving import main

    words = [config, "paged_attention_native=0", *SMALL, *QUICK, "--arm", "paged", "--record", str(record)]
    assert main(words) == 1 and not record.exists()
    assert "FAILED: paged: attention ran on the jnp reference" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:.with mesh.. context manager:DeprecationWarning")  # MaxText 0.2.5's engine
def test_the_dense_arm_gives_maxtexts_own_tokens_and_compiles_nothing_after_warm_up() -> None:
    from benchmarks.dense_arm import DenseArm

    model = dense_model()
    left_out = ("attention", "max_target_length", "max_prefill_predict_length", "per_device_batch_size", "scan_layers")
    options = {key: value for key, value in {**_COMMON, **BLOCKS["llama2"]}.items() if key not in left_out}
    words = [f"{key}={value}" for key, value in options.items()]
    arm = DenseArm(BASE, slots=2, prefill=16, decode=8, overrides=words, params=model.params)
    assert arm.kv_bytes == 2 * 24 * 512
    arm.warm_up()
    prompts, limits = [[5, 6, 7], [9] * 16, [4, 8], [3]], [5, 8, 1, 7]
    times, tokens, counts = arm.run(prompts, limits)
    counts.check()
    assert (counts.prefills, counts.peak_running, [len(own) for own in tokens]) == (4, 2, limits)
    for prompt, made, own in zip(prompts, tokens, times, strict=True):
        logits = model.logits(np.array(prompt + made), pad_to=64)[len(prompt) - 1 : -1]
        chosen = logits[np.arange(len(made)), made]
        assert (chosen >= logits.max(axis=-1) - 1e-4).all()
        assert own == sorted(own) and len(own) == len(made)
    arm.close()


# --- capacity ----------------------------------------------------------------------------------------------


@pytest.mark.long
def test_capacity_counts_requests_at_once_against_pages(config: str, record: Path) -> None:
    from benchmarks.capacity import main

    words = ["paged_max_num_seqs=9", "paged_max_num_batched_tokens=32"]
    shape = ["--pool-tokens", "256", "--contexts", "32", "64", "--new", "20", "--batch-context", "16"]
    arguments = [config, *words, *shape, "--batches", "2", "--passes", "1", "--json", str(record)]
    assert main(arguments) == 0
    found = read(record)
    assert [(one["context"], one["fits"], one["submitted"]) for one in found["lengths"]] == [(32, 8, 9), (64, 4, 5)]
    assert all(one["decoding"] >= one["fits"] and one["extra_pages"] <= 0 for one in found["lengths"])
    assert found["batches"][0]["step_seconds"]["median"] > 0


# --- decode matrix -----------------------------------------------------------------------------------------

FEW = "paged_max_num_batched_tokens=16"
CELLS = ["--cells", "2x40", "1x70", "--steps", "2", "--sweeps", "1"]


@pytest.mark.parametrize("arm", ["fused", pytest.param("gather", marks=pytest.mark.long)])
def test_an_arm_of_the_decode_matrix_echoes_its_dispatch(config: str, record: Path, arm: str) -> None:
    from benchmarks.decode_matrix import main

    assert main([config, FEW, *CELLS, "--arm", arm, "--record", str(record)]) == 0
    found = read(record)
    assert [cell["decodes"] for cell in found["cells"]] == [{arm: 4}, {arm: 4}]
    assert "11 pages" not in found["pool"] and found["pool"].startswith("6 pages of 16 tokens")
    assert (found["launches"]["fused"] > 0) == (arm == "fused") and found["cells"][0]["dispatch"][0].startswith(arm)


@pytest.mark.parametrize(("arm", "other"), [("fused", "gather"), ("gather", "fused")])
def test_an_arm_of_the_decode_matrix_that_ran_the_other_fails(
    config: str, record: Path, arm: str, other: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks import decode_matrix

    monkeypatch.setitem(decode_matrix.ARMS, arm, decode_matrix.ARMS[other])
    assert decode_matrix.main([config, FEW, *CELLS, "--arm", arm, "--record", str(record)]) == 1
    assert not record.exists() and f"FAILED: {arm}: {arm} 2 x 40: dispatched" in capsys.readouterr().err


# --- the others --------------------------------------------------------------------------------------------


@pytest.mark.long
def test_the_prefix_benchmark_compares_on_with_off(
    config: str, record: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks.prefix_cache import main

    shape = ["--requests", "4", "--prefix", "32", "--new", "3", "--staggered", "2", "--passes", "1"]
    assert main([config, "paged_max_num_batched_tokens=16", *shape, "--json", str(record)]) == 0
    passes = read(record)["passes"]
    assert [(one["arm"], one["cached"], one["avoided_tokens"]) for one in passes] == [
        ("staggered", False, 0),
        ("staggered", True, 96),
        ("at once", False, 0),
        ("at once", True, 96),
    ]
    assert main([config, "paged_max_num_batched_tokens=16", *shape, "--prefix", "8"]) == 1  # no whole page in common
    assert "the cached arm avoided 0 tokens" in capsys.readouterr().err


def test_the_floor_is_measured_at_each_number_of_rows(config: str, record: Path) -> None:
    from benchmarks.floor import main

    assert main([config, "--rows", "1", "130", "--passes", "1", "--seconds", "0.01", "--json", str(record)]) == 0
    assert set(read(record)["floor_seconds"]) == {"1", "130"}


@pytest.mark.long
def test_every_arm_of_serving_and_of_the_matrix_runs_in_a_process_of_its_own(config: str, tmp_path: Path) -> None:
    from benchmarks import decode_matrix, serving

    assert serving.main([config, *SMALL, *QUICK, "--json", str(tmp_path / "serving.json")]) == 0
    assert [one["arm"] for one in read(tmp_path / "serving.json")["arms"]] == ["paged", "paged-cached", "dense"]
    assert decode_matrix.main([config, FEW, *CELLS, "--json", str(tmp_path / "matrix.json")]) == 0
    assert [one["arm"] for one in read(tmp_path / "matrix.json")["arms"]] == ["fused", "gather"]
