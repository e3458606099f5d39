"""The code blocks of README.md and docs/ run, over a tiny model that the README's own command makes.

Commands run in this process where they can: MaxText takes ten seconds to import. What cannot run has its reason in
tests/documentation.py; a block or command that is neither run nor listed there fails.
"""

from __future__ import annotations

import ast
import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from maxtext_paged.cli.environment import OURS
from maxtext_paged.config import PagedMaxTextConfig, PagedOptions
from maxtext_paged.formats import InputRow
from maxtext_paged.formats.lines import read_rows
from tests.cli_runs import environment
from tests.documentation import (
    LANGUAGES,
    NOT_RUN,
    OWN_PROCESS,
    PYTHON_ELSEWHERE,
    PYTHON_NOT_RUN,
    ROOT,
    Block,
    Command,
    all_commands,
    blocks_of,
    commands_of,
    hidden_blocks,
    needs_process,
    pages,
    reason,
)
from tests.tiny_gguf import write_gguf

pytestmark = pytest.mark.maxtext

SMALL = {
    "paged_tokens_per_page": 4,
    "paged_num_pages": 96,
    "paged_max_num_seqs": 4,
    "paged_max_num_batched_tokens": 32,
    "paged_check_invariants": True,
}
"""Options of the tiny model's configuration, so that few programs are compiled."""

BEFORE = {
    "docs/verify.md": "maxtext-paged generate OUT_DIR/config.yml -i in.jsonl -o out.jsonl",
}
"""What a page takes for granted."""

ALSO_ELSEWHERE = ("docs/verify.md", "docs/watching.md")
"""Pages whose commands run among the long tests: shorter ones of the command's own tests run the same options."""

TINY = ["override_model_config=true", "base_num_decoder_layers=1", "vocab_size=512", "base_emb_dim=256"]
"""Behind `plan` of a published model: the page's point is that the command takes the file."""


def blocks(language: str) -> dict[str, list[Block]]:
    found = {page: [block for block in blocks_of(page) if block.language == language] for page in pages()}
    return {page: blocks for page, blocks in found.items() if blocks}


def in_process(page: str) -> list[Command]:
    found = [command for block in blocks("sh")[page] for command in commands_of(block)]
    return [command for command in found if reason(command) is None and not needs_process(command)]


def prompts() -> str:
    """The tutorial's own file."""
    [block] = blocks("json")["docs/tutorial/files.md"]
    return block.text


@pytest.fixture(scope="module")
def quiet() -> Iterator[None]:
    """The command sets variables and loggers for its process; this one goes on with what it had."""
    loggers = [logging.getLogger(name) for name in ("", *OURS)]
    before = [(logger, logger.level, logger.propagate, list(logger.handlers)) for logger in loggers]
    variables = dict(os.environ)
    yield
    for logger, level, propagate, handlers in before:
        logger.setLevel(level)
        logger.propagate = propagate
        logger.handlers[:] = handlers
    os.environ.clear()
    os.environ.update(variables)


def run(command: Command) -> int:
    """One ``maxtext-paged`` command of a page, in this process."""
    from maxtext_paged.__main__ import main

    program, *words = command.words
    assert program == "maxtext-paged"
    words = [word.replace("/var/lib/node_exporter/", "") for word in words]
    return main([*words, *(TINY if "MODEL.yml" in words else [])])


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory, quiet: None) -> Path:
    """A folder with MODEL.gguf, and OUT_DIR as the README's ``convert`` leaves it, with a small pool."""
    place = tmp_path_factory.mktemp("documentation")
    write_gguf(place / "MODEL.gguf")
    [convert] = [command for command in in_process("README.md") if command.words[1] == "convert"]
    before = os.getcwd()
    os.chdir(place)
    try:
        assert run(convert) == 0
    finally:
        os.chdir(before)
    with open(place / "OUT_DIR" / "config.yml", "a", encoding="utf-8") as file:
        file.write(yaml.safe_dump(SMALL))
    return place


