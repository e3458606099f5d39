"""docs/library.md and examples/library.py run, on a tiny model that is opened by the path of its configuration."""

from __future__ import annotations

import doctest
import importlib
import json
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from maxtext_paged.formats.lines import MAX_LINE_BYTES
from maxtext_paged.generation import Generation
from maxtext_paged.printable import MAX_MESSAGE_CHARACTERS
from maxtext_paged.row_fields import MAX_ID_CHARACTERS
from maxtext_paged.row_limits import CHARACTERS_PER_TOKEN, MAX_DEPTH, MAX_MESSAGES, MAX_STOP_TOKEN_IDS
from maxtext_paged.rows import MAX_SAMPLES
from maxtext_paged.template_process import Limits

pytestmark = pytest.mark.maxtext

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "library.md").read_text(encoding="utf-8")
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, engine_options: dict[str, Any]) -> Path:
    """A folder with a ``model/``: random weights, a token for each of 254 bytes."""
    from tests.tiny_models import _COMMON, BLOCKS

    place = tmp_path_factory.mktemp("library")
    model = place / "model"
    model.mkdir()
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[:254]
    tokenizer = Tokenizer(BPE({letter: i + 2 for i, letter in enumerate(letters)} | {"<pad>": 0, "<end>": 1}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<pad>", "<end>"])
    tokenizer.save(str(model / "tokenizer.json"))
    (model / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>", "chat_template": TEMPLATE}))
    options = {**_COMMON, **BLOCKS["llama2"], **engine_options, "base_config": "base.yml"}
    options |= {"tokenizer_type": "huggingface", "tokenizer_path": str(model)}
    (model / "config.yml").write_text(yaml.safe_dump(options))
    return place


@pytest.mark.slow
def test_every_block_of_the_page_runs(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    names: dict[str, Any] = {}
    blocks = list(re.finditer(r"^```python\n(.*?)^```", PAGE, re.M | re.S))
    assert len(blocks) >= 10
    for block in blocks:
        line = PAGE.count("\n", 0, block.start(1))
        exec(compile("\n" * line + block[1], str(ROOT / "docs" / "library.md"), "exec"), names)
    out = capsys.readouterr().out
    for promised in re.findall(r"^\s*print\(error.*?# (.*)$", PAGE, re.M):
        assert promised in out


@pytest.mark.slow
def test_the_example_runs(place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["library.py", str(place / "model" / "config.yml")])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "examples" / "library.py"), run_name="__main__")
    assert ended.value.code == 0
    assert {"0", "1", "Paris", "Oslo", "Lima"} <= {line.split()[0] for line in capsys.readouterr().out.splitlines()}


@pytest.mark.parametrize(
    "module", ["sampling_params", "prompts", "turns", "printable", "row_limits", "template_process", "intake", "rows"]
)
def test_the_examples_in_docstrings_run(module: str) -> None:
    found = doctest.testmod(importlib.import_module(f"maxtext_paged.{module}"))
    assert found.attempted and not found.failed


def test_the_page_names_every_field_of_a_result_and_the_docstring_of_its_class_too() -> None:
    assert Generation.__doc__ is not None
    for field in Generation.__dataclass_fields__:
        assert f"| `{field}` |" in PAGE
        assert re.search(rf"^      {field}: ", Generation.__doc__, re.M)


def test_the_page_of_files_has_every_bound() -> None:
    page = (ROOT / "docs" / "files.md").read_text(encoding="utf-8").replace(",", "")
    limits = Limits()
    for bound in (
        f"{MAX_LINE_BYTES // 2**20} MiB",
        f"{MAX_DEPTH} deep",
        f"{MAX_MESSAGES} messages",
        f"{MAX_STOP_TOKEN_IDS} `stop_token_ids`",
        f"{MAX_ID_CHARACTERS} characters",
        f"{MAX_SAMPLES} samples",
        f"{CHARACTERS_PER_TOKEN} characters",
        f"{MAX_MESSAGE_CHARACTERS} characters",
        f"{limits.cpu_seconds:g} s of processor time",
        f"{limits.memory_bytes // 2**20} MiB of memory",
        f"{limits.max_characters // 2**20} Mi characters",
    ):
        assert bound in page, bound
