"""CONFIG.yml and ``key=value`` into MaxText's configuration, with one line for whatever is wrong with them.

For:        the defaults a command on one machine needs, unknown keys with the closest known one, the compilation cache.
Not for:    what the options mean (maxtext_paged.config and options).
May import: the standard library, omegaconf, pydantic, kv_common; jax and MaxText inside functions.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from kv_common.errors import ConfigError
from maxtext_paged.cli import CommandError, one_line

_KEY_VALUE = re.compile(r"[A-Za-z_][\w.]*=", re.ASCII)
_UNKNOWN_KEY = re.compile(r"^'([^']*)' not in ")  # pyconfig's words; what follows is every key it knows
_MAX_ERRORS = 4
_MAX_CHOICES = 12


def check_arguments(path: str, overrides: Sequence[str]) -> None:
    """What can be said about them before MaxText is imported.

    Raises:
      CommandError: the file is not there, or an override is not ``key=value``.
    """
    if Path(path).is_dir():
        raise CommandError(f"{path} is a directory: give the configuration in it, such as {Path(path) / 'config.yml'}")
    if not Path(path).is_file():
        raise CommandError(f"{path}: no such configuration file")
    for override in overrides:
        if not _KEY_VALUE.match(override):
            raise CommandError(f"{override!r} is not key=value")


def load_configuration(path: str, overrides: Sequence[str]) -> Any:
    """MaxText's ``HyperParameters`` with the ``paged_*`` keys, for a job on this machine.

    What neither the file, nor its bases outside MaxText, nor the command line, nor an ``M_KEY`` variable sets
    gets this command's default instead of MaxText's, which are made for training on a TPU pod.

    Raises:
      CommandError, ConfigError: in one line, which key is wrong and why.
    """
    from maxtext.configs import pyconfig

    from maxtext_paged.config import PagedMaxTextConfig

    check_arguments(path, overrides)
    given = _given_keys(path) | _override_keys(overrides)
    defaults = {
        "attention": "gpu_paged",
        "skip_jax_distributed_system": True,
        "enable_checkpointing": False,
        "log_config": False,
        # MaxText wants one; nothing is ever written there.
        "base_output_directory": str(Path(tempfile.gettempdir()) / "maxtext-paged-unused"),
        "jax_cache_dir": _default_cache_dir(),
    }
    if "hardware" not in given:
        defaults["hardware"] = _hardware()
    missing = {key: value for key, value in defaults.items() if key not in given}
    try:
        # `pyconfig.initialize` would log its own report, write /dev/termination-log and call sys.exit.
        pydantic_config = pyconfig._initialize_pydantic(
            ["", *overrides], config_class=PagedMaxTextConfig, base_config=path, **missing
        )
        config = pyconfig.HyperParameters(pydantic_config)
    except Exception as error:
        raise CommandError(_explained(path, error, set(PagedMaxTextConfig.model_fields))) from error
    if config.attention != "gpu_paged":
        raise ConfigError(
            f"attention={config.attention}: this command runs attention=gpu_paged; set it or leave it out"
        )
    weights = config.load_parameters_path
    if weights and "://" not in weights and not Path(weights).expanduser().exists():
        raise ConfigError(f"load_parameters_path={weights}: no such file or directory")
    return config


def _given_keys(path: str) -> set[str]:
    """Keys that the user's files and environment set: the file's and its bases', up to MaxText's own."""
    return {name[2:].lower() for name in os.environ if name.startswith("M_")} | set(_file_values(path))


def given_values(path: str, overrides: Sequence[str]) -> dict[str, Any]:
    """What the user's files, environment and overrides set, each winning over those before; MaxText's own files are
    not read."""
    from omegaconf import OmegaConf

    _override_keys(overrides)
    values = _file_values(path) | {name[2:].lower(): value for name, value in os.environ.items() if name[:2] == "M_"}
    return values | {str(key): value for key, value in OmegaConf.from_cli(list(overrides)).items()}


def _file_values(path: str) -> dict[str, Any]:
    from maxtext.utils.globals import MAXTEXT_CONFIGS_DIR
    from omegaconf import DictConfig, OmegaConf

    own = Path(MAXTEXT_CONFIGS_DIR).resolve()
    values: dict[str, Any] = {}
    file, seen = Path(path), set()
    while not file.resolve().is_relative_to(own):
        if file.resolve() in seen:
            raise CommandError(f"{file}: base_config leads back to this file")
        seen.add(file.resolve())
        try:
            loaded = OmegaConf.load(file)
        except Exception as error:  # yaml's, omegaconf's or the system's
            raise CommandError(f"{file}: not a readable YAML file: {one_line(error)}") from error
        if not isinstance(loaded, DictConfig):
            raise CommandError(f"{file}: must hold key: value pairs")
        values = {str(key): loaded.get(key) for key in loaded} | values
        base = loaded.get("base_config")
        if not base:
            break
        # As pyconfig resolves it: absolute, beside this file, or MaxText's own.
        beside = file.parent / str(base)
        file = beside if beside.is_file() else own / str(base)
        if not file.is_file():
            raise CommandError(f"{path}: base_config={base}: no such file, neither beside it nor among MaxText's own")
    return values


def _override_keys(overrides: Sequence[str]) -> set[str]:
    from omegaconf import OmegaConf

    keys = set()
    for override in overrides:
        try:
            keys |= {str(key) for key in OmegaConf.from_cli([override])}
        except Exception as error:
            raise CommandError(f"{override!r}: the value is not YAML: {one_line(error)}") from error
    return keys


def _hardware() -> str:
    """MaxText's word for the platform jax runs on."""
    import jax

    try:
        platform = jax.default_backend()
    except RuntimeError as error:
        raise CommandError(f"jax finds no device: {one_line(error)}") from error
    return platform if platform in ("cpu", "tpu") else "gpu"


