"""Pool sizes: what is charged to a budget, what free memory is, and what a refusal says."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest

from kv_common.errors import ConfigError
from kv_common.layout import MAX_SLOTS, KvStorageLayoutV1
from kv_execution.native.library import native_available
from maxtext_paged import sizing
from maxtext_paged.assembly import assemble
from maxtext_paged.config import PagedOptions
from maxtext_paged.session import open_session
from maxtext_paged.sizing import FreeMemory, free_memory, pool_size, requests_at_once
from tests.tiny_models import dense_model, make_config, make_mesh

LAYOUT = KvStorageLayoutV1(2, 1, 16, num_kv_heads=2, head_dim=16, dtype="float32")
PAGE = 2 * 2 * 16 * 2 * 16 * 4  # K and V, layers, tokens, heads, head size, float32
STEP = 576
"""Workspace of one step."""

needs_native = pytest.mark.skipif(native_available() is not None, reason=str(native_available()))


def size(**options: Any) -> sizing.PoolSize:
    unset = {"num_pages": 0, "budget_bytes": 0, "max_num_seqs": 4, "max_model_len": 64}
    return pool_size(LAYOUT, **(unset | options))


class Device:
    def __init__(self, platform: str, stats: dict[str, int] | None) -> None:
        self.platform, self._stats = platform, stats

    def memory_stats(self) -> dict[str, int] | None:
        return self._stats


@pytest.mark.parametrize("pages", [1, 2, 7])
def test_a_budget_pays_for_two_steps_of_workspace_before_pages(pages: int) -> None:
    exact = pages * PAGE + 2 * STEP
    assert size(budget_bytes=exact, step_workspace_bytes=STEP).num_pages == pages
    assert size(budget_bytes=exact + PAGE - 1, step_workspace_bytes=STEP).num_pages == pages
    assert size(budget_bytes=exact, step_workspace_bytes=STEP).workspace_bytes == 2 * STEP
    assert size(budget_bytes=exact).num_pages == (exact // PAGE), "no split-KV, no reserve"
    if pages > 1:
        assert size(budget_bytes=exact - 1, step_workspace_bytes=STEP).num_pages == pages - 1


@pytest.mark.parametrize("step", [0, STEP])
def test_a_refused_budget_names_all_costs_and_the_smallest_that_works(step: int) -> None:
    with pytest.raises(ConfigError) as refusal:
        size(budget_bytes=PAGE + 2 * step - 1, step_workspace_bytes=step, weight_bytes=12345)
    message = str(refusal.value)
    assert f"is {PAGE} bytes over all layers" in message
    assert f"of 2 steps {2 * step}, the weights 12345," in message
    smallest = int(re.findall(r"smallest budget that works is (\d+)", message)[0])
    assert size(budget_bytes=smallest, step_workspace_bytes=step).num_pages == 1
    with pytest.raises(ConfigError):
        size(budget_bytes=smallest - 1, step_workspace_bytes=step)


def test_a_fraction_is_of_free_memory_after_the_weights() -> None:
    free = FreeMemory(1000 + 20 * PAGE + 4 * STEP, "a test")
    options = {"free": free, "weight_bytes": 1000, "step_workspace_bytes": STEP}
    got = size(memory_fraction=0.5, **options)
    assert got.num_pages == 10
    assert "paged_kv_memory_fraction=0.5" in got.reason and "a test" in got.reason
    assert size(memory_fraction=1.0, **options).num_pages == 20 + 2 * STEP // PAGE
    with pytest.raises(ConfigError) as refusal:
        size(memory_fraction=0.01, **options)
    for words in ("XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_PREALLOCATE", str(free.num_bytes), "a test"):
        assert words in str(refusal.value)
    with pytest.raises(ConfigError, match="is 0 bytes"):  # weights alone do not fit
        size(memory_fraction=1.0, free=FreeMemory(10, "a test"), weight_bytes=11)


def test_pages_win_over_bytes_and_bytes_over_the_fraction() -> None:
    fraction = {"memory_fraction": 1.0, "free": FreeMemory(100 * PAGE, "a test")}
    assert size(num_pages=3, budget_bytes=5 * PAGE, **fraction).reason == "paged_num_pages=3"
    assert size(budget_bytes=5 * PAGE, **fraction).num_pages == 5
    assert size(**fraction).num_pages == 100


def test_a_budget_beyond_int32_slots_is_cut_and_says_so() -> None:
    got = size(budget_bytes=(MAX_SLOTS // 16 + 9) * PAGE)
    assert got.num_pages == MAX_SLOTS // 16
    assert "cut to" in got.reason
    replace(LAYOUT, num_pages=got.num_pages)


def test_free_memory_is_the_fullest_devices_own_account() -> None:
    devices = [Device("cuda", {"bytes_limit": 100, "bytes_in_use": used}) for used in (10, 40, 0)]
    assert free_memory(devices).num_bytes == 60
    with pytest.raises(ConfigError, match="paged_kv_memory_fraction: cuda does not say"):
        free_memory([*devices, Device("cuda", None)])


def test_cpu_devices_share_what_the_machine_has_available(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  9000 kB\nMemFree:  1 kB\nMemAvailable:   4000 kB\n")
    monkeypatch.setattr(sizing, "_MEMINFO", meminfo)
    got = free_memory([Device("cpu", None)] * 4)
    assert got.num_bytes == 1000 * 1024
    assert "MemAvailable" in got.source and "4 CPU devices" in got.source
    monkeypatch.setattr(sizing, "_MEMINFO", tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="set paged_kv_budget_bytes"):
        free_memory([Device("cpu", None)])


@pytest.mark.parametrize("value", [-0.1, 1.01])
def test_a_fraction_outside_0_to_1_is_refused_by_name(value: float) -> None:
    with pytest.raises(ConfigError, match="paged_kv_memory_fraction"):
        PagedOptions.checked({"paged_kv_memory_fraction": value})


def test_requests_at_once_take_whole_pages_and_end_at_max_num_seqs() -> None:
    layout = replace(LAYOUT, num_pages=10)
    assert [requests_at_once(layout, tokens, 8) for tokens in (1, 16, 17, 33, 160, 161)] == [8, 8, 5, 3, 1, 0]


# --- through the assembly ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.maxtext
@needs_native
@pytest.mark.parametrize("native", ["auto", "0"])
def test_a_budget_for_exactly_k_pages_gives_k_with_the_backends_own_reserve(
    native: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NPROC", "2")  # pieces are made only where there are threads for them
    options = {"paged_attention_native": native, "max_target_length": 1024, "paged_max_num_seqs": 2}
    config = make_config(**options)
    reserve = assemble(config, mesh=make_mesh(config)).pool.workspace_bytes
    # Two steps; 2 rows of 4 pieces, 4 query heads, 16 values with a maximum and a sum, float32.
    assert reserve == (0 if native == "0" else 2 * (2 * 4) * 4 * (16 + 2) * 4)
    config = make_config(**options, paged_kv_budget_bytes=5 * PAGE + reserve)
    assembly = assemble(config, mesh=make_mesh(config))
    assert assembly.model.layout.num_pages == 5
    if reserve:
        config = make_config(**options, paged_kv_budget_bytes=5 * PAGE + reserve - 1)
        assert assemble(config, mesh=make_mesh(config)).model.layout.num_pages == 4


@pytest.mark.maxtext
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_are_counted_as_the_session_holds_them(dtype: str, caplog: pytest.LogCaptureFixture) -> None:
    config = make_config(dtype=dtype, paged_num_pages=3)
    with caplog.at_level(logging.INFO, logger="maxtext_paged.session"):
        session = open_session(config, mesh=make_mesh(config), params=dense_model().params)
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(session.runtime.params))
    assert session.pool.weight_bytes == held
    [line] = [record.message for record in caplog.records if record.message.startswith("KV pool")]
    for words in ("3 pages of 16 tokens", "MiB of weights", "split-KV workspace", "(paged_num_pages=3)"):
        assert words in line
    assert any("holds 48 tokens, max_target_length=64" in record.message for record in caplog.records)
    session.close()


@pytest.mark.maxtext
@pytest.mark.multi_device
def test_weights_of_a_sharded_model_are_counted_on_each_device() -> None:
    config = make_config(ici_tensor_parallelism=2, ici_fsdp_parallelism=4, paged_num_pages=8, weight_dtype="float32")
    session = open_session(config, mesh=make_mesh(config, jax.devices()[:8]), params=dense_model().params)
    held = dict.fromkeys(jax.devices()[:8], 0)
    for leaf in jax.tree.leaves(session.runtime.params):
        for shard in leaf.addressable_shards:
            held[shard.device] += shard.data.nbytes
    assert set(held.values()) == {session.pool.weight_bytes}
    session.close()
