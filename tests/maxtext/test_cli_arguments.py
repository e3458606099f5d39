"""What the command says to arguments and paths, before MaxText is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from maxtext_paged.__main__ import main
from maxtext_paged.cli import CommandError, ExitCode, parse
from maxtext_paged.cli import convert as convert_command
from maxtext_paged.cli.checking import check
from maxtext_paged.cli.files import check_paths, open_input
from maxtext_paged.cli.output import claim_output
from maxtext_paged.report.counts import JobCounts

ROOT = Path(__file__).parents[2]
ROW = '{"prompt": "x"}\n'


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a configuration, an input, an earlier output and links to the input."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yml").write_text("base_config: base.yml\n")
    (tmp_path / "in.jsonl").write_text(ROW)
    (tmp_path / "done.jsonl").write_text("earlier\n")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link.jsonl").symlink_to("in.jsonl")
    os.link(tmp_path / "in.jsonl", tmp_path / "twin.jsonl")
    return tmp_path


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("", "which COMMAND?"),
        ("frobnicate", "'frobnicate'"),
        ("generate c.yml -i in.jsonl", "-o/--output"),
        ("generate c.yml -i in.jsonl -o out.jsonl --frob", "unrecognized arguments: --frob"),
        ("generate c.yml -i in.jsonl -o out.jsonl --overwrit", "--overwrit"),  # no abbreviations: they age badly
        ("generate -i in.jsonl -o out.jsonl", "CONFIG.yml"),
        ("generate nowhere.yml -i in.jsonl -o out.jsonl", "nowhere.yml: no such configuration"),
        ("generate folder -i in.jsonl -o out.jsonl", "folder is a directory"),
        ("generate c.yml dtype -i in.jsonl -o out.jsonl", "'dtype' is not key=value"),
        ("generate c.yml =3 -i in.jsonl -o out.jsonl", "'=3' is not key=value"),
        ("generate c.yml -i nowhere.jsonl -o out.jsonl", "nowhere.jsonl: no such input"),
        ("generate c.yml -i folder -o out.jsonl", "folder is a directory"),
        ("generate c.yml -i in.jsonl -o folder", "folder is a directory"),
        ("generate c.yml -i in.jsonl -o nowhere/out.jsonl", "no directory nowhere"),
        ("generate c.yml -i in.jsonl -o done.jsonl", "done.jsonl exists"),
        ("generate c.yml -i in.jsonl -o in.jsonl --overwrite", "in.jsonl is the input"),
        ("generate c.yml -i in.jsonl -o ../{here}/in.jsonl --overwrite", "is the input"),
        ("generate c.yml -i in.jsonl -o link.jsonl --overwrite", "link.jsonl is the input"),
        ("generate c.yml -i in.jsonl -o twin.jsonl --overwrite", "twin.jsonl is the input"),
        ("convert only.gguf", "OUT_DIR"),
        ("doctor nowhere.yml", "nowhere.yml: no such configuration"),
        ("doctor c.yml dtype", "'dtype' is not key=value"),
        ("plan", "CONFIG.yml"),
        ("plan nowhere.yml", "nowhere.yml: no such configuration"),
        ("plan c.yml dtype", "'dtype' is not key=value"),
    ],
)
def test_a_usage_error_is_one_line_and_exit_code_2_and_touches_nothing(
    place: Path, capsys: pytest.CaptureFixture[str], words: str, says: str
) -> None:
    before = {path.name: path.read_bytes() for path in place.iterdir() if path.is_file()}
    assert main(words.format(here=place.name).split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    [line] = err.splitlines()
    assert line.startswith("maxtext-paged: error: ") and says in line
    assert {path.name: path.read_bytes() for path in place.iterdir() if path.is_file()} == before


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("generate c.yml -i i -o o --resum", "--resum; did you mean --resume? (see `maxtext-paged generate --help`)"),
        ("generate c.yml -i i -o o --metric-file=m", "; did you mean --metrics-file?"),
        ("verify o --smaple 3", "did you mean --sample? (see `maxtext-paged verify --help`)"),
        ("--verison", "did you mean --version? (see `maxtext-paged --help`)"),
    ],
)
def test_a_misspelt_option_names_the_likely_one_and_the_help_of_its_command(words: str, says: str) -> None:
    with pytest.raises(CommandError) as refusal:
        parse(words.split())
    assert says in str(refusal.value)


def test_an_option_like_no_other_gets_no_guess() -> None:
    with pytest.raises(CommandError) as refusal:
        parse(["generate", "c.yml", "-i", "i", "-o", "o", "--frob"])
    assert "did you mean" not in str(refusal.value)


@pytest.mark.parametrize("words", ["generate", "plan", "generate -i i", "verify"])
def test_what_may_be_left_out_is_not_called_missing(words: str) -> None:
    with pytest.raises(CommandError) as refusal:
        parse(words.split())
    assert "required: " in str(refusal.value) and "key=value" not in str(refusal.value)


def test_an_input_that_is_piped_from_the_output_file_is_refused_too(place: Path) -> None:
    command = [sys.executable, "-m", "maxtext_paged", "generate", "c.yml", "-i", "-", "-o", "in.jsonl", "--overwrite"]
    with open("in.jsonl", "rb") as source:
        process = subprocess.run(
            command, stdin=source, capture_output=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False
        )
    assert process.returncode == 2
    assert b"in.jsonl is the input" in process.stderr
    assert (place / "in.jsonl").read_text() == ROW


def test_overrides_may_stand_before_between_and_behind_options() -> None:
    arguments = parse(["generate", "c.yml", "a=1", "-i", "in", "b=2", "--strict", "-o", "out", "c=3", "d=x=y"])
    assert (arguments.config, arguments.input, arguments.output, arguments.strict) == ("c.yml", "in", "out", True)
    assert arguments.overrides == ["a=1", "b=2", "c=3", "d=x=y"]
    assert parse(["generate", "-i", "in", "-o", "out", "c.yml", "a=1"]).overrides == ["a=1"]


@pytest.mark.parametrize("command", ["generate", "convert", "doctor", "plan", None])
def test_help_names_every_argument_and_ends_well(capsys: pytest.CaptureFixture[str], command: str | None) -> None:
    with pytest.raises(SystemExit) as ending:
        main([*([command] if command else []), "--help"])
    assert ending.value.code == 0
    shown = capsys.readouterr().out
    expected = {
        "generate": [
            "CONFIG.yml",
            "key=value",
            "--input",
            "--output",
            "--strict",
            "--overwrite",
            "--resume",
            "--resume-anyway",
            "max_tokens",
            "130",
        ],
        "convert": ["MODEL.gguf", "OUT_DIR", "--overwrite"],
        "doctor": ["CONFIG.yml", "key=value"],
        "plan": ["CONFIG.yml", "key=value", "--json"],
        None: ["generate", "convert", "doctor", "plan", "exit codes"],
    }
    assert [word for word in expected[command] if word not in shown] == []


def test_arguments_are_read_without_jax_and_maxtext() -> None:
    code = (
        "import sys, maxtext_paged.__main__, maxtext_paged.cli.generate, maxtext_paged.cli.doctor, "
        "maxtext_paged.cli.plan; print(*sys.modules)"
    )
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    ).stdout.decode()
    packages = {name.split(".")[0] for name in output.split()}
    assert not packages & {"jax", "maxtext", "transformers", "torch"}
    assert "maxtext_paged" in packages


def test_an_unexpected_fault_does_not_look_like_a_job_with_bad_rows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fault(_: Any) -> int:
        raise ZeroDivisionError("what now")

    monkeypatch.setattr(convert_command, "run", fault)
    assert main(["convert", "a", "b"]) == ExitCode.ENGINE
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert err.splitlines()[-1] == "maxtext-paged: error: unexpected, please report it: ZeroDivisionError: what now"


# --- files ------------------------------------------------------------------------------------------------


def test_what_cannot_be_read_twice_is_kept_so_that_it_can(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with subprocess.Popen(["sh", "-c", f"printf 'a\\nb\\n' > {pipe}"]), open_input(str(pipe)) as source:
        start = source.tell()
        first = list(source)
        source.seek(start)
        assert first == list(source) == [b"a\n", b"b\n"]


def test_the_output_appears_when_it_is_opened_not_before(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with claim_output(str(path), overwrite=False) as output:
        assert not path.exists()
        output.begin({}).write(b"x")
    assert path.read_bytes() == b"x"


def test_an_output_that_appeared_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with claim_output(str(path), overwrite=False) as output:
        path.write_text("somebody else's")
        with pytest.raises(CommandError, match=r"out\.jsonl exists"):
            output.begin({})
    assert path.read_text() == "somebody else's"


def test_a_device_may_be_written_without_overwriting_it(place: Path) -> None:
    check_paths("in.jsonl", os.devnull, overwrite=False)
    with claim_output(os.devnull, overwrite=False) as output:
        output.begin({}).write(b"x")


# --- the summary ------------------------------------------------------------------------------------------


def test_the_summary_holds_every_count_and_divides_by_no_zero() -> None:
    counts = JobCounts(
        total=9,
        ok=5,
        failed=2,
        prompt_tokens=30,
        generated_tokens=40,
        seconds=8.0,
        num_pages=64,
        steps=17,
        preemptions=3,
        peak_pages=21,
        scrubbed_pages=6,
        backends={"reference": 17},
        decodes={"fused": 11, "gather": 4},
        native_products=225,
        programs={"paged_step": 2, "_overwrite_pages": 1},
    )
    assert counts.summary() == [
        "9 rows: 5 ok, 2 failed, 2 not answered; 30 prompt and 40 generated tokens in 8.0 s, 5.0 tokens/s",
        "17 steps, 3 preemptions, at most 21 of 64 pages held, 6 scrubbed; attention: reference 17 steps; "
        "decodes: 11 fused, 4 gather; products: 225 native; programs: _overwrite_pages 1, paged_step 2",
    ]
    counts.window_pages, counts.window_peak_pages = {"512": 66}, {"512": 33}
    assert "at most 21 of 64 pages held (window 512: 33 of 66), 6 scrubbed; " in counts.summary()[1]
    assert "0 rows: 0 ok, 0 failed; " in JobCounts().summary()[0]
    assert "decodes: none; products: XLA's; programs: none" in JobCounts().summary()[1]


# --- configs/gpu_paged.yml --------------------------------------------------------------------------------


@pytest.mark.maxtext
def test_the_published_configuration_lists_every_paged_option_with_its_default() -> None:
    import yaml

    from maxtext_paged.config import PagedOptions

    listed = yaml.safe_load((ROOT / "configs" / "gpu_paged.yml").read_text())
    assert listed["base_config"] == "base.yml" and listed["attention"] == "gpu_paged"
    ours = {key: value for key, value in listed.items() if key.startswith("paged_")}
    assert PagedOptions.checked(ours) == PagedOptions()
    assert set(ours) == set(PagedOptions.model_fields)


def test_an_input_without_rows_is_said_to_have_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert check("empty.jsonl", list).num_rows == 0
    assert capsys.readouterr().err == "maxtext-paged: empty.jsonl has no rows: there is nothing to run\n"
