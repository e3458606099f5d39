"""Commands that must not run anything, and ``doctor``, which runs nothing: all in one process."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.cli_runs import driver, environment, finished, tiny_model

pytestmark = [pytest.mark.maxtext, pytest.mark.slow]


def test_convert_prints_the_configuration_that_generate_takes() -> None:
    model = tiny_model()
    assert model.converted.code == 0
    assert Path(model.converted.out.strip()) == model.directory / "model" / "config.yml"
    assert Path(model.converted.out.strip()).is_file()


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """Commands that must not run anything, by name; each ``{"code", "out", "err"}``."""
    place, config = tmp_path_factory.mktemp("refused"), tiny_model().config
    (place / "in.jsonl").write_text('{"prompt": "x"}\n')
    (place / "bad.jsonl").write_text(
        '{"prompt": "x"}\n\n[1]\n{"tokens": [99999]}\n{"id": 1, "prompt": "x"}\n{"id": 1}\n'
    )
    (place / "list.yml").write_text("- a\n")
    (place / "broken.yml").write_text("a: [1\n")
    (place / "orphan.yml").write_text("base_config: nowhere.yml\n")
    (place / "typo.yml").write_text(f"base_config: {config}\nmax_target_lenght: 64\n")

    def generate(*words: str, file: str = config, source: str = "in.jsonl") -> list[str]:
        return ["generate", file, *words, "-i", str(place / source), "-o", str(place / "out.jsonl")]

    commands = {
        "unknown key": generate("max_target_lenght=64"),
        "unknown key in a file": generate(file=str(place / "typo.yml")),
        "unknown paged key": generate("paged_page_size=16"),
        "not a number": generate("max_target_length=abc"),
        "not a choice": generate("decoder_block=lama2"),
        "not YAML": generate("dtype=[1"),
        "out of range": generate("paged_num_pages=-1"),
        "other attention": generate("attention=dot_product"),
        "refused option": generate("quantize_kvcache=true"),
        "missing weights": generate(f"load_parameters_path={place / 'nowhere'}"),
        "missing tokenizer": generate(f"tokenizer_path={place / 'nowhere'}"),
        "bad sampling": generate("decode_sampling_strategy=nucleus", "decode_sampling_nucleus_p=2"),
        "list": generate(file=str(place / "list.yml")),
        "broken": generate(file=str(place / "broken.yml")),
        "orphan": generate(file=str(place / "orphan.yml")),
        "strict": [*generate(source="bad.jsonl"), "--strict"],
        "no GGUF": ["convert", str(place / "nowhere.gguf"), str(place / "model")],
        "not a GGUF": ["convert", str(place / "in.jsonl"), str(place / "model")],
        "taken": ["convert", str(tiny_model().gguf), str(place)],
        "doctor's unknown key": ["doctor", config, "paged_page=1"],
        "doctor": ["doctor", config, "paged_num_pages=5", "paged_tokens_per_page=8", "jax_cache_dir=/kept/here"],
        "doctor alone": ["doctor"],
    }
    process = subprocess.run(
        driver(place, list(commands.values()), capture=True), capture_output=True, env=environment(), check=False
    )
    report = finished(process, place).report
    assert report, process.stderr.decode()
    return dict(zip(commands, report["commands"], strict=True)), place


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("unknown key", ["'max_target_lenght'", "did you mean 'max_target_length'?"]),
        ("unknown key in a file", ["'max_target_lenght'", "did you mean 'max_target_length'?"]),
        ("unknown paged key", ["'paged_page_size'"]),
        ("not a number", ["max_target_length='abc'"]),
        ("not a choice", ["decoder_block='lama2'", "llama2"]),
        ("not YAML", ["'dtype=[1'"]),
        ("out of range", ["paged_num_pages=-1", "greater than or equal to 0"]),
        ("other attention", ["attention=dot_product", "gpu_paged"]),
        ("refused option", ["quantize_kvcache", "paged_kv_dtype"]),
        ("missing weights", ["load_parameters_path=", "nowhere"]),
        ("missing tokenizer", ["tokenizer_path=", "nowhere"]),
        ("bad sampling", ["decode_sampling_nucleus_p=2"]),
        ("list", ["list.yml"]),
        ("broken", ["broken.yml"]),
        ("orphan", ["base_config=nowhere.yml"]),
        ("no GGUF", ["nowhere.gguf"]),
        ("not a GGUF", ["in.jsonl"]),
        ("taken", ["refused"]),
        ("doctor's unknown key", ["'paged_page'", "did you mean"]),
    ],
)
def test_a_bad_configuration_is_one_line_and_exit_code_2(
    refused: tuple[dict[str, Any], Path], name: str, words: list[str]
) -> None:
    result = refused[0][name]
    assert result["code"] == 2
    [line] = result["err"].splitlines()
    assert line.startswith("maxtext-paged: error: ")
    assert [word for word in words if word not in line] == []


def test_strict_lists_every_bad_line_and_runs_nothing(refused: tuple[dict[str, Any], Path]) -> None:
    result, place = refused[0]["strict"], refused[1]
    assert result["code"] == 2
    named = [int(number) for number in re.findall(r"bad\.jsonl:(\d+): ", result["err"])]
    assert named == [3, 4, 5, 6]
    assert result["err"].splitlines()[-1] == (
        "maxtext-paged: error: --strict: 4 of 5 rows are unusable; nothing was run"
    )
    assert "KV pool" not in result["err"]
    assert not (place / "out.jsonl").exists()


def test_doctor_names_device_versions_backend_and_with_a_configuration_the_pool(
    refused: tuple[dict[str, Any], Path],
) -> None:
    from importlib.metadata import version

    with_config, alone = refused[0]["doctor"], refused[0]["doctor alone"]
    assert with_config["code"] == alone["code"] == 0
    for report in (with_config["out"], alone["out"]):
        lines = dict(line.split(":", 1) for line in report.splitlines())
        assert lines["platform"].strip() == "cpu"
        assert lines["jax"].strip() == version("jax")
        assert lines["maxtext"].strip() == version("maxtext")
        assert re.match(r"\s*\w+: .+", lines["backend"])  # a name and its reason
    assert "5 pages of 8 tokens" in with_config["out"] and "paged_num_pages=5" in with_config["out"]
    assert "compiled programs are kept in /kept/here" in with_config["out"]
    assert re.search(
        r"^decode: +full attention: (gather, |fused split-KV on \d+ threads, for one request from 512 )",
        with_config["out"],
        re.MULTILINE,
    )
    assert "KV pool" not in alone["out"]