def _explained(path: str, error: Exception, known: set[str]) -> str:
    from pydantic import ValidationError

    if isinstance(error, ValidationError):
        problems = []
        for item in error.errors()[:_MAX_ERRORS]:
            key = ".".join(str(part) for part in item["loc"])
            problems.append(f"{key}={item['input']!r}: {_wanted(item)}" if key else _wanted(item))
        more = error.error_count() - len(problems)
        return "; ".join(problems) + (f" (and {more} more)" if more else "")
    unknown = _UNKNOWN_KEY.match(str(error))
    if unknown is not None:
        key = unknown[1]
        close = get_close_matches(key, known, n=1)
        return f"unknown option {key!r}" + (f": did you mean {close[0]!r}?" if close else "")
    return f"{path}: {one_line(error)}"


def _wanted(item: Any) -> str:
    """Pydantic's message, or the closest of a long list of choices."""
    message = one_line(item["msg"])
    choices = re.findall(r"'([^']*)'", item.get("ctx", {}).get("expected", ""))
    if len(choices) <= _MAX_CHOICES:
        return message
    close = get_close_matches(str(item["input"]), choices, n=1)
    return f"not one of {len(choices)} known values" + (f": did you mean {close[0]!r}?" if close else "")


# --- compiled programs -------------------------------------------------------------------------------------


def keep_every_program() -> str:
    """Let the compilation cache keep every program, however quick to compile; a line that says where."""
    import jax

    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    directory = jax.config.jax_compilation_cache_dir
    if not directory or not jax.config.jax_enable_compilation_cache:
        return "compiled programs are not kept: every run compiles them again (see jax_cache_dir)"
    return f"compiled programs are kept in {directory}"


def _default_cache_dir() -> str:
    """Where programs are kept unless ``jax_cache_dir`` is given: jax's own variable, else the user's cache."""
    if directory := os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return directory
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # no home directory
        return ""
    return str(base / "maxtext-paged" / "jax")
