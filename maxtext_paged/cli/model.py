"""The model of a job: what its configuration says, then the engine.

For:        the one place of the command that assembles tokenizer, limits, session and worker, and says which they are.
Not for:    rows, files and how a job goes (generate.py).
May import: maxtext_paged; MaxText and jax inside functions.
"""

from __future__ import annotations

import hashlib
import json
import logging
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kv_common.errors import ConfigError, UnsupportedError
from maxtext_paged.cli import CommandError, ExitCode, one_line, say
from maxtext_paged.cli.configuration import keep_every_program, load_configuration
from maxtext_paged.cli.environment import import_maxtext, prepare_environment
from maxtext_paged.cli.run_file import Fingerprint
from maxtext_paged.intake import Intake, Tokenizer
from maxtext_paged.report.counts import JobCounts
from maxtext_paged.report.recorder import Recorder

if TYPE_CHECKING:
    from maxtext_paged.assembly import PagedAssembly
    from maxtext_paged.session import PagedSession
    from maxtext_paged.worker import PagedInferenceWorker


@dataclass(frozen=True, slots=True)
class Engine:
    """What runs rows. ``weights`` is a digest of the ones it runs with; ``recorder`` keeps what they do."""

    session: PagedSession
    worker: PagedInferenceWorker
    weights: str
    recorder: Callable[[JobCounts], Recorder] = Recorder


@dataclass(frozen=True, slots=True)
class Model:
    """A configuration that was read and judged; nothing large is loaded yet.

    Attributes:
      tokenizer: its text form. intake: makes rows of lines.
      identity: what of it decides the results, as a run's fingerprint has it.
      start: loads the weights and allocates the pool, for a first step of about so many tokens; a CommandError where
        that fails.
      max_num_batched_tokens: of a step.
      facts: heading to name to value of what it runs on, for the report.
      assembly: what ``start`` starts, where that is in this process.
      tokenizer_options: what the configuration says of the tokenizer.
      close: ends what was opened elsewhere; may be called again.
    """

    tokenizer: Tokenizer
    intake: Intake
    identity: Fingerprint
    start: Callable[[int], Engine]
    max_num_batched_tokens: int
    facts: Callable[[], Mapping[str, Mapping[str, str]]] = dict
    assembly: PagedAssembly | None = None
    tokenizer_options: Mapping[str, Any] = field(default_factory=dict)
    close: Callable[[], None] = lambda: None


def open_model(path: str, overrides: Sequence[str], *, level: int = logging.INFO, memory_share: int = 1) -> Model:
    """Read the configuration; log lines are shown from ``level`` on.

    Args:
      memory_share: how many such models share a CPU's memory: ``paged_kv_memory_fraction`` is divided by it.

    Raises:
      CommandError, ConfigError, UnsupportedError: in one line, what is wrong with it.
    """
    prepare_environment(level)
    import_maxtext()
    from maxtext_paged.assembly import assemble
    from maxtext_paged.processes import require_one_process
    from maxtext_paged.sampling_defaults import default_sampling
    from maxtext_paged.tokenizer import load_tokenizer

    config = load_configuration(path, overrides)
    require_one_process("maxtext-paged generate")  # the configuration may have joined several
    tokenizer = load_tokenizer(config)
    defaults = default_sampling(config)
    assembly = assemble(_with_share(config, memory_share))
    say(keep_every_program())
    sampling = asdict(defaults) | {"end_tokens": sorted(tokenizer.eos_ids)}
    return Model(
        tokenizer,
        Intake(tokenizer, defaults, vocab_size=int(config.vocab_size), max_model_len=int(config.max_target_length)),
        {
            "configuration": configured(config.get_keys(), _defaults(config)),
            "sampling": sampling,
            "tokenizer": {"files": files_digest(config.tokenizer_path)},
        },
        lambda first_step_tokens: _start(assembly, tokenizer, first_step_tokens),
        assembly.options.paged_max_num_batched_tokens,
        lambda: _facts(assembly),
        assembly,
        {name: _plain(getattr(config, name, None)) for name in TOKENIZER_OPTIONS},
    )


