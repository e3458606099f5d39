"""AMD aiter's launchers behind XLA: our shim found, their libraries opened, the targets registered, in one place.

For:        knowing whether aiter's kernels can be called here, and why not; naming and opening a decode kernel.
Not for:    calling one (attention/aiter_backend.py) or building either side (csrc/CMakeLists.txt, docs/gpus.md).
May import: the standard library, jax.

aiter builds a library for each geometry of ``pa_ragged``. ``MAXTEXT_PAGED_AITER_DIR`` names the folder where its
libraries are; without it there is no aiter, and nothing is searched.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import jax

from kv_common.errors import UnsupportedError
from kv_execution.native.library import ffi_api_version, version_mismatch

SHIM_NAME = "libmaxtext_paged_aiter.so"
FOLDER_VARIABLE = "MAXTEXT_PAGED_AITER_DIR"
APPEND_LIBRARY, ATTEND_LIBRARY = "module_cache.so", "libmha_fwd.so"

APPEND_TARGET, ATTEND_TARGET, DECODE_TARGET = (f"maxtext_paged_aiter_{name}" for name in ("append", "attend", "decode"))
TARGETS = (APPEND_TARGET, ATTEND_TARGET, DECODE_TARGET)

PARTITION_TOKENS, WARP_SIZE = 256, 64
_ELEMENTS = {"bfloat16": "__hip_bfloat16", "float16": "_Float16"}


@dataclass(frozen=True, slots=True)
class DecodeKernel:
    """One build of ``pa_ragged``.

    Attributes:
      group_size: query heads of a KV head. head_dim, page_size: the pools'. dtype: of pools, queries and outputs.
      loops: warps' worth of partitions that a row may have.
    """

    group_size: int
    head_dim: int
    page_size: int
    dtype: str
    loops: int

    @classmethod
    def of(cls, *, group_size: int, head_dim: int, page_size: int, dtype: str, max_seqlen_k: int) -> DecodeKernel:
        """The build that serves rows of up to ``max_seqlen_k`` keys.

        >>> DecodeKernel.of(group_size=4, head_dim=128, page_size=16, dtype="bfloat16", max_seqlen_k=20_000).name
        'maxtext_paged_pa_ragged_g4_d128_p16_bfloat16_l2'
        """
        partitions = -(-max_seqlen_k // PARTITION_TOKENS)
        return cls(group_size, head_dim, page_size, dtype, -(-partitions // WARP_SIZE))

    @property
    def name(self) -> str:
        """Its function's, and its folder's below aiter's."""
        geometry = f"g{self.group_size}_d{self.head_dim}_p{self.page_size}"
        return f"maxtext_paged_pa_ragged_{geometry}_{self.dtype}_l{self.loops}"

    @property
    def build_command(self) -> str:
        """What builds it, in aiter's source tree on a machine with ROCm."""
        element = _ELEMENTS[self.dtype]
        return (
            f"python3 -m csrc.cpp_itfs.pa.pa_ragged --gqa_ratio={self.group_size} --head_size={self.head_dim} "
            f"--npar_loops={self.loops} --dtype={element} --kv_dtype={element} --fp8_kv_dtype=auto "
            f"--out_dtype={element} --block_size={self.page_size} --alibi_enabled=false --func_name={self.name}"
        )


def aiter_available() -> str | None:
    """Why aiter's launchers cannot be called in this process; None when they can."""
    found = _load(os.environ.get(FOLDER_VARIABLE, ""))
    return found if isinstance(found, str) else None


def open_decode_kernel(kernel: DecodeKernel) -> str:
    """Open a build of ``pa_ragged``; the name by which the program calls it.

    Raises:
      UnsupportedError: it was not built; says how to.
    """
    folder = os.environ.get(FOLDER_VARIABLE, "")
    shim = _load(folder)
    if isinstance(shim, str):
        raise UnsupportedError(f"paged_backend=aiter: {shim}")
    wrong = _open(shim, kernel.name, Path(folder) / kernel.name / "lib.so")
    if wrong is not None:
        raise UnsupportedError(f"paged_backend=aiter: {wrong}; build it: {kernel.build_command}")
    return kernel.name


def shim_path() -> Path:
    """Where the shim lies, in a wheel and in a source tree: beside this file."""
    return Path(__file__).parent / SHIM_NAME


@cache
def _load(folder: str) -> ctypes.CDLL | str:
    if not folder:
        return f"{FOLDER_VARIABLE} names no folder with aiter's libraries"
    if not shim_path().is_file():
        return f"{SHIM_NAME} is not built: install a C++17 compiler (g++ or clang++) and install maxtext-paged again"
    try:
        shim = ctypes.CDLL(str(shim_path()))
    except OSError as error:
        return f"{SHIM_NAME} cannot be loaded: {error}"
    shim.maxtext_paged_aiter_load.restype = ctypes.c_char_p
    shim.maxtext_paged_aiter_load.argtypes = [ctypes.c_char_p, ctypes.c_char_p]
    built = (shim.maxtext_paged_aiter_ffi_api_major(), shim.maxtext_paged_aiter_ffi_api_minor())
    reason = version_mismatch(built, ffi_api_version((Path(jax.ffi.include_dir()) / "xla/ffi/api/c_api.h").read_text()))
    if reason is not None:
        return reason
    for what, name in (("append", APPEND_LIBRARY), ("attend", ATTEND_LIBRARY)):
        reason = _open(shim, what, Path(folder) / name)
        if reason is not None:
            return reason
    for target in TARGETS:
        jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(getattr(shim, target)), platform="ROCM")
    return shim


def _open(shim: ctypes.CDLL, what: str, path: Path) -> str | None:
    wrong = shim.maxtext_paged_aiter_load(what.encode(), str(path).encode())
    return None if wrong is None else f"aiter's library cannot be used: {wrong.decode()}"
