"""The configuration a command runs with: whose defaults win, and where compiled programs are kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import pytest

from maxtext_paged.cli import CommandError
from maxtext_paged.cli.configuration import keep_every_program, load_configuration

pytestmark = pytest.mark.maxtext


@pytest.fixture(autouse=True)
def same_cache_afterwards() -> Any:
    """Loading a configuration moves jax's compilation cache, and tests after this one have theirs."""
    names = ("compilation_cache_dir", "persistent_cache_min_compile_time_secs", "persistent_cache_min_entry_size_bytes")
    before = {name: getattr(jax.config, f"jax_{name}") for name in names}
    yield
    for name, value in before.items():
        jax.config.update(f"jax_{name}", value)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "config.yml"
    path.write_text("base_config: base.yml\nvocab_size: 64\n")
    return path


def test_what_maxtext_sets_for_training_on_tpus_is_set_for_this_machine(file: Path, tmp_path: Path) -> None:
    config = load_configuration(str(file), [])
    assert (config.attention, config.hardware, config.vocab_size) == ("gpu_paged", "cpu", 64)
    assert (config.skip_jax_distributed_system, config.enable_checkpointing, config.log_config) == (True, False, False)
    assert not Path(config.base_output_directory).exists()
    assert list(tmp_path.iterdir()) == [file]


def test_a_users_own_setting_wins_wherever_it_stands(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.yml").write_text("base_config: config.yml\nbase_output_directory: from-a-base\n")
    (tmp_path / "job.yml").write_text("base_config: mine.yml\nenable_checkpointing: true\n")
    monkeypatch.setenv("M_LOG_CONFIG", "true")
    config = load_configuration(str(tmp_path / "job.yml"), ["hardware=gpu"])
    assert config.base_output_directory == "from-a-base"
    assert (config.enable_checkpointing, config.log_config, config.hardware) == (True, True, "gpu")


def test_paged_options_are_read_from_file_and_command_line(file: Path) -> None:
    file.write_text(file.read_text() + "paged_num_pages: 7\npaged_tokens_per_page: 8\n")
    config = load_configuration(str(file), ["paged_tokens_per_page=4"])
    assert (config.paged_num_pages, config.paged_tokens_per_page) == (7, 4)


def test_any_file_name_will_do(file: Path) -> None:
    other = file.rename(file.with_suffix(".yaml"))
    assert load_configuration(str(other), []).vocab_size == 64


def test_bases_that_lead_in_a_circle_are_refused(file: Path) -> None:
    file.write_text("base_config: config.yml\n")
    with pytest.raises(CommandError, match="leads back"):
        load_configuration(str(file), [])


@pytest.mark.parametrize(
    ("key", "variable", "cache_home", "kept_in"),
    [
        (["jax_cache_dir=/key"], "/variable", "/home-cache", "/key"),
        ([], "/variable", "/home-cache", "/variable"),
        ([], None, "/home-cache", "/home-cache/maxtext-paged/jax"),
        ([], None, None, "/users/someone/.cache/maxtext-paged/jax"),
    ],
)
def test_programs_are_kept_where_the_nearest_setting_says(
    file: Path, monkeypatch: pytest.MonkeyPatch, key: list[str], variable: str, cache_home: str, kept_in: str
) -> None:
    monkeypatch.setenv("HOME", "/users/someone")
    for name, value in (("JAX_COMPILATION_CACHE_DIR", variable), ("XDG_CACHE_HOME", cache_home)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    load_configuration(str(file), key)
    assert keep_every_program() == f"compiled programs are kept in {kept_in}"
    assert jax.config.jax_compilation_cache_dir == kept_in
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 0