@pytest.fixture
def place(converted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which the pages' names stand for something: OUT_DIR, CONFIG.yml, MODEL.yml, prompts.jsonl, ..."""
    (tmp_path / "OUT_DIR").symlink_to(converted / "OUT_DIR")
    (tmp_path / "MODEL.gguf").symlink_to(converted / "MODEL.gguf")
    (tmp_path / "CONFIG.yml").symlink_to(converted / "OUT_DIR" / "config.yml")
    (tmp_path / "TOKENIZER_DIR").symlink_to(converted / "OUT_DIR")
    (tmp_path / "CHECKPOINT").mkdir()
    (tmp_path / "CHECKPOINT" / "0").symlink_to(converted / "OUT_DIR" / "checkpoint")
    (tmp_path / "prompts.jsonl").write_text(prompts(), encoding="utf-8")
    (tmp_path / "in.jsonl").write_text(prompts().replace("0.7", "0"), encoding="utf-8")  # greedy
    [block] = blocks("yaml")["docs/tutorial/checkpoint.md"]
    (tmp_path / "MODEL.yml").write_text(block.text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


# --- nothing is left out -----------------------------------------------------------------------------------


def test_every_block_is_run_or_has_its_reason() -> None:
    unknown = [
        f"{block.page}:{block.line}: {block.language or 'no language'}"
        for page in pages()
        for block in blocks_of(page)
        if block.language not in LANGUAGES
    ]
    assert unknown == [], f"say one of {', '.join(LANGUAGES)} behind the fence"
    assert [f"{page}: {line}" for page in pages() for line in hidden_blocks(page)] == []
    programs = [str(command) for command in all_commands() if reason(command) is None]
    assert [program for program in programs if "maxtext-paged " not in program] == [], "run it or say why not"


def test_every_reason_is_that_of_some_block() -> None:
    commands = all_commands()
    for pattern in NOT_RUN:
        assert any(re.match(pattern, str(command)) for command in commands), pattern
    for pattern in OWN_PROCESS:
        assert any(re.match(pattern, str(command)) and reason(command) is None for command in commands), pattern
    assert {*PYTHON_ELSEWHERE, *PYTHON_NOT_RUN} <= set(blocks("python"))
    for named in PYTHON_ELSEWHERE.values():
        file, _, name = named.partition("::")
        assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8")


def test_a_block_that_is_new_would_be_seen() -> None:
    page = "text\n\n```\nx\n```\n\n```python\n1\n```\n\n    hidden\n\n```sh\nA=b curl x \\\n  -o y  # to y\n\n```\n"
    found = blocks_of("new.md", page)
    assert [(block.line, block.language) for block in found] == [(4, ""), (8, "python"), (14, "sh")]
    assert hidden_blocks("new.md", page) == ["    hidden"]
    [command] = commands_of(found[2])
    assert (command.variables, command.words, reason(command)) == (("A=b",), ("curl", "x", "-o", "y"), None)


def test_programs_that_are_not_run_exist_with_the_options_that_are_named() -> None:
    checked = 0
    for command in all_commands():
        match command.words:
            case ("python", "-m", name, *options) if name.startswith("benchmarks."):
                source = (ROOT / (name.replace(".", "/") + ".py")).read_text(encoding="utf-8")
            case ("python", name, *options) if name.startswith("examples/"):
                source = (ROOT / name).read_text(encoding="utf-8")
            case ("sh", name, *options) | (name, *options) if name.startswith(("scripts/", "benchmarks/")):
                source = (ROOT / name).read_text(encoding="utf-8")
            case _:
                continue
        checked += 1
        assert [option for option in options if option.startswith("--") and option not in source] == [], str(command)
    assert checked > 5


# --- what is only read -------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", blocks("json"))
def test_json_blocks_are_rows_that_can_run(page: str) -> None:
    for block in blocks("json")[page]:
        rows = list(read_rows(block.text.encode().splitlines()))
        assert rows and all(isinstance(row, InputRow) for row in rows), rows


@pytest.mark.parametrize("page", blocks("yaml"))
def test_yaml_blocks_name_options_that_exist(page: str) -> None:
    for block in blocks("yaml")[page]:
        assert set(yaml.safe_load(block.text)) - {"base_config"} <= set(PagedMaxTextConfig.model_fields)


@pytest.mark.parametrize("page", blocks("python"))
def test_python_blocks_are_python(page: str) -> None:
    for block in blocks("python")[page]:
        ast.parse(dedent(block.text))


def test_the_api_page_has_every_public_name_and_the_operating_guide_every_option() -> None:
    import maxtext_paged

    api = (ROOT / "docs" / "api" / "index.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^::: maxtext_paged\.(\w+)$", api, re.M)) == sorted(maxtext_paged.__all__)
    guide = (ROOT / "docs" / "operating.md").read_text(encoding="utf-8")
    assert [name for name in PagedOptions.model_fields if f"`{name}`" not in guide] == []


@pytest.mark.parametrize(
    ("engine", "lines"), [("vLLM", r"vLLM-CPU"), ("MaxText's dense `MaxEngine`", r"dense `MaxEngine`|4\.6 times")]
)
def test_the_readmes_figures_are_those_of_the_performance_page(engine: str, lines: str) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    [row] = [line for line in readme.splitlines() if line.startswith(f"| {engine} |")]
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8").splitlines()
    measured = re.findall(r"\d+\.\d+", "\n".join(line for line in page if re.search(lines, line)))
    figures = re.findall(r"(\d+\.\d+)\?", row)
    assert len(figures) >= 3 and set(figures) <= set(measured)


# --- what runs ---------------------------------------------------------------------------------------------

PYTHON_PAGES = [page for page in blocks("python") if page not in {*PYTHON_ELSEWHERE, *PYTHON_NOT_RUN}]


def prelude(page: str) -> dict[str, Any]:
    """Names that a page's blocks begin with."""
    if page != "docs/rl.md":
        return {}
    from maxtext_paged import OfflineEngine, SamplingParams

    engine = OfflineEngine("OUT_DIR/config.yml")
    trainer = SimpleNamespace(params=engine.params)
    return {"engine": engine, "trainer": trainer, "prompts": [[5, 6, 7]], "step": 0, "SamplingParams": SamplingParams}


@pytest.mark.slow
@pytest.mark.parametrize("page", PYTHON_PAGES)
def test_python_blocks_run(page: str, place: Path) -> None:
    names = prelude(page)
    try:
        for block in blocks("python")[page]:
            source = "\n" * (block.line - 1) + block.text
            exec(compile(source, str(ROOT / page), "exec"), names)
    finally:
        if "engine" in names:
            names["engine"].close()
    if page == "docs/rl.md":
        assert names["gap"].largest < 1e-3 and len(names["results"][0].samples) == 8


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.long] if page in ALSO_ELSEWHERE else [])
        for page in blocks("sh")
        if in_process(page)
    ],
)
def test_commands_run(page: str, place: Path) -> None:
    before = [Command(page, tuple(BEFORE[page].split()))] if page in BEFORE else []
    for command in [*before, *in_process(page)]:
        if command.words[1] == "convert":
            continue  # the fixture did, and OUT_DIR holds the small pool
        assert run(command) == 0, str(command)
        if command.words[1] == "generate":
            out = command.words[command.words.index("-o") + 1]
            records = [json.loads(line) for line in Path(out).read_text(encoding="utf-8").splitlines()]
            assert sorted(record["index"] for record in records) == list(range(len(prompts().splitlines())))
            assert all(record["error"] is None for record in records)


OWN = [command for command in all_commands() if needs_process(command) and reason(command) is None]


@pytest.mark.long
@pytest.mark.parametrize("command", OWN, ids=str)
def test_commands_of_their_own_process_run(command: Command, place: Path) -> None:
    variables = dict(word.split("=", 1) for word in command.variables)
    if any("ici_tensor_parallelism=2" in word for word in command.words):
        variables.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
    done = subprocess.run(
        [sys.executable, "-m", "maxtext_paged", *command.words[1:]],
        env=environment(**variables),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
