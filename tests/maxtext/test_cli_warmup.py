"""``--warmup`` obtains every program before the first row, and says so."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest

from maxtext_paged.cli.warming import warm_up
from tests.fakes import make_driver, run_all
from tests.strategies import request_of


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("enabled", [True, False])
def test_all_programs_are_there_before_the_first_row(enabled: bool, capsys: pytest.CaptureFixture[str]) -> None:
    driver = make_driver(num_pages=16)
    session: Any = SimpleNamespace(runtime=driver.runtime)
    warm_up(session, io.StringIO(), enabled=enabled)
    before = driver.runtime.metrics()
    assert before.compiled["paged_step"] == len(driver.runtime.control.token_ladder.rungs)
    said = capsys.readouterr().err
    assert (f"warm-up: {before.num_compile_events} programs in" in said) == enabled
    run_all(driver, [request_of(i, 3 + 5 * i, max_tokens=4) for i in range(4)])
    assert driver.runtime.metrics().num_compile_events == before.num_compile_events


@pytest.mark.slow
def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    session: Any = SimpleNamespace(runtime=make_driver(num_pages=16).runtime)
    warm_up(session, terminal)
    assert "warm-up" in terminal.getvalue()
