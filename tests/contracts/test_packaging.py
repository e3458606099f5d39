"""pyproject.toml, the locks and the installed distribution agree, and no accelerator framework slips in."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
LOCKS = ("requirements/cpu.txt", "requirements/models.txt")
NOT_INSTALLED = "requirements/ray.txt"
"""The lock of what tests can use and development does without."""
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SHIPPED = [
    *PYPROJECT["project"]["dependencies"],
    *(text for extra in PYPROJECT["project"]["optional-dependencies"].values() for text in extra),
]
DECLARED = [*SHIPPED, *(text for group in PYPROJECT["dependency-groups"].values() for text in group)]


def locked(lock: str) -> dict[str, str]:
    """Each package of a lock and its version; every logical line must be ``name==version`` and hashes."""
    text = re.sub(r"\\\n\s*", "", (ROOT / lock).read_text())
    versions = {}
    for line in text.splitlines():
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = re.fullmatch(r"([A-Za-z0-9._-]+)==(\S+?)( *--hash=sha256:[0-9a-f]{64})+", line)
        assert match, f"{lock}: not a plain name==version line with hashes: {line[:80]}"
        versions[canonicalize_name(match[1])] = match[2]
    return versions


@pytest.mark.parametrize("declared", DECLARED)
def test_each_declared_dependency_is_locked_within_its_range(declared: str):
    requirement = Requirement(declared)
    versions = {**locked(NOT_INSTALLED), **locked("requirements/cpu.txt")}
    name = canonicalize_name(requirement.name)
    assert name in versions
    assert Version(versions[name]) in requirement.specifier


def test_development_is_locked_to_the_jax_that_native_kernels_are_built_against():
    versions = locked("requirements/cpu.txt")
    assert (versions["jax"], versions["jaxlib"], versions["maxtext"]) == ("0.11.1", "0.11.1", "0.2.5")


def test_what_is_not_installed_is_locked_beside_what_is():
    versions = locked("requirements/cpu.txt")
    assert {
        name: version for name, version in locked(NOT_INSTALLED).items() if versions.get(name, version) != version
    } == {}


@pytest.mark.parametrize("lock", (*LOCKS, NOT_INSTALLED))
def test_a_lock_brings_no_torch_no_cuda_and_no_jetstream(lock: str):
    unwanted = re.compile(r"torch|nvidia|cuda|tensorflow|jetstream|vllm|llama-cpp")
    assert [name for name in locked(lock) if unwanted.search(name)] == []


def test_the_code_that_lowers_for_nvidia_is_of_the_locked_jax_and_brings_nothing_else():
    assert locked("requirements/lowering.txt") == {"jax-cuda12-plugin": locked("requirements/cpu.txt")["jax"]}


@pytest.mark.parametrize("lock", LOCKS)
def test_a_locked_package_that_is_installed_has_the_locked_version(lock: str):
    installed = {name: metadata.version(name) for name in locked(lock)}
    assert installed == locked(lock)


def test_the_distribution_is_installed_with_its_command():
    distribution = metadata.distribution("maxtext-paged")
    assert distribution.version == PYPROJECT["project"]["version"]
    [command] = distribution.entry_points.select(group="console_scripts")
    assert (command.name, command.value) == ("maxtext-paged", "maxtext_paged.__main__:main")


def test_the_wheel_and_the_contracts_name_the_same_packages():
    packages = PYPROJECT["tool"]["scikit-build"]["wheel"]["packages"]
    assert packages == PYPROJECT["tool"]["importlinter"]["root_packages"]
    assert sorted(packages) == sorted(
        path.parent.name for path in ROOT.glob("*/__init__.py") if path.parent.name != "tests"
    )


@pytest.mark.slow
def test_what_the_packages_import_is_declared():
    """A dependency that only arrives through another one would vanish with it."""
    packages = PYPROJECT["tool"]["scikit-build"]["wheel"]["packages"]
    names = set()
    for path in (path for package in packages for path in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names.add(node.module.partition(".")[0])
    foreign = names - sys.stdlib_module_names - set(packages)
    declared = {canonicalize_name(Requirement(text).name) for text in SHIPPED}
    shipped_by = metadata.packages_distributions()
    undeclared = {
        name for name in foreign if not declared & {canonicalize_name(dist) for dist in shipped_by.get(name, [name])}
    }
    assert {"jax", "numpy", "maxtext"} <= foreign
    assert undeclared == set()
