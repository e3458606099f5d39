"""What has to be settled before MaxText is imported, and what its import must not bring along.

For:        environment variables, logging and the one late import of MaxText.
Not for:    configuration values (configuration.py).
May import: the standard library; MaxText and maxtext_paged inside ``import_maxtext``.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
import warnings

from maxtext_paged.imports import TORCH, hidden

OURS = ("kv_common", "kv_control", "kv_execution", "maxtext_paged")

_SHOWN_FROM = {"absl": logging.ERROR, "maxtext.configs.pyconfig": logging.ERROR}
"""Loggers whose warnings are about their own futures, about training, or about what we say ourselves."""


class _StderrHandler(logging.Handler):
    """Writes to whatever ``sys.stderr`` is now: a progress bar puts its own in place while it is shown."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr, flush=True)


def prepare_environment(level: int = logging.INFO) -> None:
    """Set what MaxText and jax read at import, and show our own log lines from ``level`` on, upstream's warnings."""
    os.environ.setdefault("DECOUPLE_GCLOUD", "TRUE")  # no Google Cloud libraries, no JetStream
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # XLA's C++ side: errors only
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it misses torch, aloud
    for name in OURS:
        logging.getLogger(name).setLevel(level)
    if any(isinstance(handler, _StderrHandler) for handler in logging.getLogger().handlers):
        return  # prepared before, by an earlier command of this process
    theirs, ours = _StderrHandler(logging.WARNING), _StderrHandler()
    theirs.addFilter(lambda record: record.levelno >= _SHOWN_FROM.get(record.name, logging.WARNING))
    theirs.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    ours.setFormatter(logging.Formatter("maxtext-paged: %(message)s"))
    logging.getLogger().addHandler(theirs)
    for name in OURS:
        logging.getLogger(name).addHandler(ours)
        logging.getLogger(name).propagate = False


def import_maxtext() -> None:
    """Import MaxText and everything of ours that needs it: quietly, without torch and without JetStream."""
    with hidden((*TORCH, "jetstream")), contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import maxtext_paged.session
        import maxtext_paged.tokenizer
        import maxtext_paged.worker  # noqa: F401
