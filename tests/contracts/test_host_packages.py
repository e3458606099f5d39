"""kv_common and kv_control run on the standard library and numpy: what import-linter cannot say, said here.

import-linter has no allow-list, and sees no dependency of a dependency. So one test reads every import statement, and
another imports a copy of the two packages, alone, in a fresh interpreter and looks at what that brought along.
"""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ALLOWED = {
    "kv_common": frozenset({"numpy", "kv_common"}),
    "kv_control": frozenset({"numpy", "kv_common", "kv_control"}),
}
NEVER_LOADED = frozenset({"jax", "jaxlib", "flax", "maxtext", "torch", "transformers", "kv_execution", "maxtext_paged"})

_IMPORT_ALL = """
import importlib, pathlib, sys
folder, root = sys.argv[1:3]
sys.path[:] = [folder] + [entry for entry in sys.path if pathlib.Path(entry).resolve() != pathlib.Path(root)]
for package in ("kv_common", "kv_control"):
    for path in sorted(pathlib.Path(folder, package).rglob("*.py")):
        name = ".".join(path.relative_to(folder).with_suffix("").parts).removesuffix(".__init__")
        assert importlib.import_module(name).__file__ == str(path), name
        print("imported", name)
print("loaded", *sorted({name.partition(".")[0] for name in sys.modules}))
"""


def foreign_imports(source: str, allowed: frozenset[str]) -> list[str]:
    """Top-level names that `source` imports, anywhere in it, outside the standard library and `allowed`."""
    names = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import():
                names += [alias.name for alias in node.names]
            case ast.ImportFrom(level=0, module=str(module)):
                names.append(module)
            case ast.Call(func=ast.Name(id="__import__") | ast.Attribute(attr="import_module")):
                names.append("<imported by name at run time>")
    tops = [name.partition(".")[0] for name in names]
    return [top for top in tops if top not in allowed and top not in sys.stdlib_module_names]


def modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("package", ALLOWED)
def test_host_packages_import_only_the_standard_library_numpy_and_lower_layers(package: str):
    assert len(modules(package)) > 3
    found = {
        str(path.relative_to(ROOT)): foreign_imports(path.read_text(), ALLOWED[package]) for path in modules(package)
    }
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize(
    ("source", "foreign"),
    [
        ("import scipy.stats", ["scipy"]),
        ("from ml_dtypes import bfloat16", ["ml_dtypes"]),
        ("if True:\n    def f():\n        import jax", ["jax"]),
        ("import kv_control.plan", ["kv_control"]),
        ("import importlib\nimportlib.import_module('jax')", ["<imported by name at run time>"]),
        ("import os, numpy.typing\nfrom kv_common.errors import KvCacheError\nfrom . import pages", []),
    ],
)
def test_the_allow_list_sees_every_form_of_import(source: str, foreign: list[str]):
    assert foreign_imports(source, ALLOWED["kv_common"]) == foreign


def import_all(folder: Path) -> subprocess.CompletedProcess[str]:
    """Copy the two packages into `folder`, and import every module of the copy in an interpreter of its own."""
    return subprocess.run(
        [sys.executable, "-I", "-c", _IMPORT_ALL, str(folder), str(ROOT)], capture_output=True, text=True, check=False
    )


@pytest.fixture
def alone(tmp_path: Path) -> Path:
    for package in ALLOWED:
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def loaded(result: subprocess.CompletedProcess[str]) -> set[str]:
    assert result.returncode == 0, result.stderr
    [line] = [line for line in result.stdout.splitlines() if line.startswith("loaded ")]
    return set(line.split()[1:])


def test_host_packages_import_alone_and_load_no_device_library(alone: Path):
    result = import_all(alone)
    names = loaded(result)
    assert result.stdout.count("imported ") == sum(len(modules(package)) for package in ALLOWED)
    assert not names & NEVER_LOADED
    assert {"numpy", "kv_common", "kv_control"} <= names


@pytest.mark.parametrize("name", ["jax", "transformers"])
def test_a_device_library_would_be_seen(alone: Path, name: str):
    (alone / "kv_control" / "added.py").write_text(f"import {name}\n")
    assert name in loaded(import_all(alone))


def test_an_upward_import_does_not_even_run(alone: Path):
    (alone / "kv_control" / "added.py").write_text("import kv_execution\n")
    assert "No module named 'kv_execution'" in import_all(alone).stderr
