"""The native kernels build where there is a compiler, and the package does without where there is none."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from kv_execution.native.aiter_library import shim_path
from kv_execution.native.library import ffi_api_version, library_path, native_available, version_mismatch

SOURCE = Path(__file__).parents[2] / "kv_execution" / "native" / "csrc"
COMPILERS = ("c++", "g++", "clang++")


def cmake(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = shutil.which("cmake")
    if command is None:
        pytest.skip("no cmake on PATH")
    return subprocess.run(
        [command, *arguments], capture_output=True, text=True, check=False, env={**os.environ, **environment}
    )


def test_without_a_compiler_the_build_succeeds_says_so_and_installs_nothing(tmp_path: Path):
    source, build, prefix = tmp_path / "source", tmp_path / "build", tmp_path / "prefix"
    source.mkdir()
    shutil.copy(SOURCE / "CMakeLists.txt", source)
    configured = cmake("-S", str(source), "-B", str(build), CXX=str(tmp_path / "no-such-compiler"))
    assert configured.returncode == 0, configured.stderr
    assert "no C++ compiler: the native kernels are not built" in " ".join(configured.stderr.split())
    assert cmake("--build", str(build)).returncode == 0
    assert cmake("--install", str(build), "--prefix", str(prefix)).returncode == 0
    assert [path for path in prefix.rglob("*") if path.is_file()] == []


@pytest.mark.skipif(not any(map(shutil.which, COMPILERS)), reason="no C++ compiler")
def test_where_there_is_a_compiler_both_libraries_are_built_from_the_sources_as_they_are():
    assert native_available() is None
    newest = max(path.stat().st_mtime for path in SOURCE.iterdir() if path.suffix in (".cc", ".h"))
    for path in (library_path(), shim_path()):
        assert path.stat().st_mtime >= newest, f"{path.name} is older than its sources: run make venv"


def test_a_library_for_another_ffi_is_refused_and_an_older_minor_version_is_not():
    assert version_mismatch((0, 4), (0, 4)) is None
    assert version_mismatch((0, 3), (0, 4)) is None
    assert "FFI 0.5, this jaxlib speaks 0.4" in str(version_mismatch((0, 5), (0, 4)))
    assert "FFI 0.4, this jaxlib speaks 1.0" in str(version_mismatch((0, 4), (1, 0)))


def test_the_version_is_read_from_the_header_that_jaxlib_ships():
    import jax

    header = (Path(jax.ffi.include_dir()) / "xla/ffi/api/c_api.h").read_text()
    assert ffi_api_version(header) >= (0, 4)
