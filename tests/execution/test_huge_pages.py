"""Arrays move onto huge pages and stay what they are: compared with the kernel's own account of the process."""

from __future__ import annotations

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kv_execution import runtime as runtime_module
from kv_execution.huge_pages import HUGE_PAGE, back_with_huge_pages
from tests.fakes import make_driver

SMAPS = Path("/proc/self/smaps")
SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def bytes_on_huge_pages(begin: int, end: int) -> int:
    """Of the mappings that hold these addresses, as the kernel counts them."""
    total = 0
    for block in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", SMAPS.read_text()):
        low, high = (int(number, 16) for number in block.split(maxsplit=1)[0].split("-"))
        if low < end and begin < high:
            total += int(re.search(r"AnonHugePages: +(\d+) kB", block)[1]) * 1024
    return total


def kernel_gives_them() -> bool:
    return SETTING.exists() and "[never]" not in SETTING.read_text() and SMAPS.exists()


@pytest.mark.skipif(not kernel_gives_them(), reason="this kernel gives no huge pages")
def test_arrays_move_onto_huge_pages_and_keep_their_places_and_values() -> None:
    arrays = [jax.jit(lambda i: jnp.full((4 * HUGE_PAGE // 4,), i, jnp.float32))(float(i)) for i in range(4)]
    jax.block_until_ready(arrays)
    places = [array.unsafe_buffer_pointer() for array in arrays]
    moved = back_with_huge_pages(arrays)
    if not moved:
        pytest.skip("the kernel had no huge page left, or is older than 6.1")
    assert moved % HUGE_PAGE == 0 and moved <= sum(array.nbytes for array in arrays) + 3 * 64 * 1024
    assert bytes_on_huge_pages(min(places), max(places) + arrays[0].nbytes) >= moved
    assert [array.unsafe_buffer_pointer() for array in arrays] == places
    for i, array in enumerate(arrays):
        assert (np.asarray(array) == i).all()


def test_a_kernel_that_says_never_or_nothing_is_not_asked(tmp_path: Path) -> None:
    array = jnp.zeros(4 * HUGE_PAGE // 4)
    (tmp_path / "enabled").write_text("always madvise [never]\n")
    assert back_with_huge_pages([array], setting=tmp_path / "enabled") == 0
    assert back_with_huge_pages([array], setting=tmp_path / "missing") == 0


def test_what_is_no_array_of_a_cpu_is_passed_over() -> None:
    assert back_with_huge_pages([jax.ShapeDtypeStruct((HUGE_PAGE,), jnp.float32), None, jnp.zeros(0)]) == 0


def test_a_runtime_moves_its_weights_and_pools_and_whatever_takes_their_place(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[int] = []
    monkeypatch.setattr(
        runtime_module, "back_with_huge_pages", lambda arrays: moved.extend(id(array) for array in arrays)
    )
    runtime = make_driver(8).runtime
    params = runtime.params
    assert {id(leaf) for leaf in jax.tree.leaves((params, runtime.pools))} <= set(moved)
    others = jax.tree.map(lambda leaf: leaf + 0, params)
    runtime.update_params(others)
    assert {id(leaf) for leaf in jax.tree.leaves(others)} <= set(moved)
    runtime.drop_pools()
    runtime.pools = again = runtime.model.create_pools()
    assert {id(leaf) for leaf in jax.tree.leaves(again)} <= set(moved)
