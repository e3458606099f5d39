"""The native CPU library: found, checked and registered with jax, once, in one place.

For:        knowing whether the C++ kernels run here, and why not; their instruction sets and counts.
Not for:    calling a kernel (attention/native.py) or building one (csrc/CMakeLists.txt).
May import: the standard library, numpy, jax.
"""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import jax
import numpy as np

from kv_common.errors import UnsupportedError

LIBRARY_NAME = "libmaxtext_paged_cpu.so"
APPEND_TARGET, ATTEND_TARGET = "maxtext_paged_append", "maxtext_paged_attend"
PRODUCT_TARGET = "maxtext_paged_product"
_NUM_COUNTS = 6


@dataclass(frozen=True, slots=True)
class LaunchCounts:
    """What the library's calls did since it was loaded; one attend call per layer and shard.

    Attributes:
      fused: calls that handed their decode rows to split-KV. whole: calls that walked each of them whole.
      chunks: pieces into which fused rows were cut. merged_rows: rows put together from several pieces.
      tiles: tiles of rows with several tokens. products: matrix products (kv_execution/products.py).
    """

    fused: int
    whole: int
    chunks: int
    merged_rows: int
    tiles: int
    products: int

    def since(self, earlier: LaunchCounts) -> LaunchCounts:
        """The difference to an earlier reading."""
        return LaunchCounts(*(getattr(self, name) - getattr(earlier, name) for name in self.__slots__))


@dataclass(frozen=True, slots=True)
class NativeLibrary:
    """The loaded library.

    Attributes:
      path: where it was found. builds: name of each instruction-set build to its number, those this machine runs.
      best: the build that is taken by default.
    """

    path: Path
    builds: dict[str, int]
    best: str
    handle: ctypes.CDLL

    def read(self, array: np.ndarray) -> None:
        """Read a contiguous float32 array once, on this thread and without the interpreter's lock, for benchmarks."""
        function = self.handle.maxtext_paged_read
        function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_int64], ctypes.c_float
        function(array.ctypes.data, array.size)

    def counts(self) -> LaunchCounts:
        """Counts of this process so far; a running step may not be in them yet."""
        counts = np.zeros(_NUM_COUNTS, np.int64)
        self.handle.maxtext_paged_counts(counts.ctypes.data_as(ctypes.c_void_p))
        return LaunchCounts(*(int(count) for count in counts))


def native_available() -> str | None:
    """Why the native kernels cannot run in this process; None when they can.

    It must have been built, and against an FFI version that the installed jaxlib speaks.
    """
    found = _load()
    return found if isinstance(found, str) else None


def native_library() -> NativeLibrary:
    """The library, its targets registered with jax.

    Raises:
      UnsupportedError: it does not run here; says why.
    """
    found = _load()
    if isinstance(found, str):
        raise UnsupportedError(f"paged_backend=native: {found}")
    return found


def library_path() -> Path:
    """Where the library lies, in a wheel and in a source tree: beside this file."""
    return Path(__file__).parent / LIBRARY_NAME


@cache
def _load() -> NativeLibrary | str:
    path = library_path()
    if not path.is_file():
        return (
            "the C++ kernels are not built: install a C++17 compiler (g++ or clang++) and install maxtext-paged again"
        )
    try:
        handle = ctypes.CDLL(str(path))
    except OSError as error:
        return f"the C++ kernels cannot be loaded: {error}"
    handle.maxtext_paged_build_name.restype = ctypes.c_char_p
    handle.maxtext_paged_counts.argtypes = [ctypes.c_void_p]
    built = (handle.maxtext_paged_ffi_api_major(), handle.maxtext_paged_ffi_api_minor())
    reason = version_mismatch(built, ffi_api_version((Path(jax.ffi.include_dir()) / "xla/ffi/api/c_api.h").read_text()))
    if reason is not None:
        return reason
    for target in (APPEND_TARGET, ATTEND_TARGET, PRODUCT_TARGET):
        jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(getattr(handle, target)), platform="cpu")
    numbers = range(handle.maxtext_paged_num_builds())
    names = {number: handle.maxtext_paged_build_name(number).decode() for number in numbers}
    builds = {names[number]: number for number in numbers if handle.maxtext_paged_build_runs(number)}
    return NativeLibrary(path, builds, names[handle.maxtext_paged_best_build()], handle)


def ffi_api_version(header: str) -> tuple[int, int]:
    """``(major, minor)`` of the FFI that a jaxlib speaks, from the text of its ``c_api.h``.

    >>> ffi_api_version("#define XLA_FFI_API_MAJOR 0\\n#define XLA_FFI_API_MINOR 4\\n")
    (0, 4)
    """
    numbers = dict(re.findall(r"^#define XLA_FFI_API_(MAJOR|MINOR) (\d+)", header, re.MULTILINE))
    return int(numbers["MAJOR"]), int(numbers["MINOR"])


def version_mismatch(built: tuple[int, int], installed: tuple[int, int]) -> str | None:
    """Why a library built against one FFI version cannot run under another; older minor versions can.

    >>> version_mismatch((0, 3), (0, 4)) is None
    True
    >>> version_mismatch((0, 5), (0, 4))
    'the C++ kernels speak FFI 0.5, this jaxlib speaks 0.4: build them against the oldest jaxlib you run'
    """
    if built[0] == installed[0] and built[1] <= installed[1]:
        return None
    return (
        f"the C++ kernels speak FFI {built[0]}.{built[1]}, this jaxlib speaks {installed[0]}.{installed[1]}: "
        "build them against the oldest jaxlib you run"
    )
