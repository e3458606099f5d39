"""``maxtext-paged plan``: its figures against arithmetic done here, and that it loads and allocates nothing."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from maxtext_paged import model, session
from maxtext_paged.assembly import assemble
from maxtext_paged.cli.plan import plan_of, show
from tests.cli_runs import driver, environment, finished
from tests.tiny_models import make_config, make_mesh

pytestmark = [pytest.mark.maxtext, pytest.mark.slow]

TINY = str(Path(__file__).parents[2] / "configs" / "test" / "tiny.yml")


@pytest.fixture
def nothing_large(monkeypatch: pytest.MonkeyPatch) -> None:
    def allocated(*_: Any, **__: Any) -> None:
        raise AssertionError("a plan loads no weights and allocates no pool")

    monkeypatch.setattr(session, "prepare_params", allocated)
    monkeypatch.setattr(session, "params_from_tree", allocated)
    monkeypatch.setattr(model.MaxTextPagedModel, "create_pools", allocated)
    monkeypatch.setattr(model, "create_zeroed", allocated)


@pytest.mark.usefixtures("nothing_large")
def test_a_model_far_larger_than_the_machine_is_planned_to_the_byte() -> None:
    layers, embed, heads, kv_heads, dim, mlp, vocabulary = 4, 8192, 64, 8, 128, 28672, 128256
    config = make_config(
        base_num_decoder_layers=layers,
        base_emb_dim=embed,
        base_num_query_heads=heads,
        base_num_kv_heads=kv_heads,
        head_dim=dim,
        base_mlp_dim=mlp,
        vocab_size=vocabulary,
        max_target_length=8192,
        dtype="bfloat16",
        weight_dtype="bfloat16",
        paged_num_pages=600,
        paged_attention_native="0",
    )
    plan = plan_of(assemble(config, mesh=make_mesh(config)))
    attention = 2 * embed * heads * dim + 2 * embed * kv_heads * dim
    weights = layers * (attention + 3 * embed * mlp + 2 * embed) + 2 * vocabulary * embed + embed
    page = 2 * layers * 16 * kv_heads * dim * 2
    assert plan["device"] == {
        "page_bytes": page,
        "pool_bytes": 600 * page,
        "workspace_bytes": 0,
        "weight_bytes": 2 * weights,
    }
    assert plan["device"] == plan["total"]
    assert [(entry["tokens"], entry["pages"], entry["at_once"]) for entry in plan["requests"]] == [
        (128, 8, 32),
        (512, 32, 18),
        (1024, 64, 9),
        (4096, 256, 2),
        (8192, 512, 1),
    ]


@pytest.mark.multi_device
@pytest.mark.usefixtures("nothing_large")
def test_totals_count_replicas() -> None:
    import jax

    config = make_config(ici_tensor_parallelism=2, ici_fsdp_parallelism=4, paged_num_pages=10)
    plan = plan_of(assemble(config, mesh=make_mesh(config, jax.devices()[:8])))
    assert (plan["devices"], plan["head_shards"], plan["pool_replicas"]) == (8, 2, 4)
    assert plan["device"]["pool_bytes"] == 10 * 2 * 2 * 16 * 1 * 16 * 4
    assert plan["total"] == {name: 8 * value for name, value in plan["device"].items()}


@pytest.mark.usefixtures("nothing_large")
def test_windows_are_listed_and_charged_by_themselves(capsys: pytest.CaptureFixture[str]) -> None:
    """gemma2: two layers of each kind, windows of 8 tokens, pages of 4, steps of 8 tokens."""
    options = {"paged_tokens_per_page": 4, "paged_max_num_batched_tokens": 8, "paged_max_num_seqs": 2}
    config = make_config("gemma2", paged_num_pages=64, **options)
    plan = plan_of(assemble(config, mesh=make_mesh(config)))
    page = 2 * 2 * 4 * 2 * 16 * 4  # K and V, layers, tokens, heads, head size, float32
    assert plan["windows"] == [{"window": 8, "layers": 2, "num_pages": 10, "page_bytes": page, "pages_each": 4}]
    assert plan["device"]["page_bytes"] == page
    assert plan["device"]["pool_bytes"] == (64 + 10) * page
    assert not plan["windows_charged_in_full"]
    assert [entry["at_once"] for entry in plan["requests"]] == [2]
    show(plan)
    shown = " ".join(capsys.readouterr().out.split())
    assert "10 pages for 2 layers with a window of 8 tokens" in shown


@pytest.mark.usefixtures("nothing_large")
def test_the_tables_say_what_is_charged_in_full_and_what_cannot_fit(capsys: pytest.CaptureFixture[str]) -> None:
    config = make_config("gemma2", paged_num_pages=3, paged_window_pages="off")
    show(plan_of(assemble(config, mesh=make_mesh(config))))
    shown = " ".join(capsys.readouterr().out.split())
    assert "layers with a sliding window are charged at full length" in shown
    assert "no request of max_target_length=64 tokens fits: those longer than 48 are refused" in shown
    assert "3 pages of 16 tokens (paged_num_pages=3)" in shown


def test_the_command_prints_tables_or_one_json_object_and_refuses_in_one_line(tmp_path: Path) -> None:
    commands = [
        ["plan", TINY, "paged_num_pages=9"],
        ["plan", TINY, "--json", "paged_num_pages=9"],
        ["plan", TINY, "paged_kv_budget_bytes=100"],
        ["plan", TINY, "paged_kv_memory_fraction=1.5"],
        ["plan", TINY, "paged_kv_memory_fraction=0.001", "--json"],
    ]
    process = subprocess.run(
        driver(tmp_path, commands, capture=True), capture_output=True, env=environment(), check=False
    )
    report = finished(process, tmp_path).report
    assert report, process.stderr.decode()
    tables, plain, small, wrong, fraction = report["commands"]
    assert (tables["code"], plain["code"], fraction["code"]) == (0, 0, 0)
    assert "weights" in tables["out"] and "9 pages of 16 tokens" in tables["out"]
    plan = json.loads(plain["out"])
    assert plan["num_pages"] == 9 and plan["device"]["pool_bytes"] == 9 * plan["device"]["page_bytes"]
    assert "MemAvailable" in json.loads(fraction["out"])["decided_by"]
    for refused, words in ((small, "smallest budget that works"), (wrong, "paged_kv_memory_fraction")):
        assert refused["code"] == 2 and refused["out"] == ""
        [line] = refused["err"].splitlines()
        assert line.startswith("maxtext-paged: error: ") and words in line
