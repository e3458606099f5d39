"""The garbage collector rests while a session starts, and works again afterwards."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import pytest

from maxtext_paged.collector import collector_paused

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def as_it_was():
    yield
    gc.unfreeze()
    gc.enable()


def collections() -> int:
    return sum(generation["collections"] for generation in gc.get_stats())


def fill() -> None:
    """Far more containers than start a collection."""
    kept = [[] for _ in range(20_000)]
    assert len(kept) == 20_000


def test_nothing_is_collected_inside_and_everything_again_behind_it_even_after_an_error() -> None:
    with pytest.raises(RuntimeError), collector_paused():
        before = collections()
        fill()
        assert collections() == before
        raise RuntimeError
    fill()
    assert collections() > before, "the control: it works again"


def test_a_caller_who_keeps_it_off_finds_it_off() -> None:
    gc.disable()
    with collector_paused():
        pass
    assert not gc.isenabled()


def test_only_the_owner_of_a_process_freezes_what_is_alive() -> None:
    before = gc.get_freeze_count()
    with collector_paused():
        pass
    assert gc.get_freeze_count() == before
    with collector_paused(freeze=True):
        pass
    assert gc.get_freeze_count() > before + 10_000


def test_at_the_end_of_the_process_nothing_is_frozen() -> None:
    """Or extension modules that count what is left at exit (nanobind's) list everything on stderr."""
    program = (
        "import atexit, gc\n"
        "atexit.register(lambda: print('at exit', gc.get_freeze_count()))\n"
        "from maxtext_paged.collector import collector_paused\n"
        "with collector_paused(freeze=True):\n    pass\n"
        "print('before', gc.get_freeze_count() > 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["before True", "at exit 0"]
