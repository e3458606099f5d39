"""Each promise of docs/contracts.md has a fault that breaks it, and a test of its own that must see that."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.contracts.test_documented_contracts import NAMED, table_rows

ROOT = Path(__file__).parents[2]
PROMISES = dict(table_rows((ROOT / "docs" / "contracts.md").read_text(encoding="utf-8")))


@pytest.fixture(scope="module")
def scripts() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mutants", ROOT / "scripts" / "mutants.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_every_promise_has_a_mutant(scripts: ModuleType) -> None:
    assert {mutant.promise for mutant in scripts.read_mutants()} == set(PROMISES)


def test_every_mutant_can_be_put_in_and_changes_something(scripts: ModuleType) -> None:
    for mutant in scripts.read_mutants():
        text = (ROOT / mutant.file).read_text(encoding="utf-8")
        assert mutant.applied_to(text) != text


def test_every_mutants_test_is_one_that_holds_the_promise(scripts: ModuleType) -> None:
    for mutant in scripts.read_mutants():
        named = {f"{file}::{name}" for file, name in NAMED.findall(PROMISES[mutant.promise])}
        whole_files = {one.partition("::")[0] for one in named}
        assert mutant.test in named | whole_files, mutant.test


def test_a_mutant_that_is_not_there_once_is_refused(scripts: ModuleType) -> None:
    mutant = scripts.Mutant("p", "f.py", "old", "new", "t")
    assert mutant.applied_to("an old line") == "an new line"
    for text in ("", "old old"):
        with pytest.raises(ValueError, match=r"f\.py has \d times 'old'"):
            mutant.applied_to(text)


@pytest.mark.parametrize(("status", "became"), [(0, "passed"), (1, "failed"), (2, "unclear"), (5, "unclear")])
def test_only_a_failing_test_catches_a_mutant(
    scripts: ModuleType, monkeypatch: pytest.MonkeyPatch, status: int, became: str
) -> None:
    def run(*_: Any, **__: Any) -> Any:
        return scripts.subprocess.CompletedProcess([], status, "so many tests", "")

    monkeypatch.setattr(scripts.subprocess, "run", run)
    assert scripts.run_tests(ROOT, ["a"], multi_device=False) == (became, f"so many tests (status {status})")


def test_tests_that_do_not_end_say_nothing(scripts: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: Any, **__: Any) -> Any:
        raise scripts.subprocess.TimeoutExpired("pytest", 7)

    monkeypatch.setattr(scripts.subprocess, "run", run)
    assert scripts.run_tests(ROOT, ["a"], multi_device=True, seconds=7) == ("unclear", "no end in 7 s")