TOKENIZER_OPTIONS = ("tokenizer_type", "tokenizer_path", "add_bos", "chat_template", "chat_template_path")
"""What ``load_tokenizer`` reads."""


def _plain(value: Any) -> Any:
    return getattr(value, "value", value)


def _with_share(config: Any, share: int) -> Any:
    fraction = float(getattr(config, "paged_kv_memory_fraction", 0) or 0)
    if share == 1 or not fraction or config.hardware != "cpu":
        return config
    from maxtext.configs import pyconfig

    update = {"paged_kv_memory_fraction": fraction / share}
    return pyconfig.HyperParameters(config._pydantic_config.model_copy(update=update))


def _facts(assembly: Any) -> dict[str, dict[str, str]]:
    from maxtext_paged.cli.doctor import assembly_facts, machine_facts

    return {"Machine": _by_name(machine_facts()), "Model and pool": _by_name(assembly_facts(assembly))}


def _by_name(facts: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Name to value; values of one name together."""
    found: dict[str, str] = {}
    for name, value in facts:
        found[name] = f"{found[name]}; {value}" if name in found else value
    return found


def _start(assembly: Any, tokenizer: Any, first_step_tokens: int) -> Engine:
    from maxtext_paged.namespace import weights_fingerprint
    from maxtext_paged.session import start_session
    from maxtext_paged.worker import PagedInferenceWorker

    try:
        session = start_session(assembly, first_step_tokens=first_step_tokens)
        weights = weights_fingerprint(session.runtime.params)
    except (ConfigError, UnsupportedError):
        raise
    except Exception as error:
        traceback.print_exc()
        message = f"the engine did not start: {type(error).__name__}: {one_line(error)}"
        raise CommandError(message, ExitCode.ENGINE) from error
    say(f"end tokens: {sorted(tokenizer.eos_ids) or 'none'}")
    worker = PagedInferenceWorker(session, stop_token_ids=tokenizer.eos_ids, tokenizer=tokenizer)
    return Engine(session, worker, weights)


# --- identity ----------------------------------------------------------------------------------------------

_ELSEWHERE = frozenset({"base_config", "load_parameters_path", "log_config", "run_name", "tokenizer_path"})
"""Options that say where something is: what stands there has a digest of its own, or does not matter."""
_PLACES = ("_dir", "_directory", "_hlo_xla_flags")
_MAX_CHARACTERS = 200


def configured(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, str]:
    """Every option that is not at its default, but those that only say where something is.

    Options that should not change a token (pool size, batch size) are in it too: whoever changes them half way sees
    their names and decides.
    """
    found = {}
    for name, value in values.items():
        if name in _ELSEWHERE or name.endswith(_PLACES) or (name in defaults and defaults[name] == value):
            continue
        text = str(getattr(value, "value", value))
        if len(text) > _MAX_CHARACTERS:
            text = f"{text[:20]}... {hashlib.sha256(text.encode()).hexdigest()[:16]}"
        found[name] = text
    return found


def _defaults(config: Any) -> dict[str, Any]:
    fields = type(config._pydantic_config).model_fields
    return {name: field.get_default(call_default_factory=True) for name, field in fields.items()}


def files_digest(path: str) -> str:
    """A digest of a tokenizer's files, whatever directory they are in; of the name where it is none of ours to read."""
    found = Path(path).expanduser()
    files = sorted(file for file in found.glob("*") if _is_tokenizers(file)) if found.is_dir() else [found]
    whole = hashlib.sha256()
    for file in files:
        content = hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else path
        whole.update(json.dumps([file.name, content]).encode())
    return whole.hexdigest()


def _is_tokenizers(file: Path) -> bool:
    return file.suffix in (".json", ".jinja", ".model", ".txt") and file.is_file()
