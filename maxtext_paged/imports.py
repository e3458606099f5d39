"""How MaxText is imported: without torch, and its offline engine without JetStream.

For:        the two imports that need care, in one place.
Not for:    what is done with them. Nothing here is imported from MaxText before it is asked for.
May import: the standard library, kv_common; MaxText inside functions.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType

TORCH = ("torch", "torchvision", "torchaudio", "torch_xla")
_DECOUPLED = "DECOUPLE_GCLOUD"


@contextmanager
def hidden(names: Iterable[str] = TORCH) -> Iterator[None]:
    """Hide packages from imports made inside, even where they are installed; what is imported already stays.

    MaxText imports transformers for its configuration classes, and transformers imports torch whenever it finds
    it: a second GPU runtime and seconds of start-up, for nothing that runs here. transformers remembers what it
    found, so a process that wants it with torch imports torch first.
    """
    absent = [name for name in names if name not in sys.modules]
    sys.modules.update(dict.fromkeys(absent))  # type: ignore[arg-type]  # None is how Python spells "not importable"
    try:
        yield
    finally:
        for name in absent:
            if sys.modules.get(name) is None:
                sys.modules.pop(name, None)


def import_dense_engine() -> ModuleType:
    """``maxtext.inference.offline_engine``, also where DECOUPLE_GCLOUD is set and JetStream is absent.

    A module on its way raises under that variable, although stubs serve it as well as they serve all others. So
    the variable is away while that module and its package are imported, and for nothing else: everything they
    import has been imported before, under the caller's setting.
    """
    importlib.import_module("maxtext.inference.maxengine.maxengine")
    setting = os.environ.pop(_DECOUPLED, None)
    try:
        return importlib.import_module("maxtext.inference.offline_engine")
    finally:
        if setting is not None:
            os.environ[_DECOUPLED] = setting
