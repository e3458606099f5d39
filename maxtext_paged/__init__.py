"""MaxText with a paged KV cache: the public names.

Importing this package imports neither jax nor MaxText; a name does when it is first used. torch stays out even
where it is installed (``maxtext_paged.imports``).

For:        the names that callers write against.
Not for:    anything else; what is not listed here may change without notice.
May import: the standard library; everything else when a name is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from maxtext_paged.imports import hidden

if TYPE_CHECKING:
    from kv_common.errors import (
        ConfigError,
        KvCacheError,
        RequestError,
        RequestTooLarge,
        StaleHandleError,
        UnsupportedError,
    )
    from kv_control.logit_options import Alternatives, LogitOptions
    from kv_control.plan import RequestSlice, SamplingSpec
    from maxtext_paged.batch_rows import InputData
    from maxtext_paged.completion_output import CompletionOutput
    from maxtext_paged.config import PagedMaxTextConfig, PagedOptions
    from maxtext_paged.engine import PagedMaxEngine
    from maxtext_paged.formats.own import RowError
    from maxtext_paged.generation import Generation
    from maxtext_paged.generation_stream import GenerationStream
    from maxtext_paged.offline_engine import OfflineEngine
    from maxtext_paged.rows import Row, RowResult, Usage
    from maxtext_paged.sampling_defaults import default_sampling
    from maxtext_paged.sampling_params import SamplingParams
    from maxtext_paged.session import PagedSession, open_session
    from maxtext_paged.token_stream import PagedToken
    from maxtext_paged.tokenizer import HfTokenizer, load_tokenizer
    from maxtext_paged.worker import PagedInferenceWorker

__all__ = [
    "Alternatives",
    "CompletionOutput",
    "ConfigError",
    "Generation",
    "GenerationStream",
    "HfTokenizer",
    "InputData",
    "KvCacheError",
    "LogitOptions",
    "OfflineEngine",
    "PagedInferenceWorker",
    "PagedMaxEngine",
    "PagedMaxTextConfig",
    "PagedOptions",
    "PagedSession",
    "PagedToken",
    "RequestError",
    "RequestSlice",
    "RequestTooLarge",
    "Row",
    "RowError",
    "RowResult",
    "SamplingParams",
    "SamplingSpec",
    "StaleHandleError",
    "UnsupportedError",
    "Usage",
    "default_sampling",
    "load_tokenizer",
    "open_session",
]

_MODULES = {
    "kv_common.errors": (
        "ConfigError",
        "KvCacheError",
        "RequestError",
        "RequestTooLarge",
        "StaleHandleError",
        "UnsupportedError",
    ),
    "kv_control.logit_options": ("Alternatives", "LogitOptions"),
    "kv_control.plan": ("RequestSlice", "SamplingSpec"),
    "maxtext_paged.batch_rows": ("InputData",),
    "maxtext_paged.completion_output": ("CompletionOutput",),
    "maxtext_paged.config": ("PagedMaxTextConfig", "PagedOptions"),
    "maxtext_paged.engine": ("PagedMaxEngine",),
    "maxtext_paged.formats.own": ("RowError",),
    "maxtext_paged.generation": ("Generation",),
    "maxtext_paged.generation_stream": ("GenerationStream",),
    "maxtext_paged.offline_engine": ("OfflineEngine",),
    "maxtext_paged.rows": ("Row", "RowResult", "Usage"),
    "maxtext_paged.sampling_defaults": ("default_sampling",),
    "maxtext_paged.sampling_params": ("SamplingParams",),
    "maxtext_paged.session": ("PagedSession", "open_session"),
    "maxtext_paged.token_stream": ("PagedToken",),
    "maxtext_paged.tokenizer": ("HfTokenizer", "load_tokenizer"),
    "maxtext_paged.worker": ("PagedInferenceWorker",),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with hidden():
        value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
