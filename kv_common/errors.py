"""The error tree: every exception this project raises on purpose.

For:        telling a caller what went wrong, with the numbers and the knob to turn.
Not for:    "no room right now", which is a return value (``None``), never an exception.
May import: the standard library, numpy.

::

    KvCacheError
    ├── ConfigError           an option, or a combination of options, is refused (also a ValueError)
    │   └── LayoutError       the pool geometry is impossible (heads do not divide, sizes below one)
    ├── UnsupportedError      a model, layer, backend or option this project declines by name
    ├── PageStateError        a page was used against its state: double free, dirty page in a table
    ├── StaleHandleError      a request handle outlived its request
    ├── RequestError          one request is unusable; others go on (also a ValueError)
    │   └── RequestTooLarge   the pool or the context can never hold it, however long it waits
    ├── SchedulerStalled      the loop made no progress: a bug, never load
    └── InvariantError        a conservation law does not hold: a bug, never load
"""

from __future__ import annotations


class KvCacheError(Exception):
    """Base of every deliberate error of kv_common, kv_control, kv_execution and maxtext_paged."""


class ConfigError(KvCacheError, ValueError):
    """An option or a combination of options is refused; the message names it and the way out."""


class LayoutError(ConfigError):
    """The pool geometry is impossible."""


class UnsupportedError(KvCacheError):
    """A model, layer, backend or option that this project declines by name."""


class PageStateError(KvCacheError):
    """A page was used against its state."""


class StaleHandleError(KvCacheError):
    """A request handle outlived the request it was made for."""


class RequestError(KvCacheError, ValueError):
    """One request is unusable as it stands; other requests are not touched."""


class RequestTooLarge(RequestError):
    """The pool (or the model's context) can never hold this request, however long it waits."""


class SchedulerStalled(KvCacheError):
    """The scheduling loop made no progress although it had work: a bug in this project."""


class InvariantError(KvCacheError):
    """A conservation law does not hold: a bug in this project. The message names the pages."""
