"""aiter's libraries replaced by ones that write down what they are given (``aiter_stub.cc``), behind the host's doors.

For:        holding the aiter backend to its promises on a machine without a GPU and without aiter.
Not for:    numerics of aiter's kernels, streams, speed: a device's.
May import: the standard library, jax, kv_execution, pytest.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import jax
import pytest

from kv_execution.native import aiter_library
from kv_execution.native.aiter_library import APPEND_LIBRARY, ATTEND_LIBRARY, FOLDER_VARIABLE, DecodeKernel

CSRC = Path(aiter_library.__file__).parent / "csrc"
HOST = "_host"

KERNELS = [
    DecodeKernel(group, dim, 16, dtype, 1)
    for group, dim, dtype in [(2, 64, "bfloat16"), (1, 128, "bfloat16"), (4, 128, "float16"), (2, 64, "float16")]
]


@dataclass(frozen=True)
class Stub:
    """The built libraries. ``folder``: what ``MAXTEXT_PAGED_AITER_DIR`` names."""

    folder: Path
    handle: ctypes.CDLL

    def take_log(self) -> list[str]:
        """Lines since the last call: one a launch."""
        return self.handle.stub_take_log().decode().splitlines()


def build_stub(folder: Path) -> Stub:
    """Build one library and lay it where each of aiter's would be."""
    types = {"bfloat16": "Bfloat16", "float16": "Float16"}
    made = " ".join(f"DECODE({kernel.name}, {types[kernel.dtype]}, {kernel.head_dim})" for kernel in KERNELS)
    library = folder / APPEND_LIBRARY
    command = ["g++", "-std=c++17", "-O1", "-fPIC", "-shared", f"-I{CSRC}", f"-DDECODE_KERNELS={made}"]
    subprocess.run(
        [*command, str(Path(__file__).parent / "aiter_stub.cc"), "-o", str(library)], check=True, timeout=120
    )
    for path in (folder / ATTEND_LIBRARY, *(folder / kernel.name / "lib.so" for kernel in KERNELS)):
        path.parent.mkdir(exist_ok=True)
        path.symlink_to(library)
    handle = ctypes.CDLL(str(library))
    handle.stub_take_log.restype = ctypes.c_char_p
    return Stub(folder, handle)


def register_host_doors() -> None:
    """Make the shim's second doors callable on CPUs."""
    shim = ctypes.CDLL(str(aiter_library.shim_path()))
    for target in aiter_library.TARGETS:
        jax.ffi.register_ffi_target(target + HOST, jax.ffi.pycapsule(getattr(shim, target + HOST)), platform="cpu")


def not_here() -> str | None:
    """Why the shim cannot be looked at in this installation."""
    if not aiter_library.shim_path().is_file():
        return f"{aiter_library.SHIM_NAME} is not built: make venv"
    return None if shutil.which("g++") else "no g++ to build the stub libraries with"


@pytest.fixture(scope="module")
def built_stub(tmp_path_factory: pytest.TempPathFactory) -> Stub:
    """One build for a module."""
    register_host_doors()
    return build_stub(tmp_path_factory.mktemp("aiter"))


@pytest.fixture
def stub(built_stub: Stub, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stub]:
    """The built libraries in aiter's place, their log empty."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(built_stub.folder))
    assert aiter_library.aiter_available() is None
    built_stub.take_log()
    yield built_stub
