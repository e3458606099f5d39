"""The import contracts of pyproject.toml hold, and break when they should.

Each breaking case copies the packages elsewhere, adds one forbidden import, and reads which contract import-linter
names: a contract that cannot fail protects nothing.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("kv_common", "kv_control", "kv_execution", "maxtext_paged")

LAYERS = "An import points downwards only"
HOST_ONLY = "kv_common and kv_control know no jax and no MaxText"
NO_MAXTEXT = "kv_execution knows no MaxText"
NO_TORCH = "Nobody imports torch, transformers, JetStream, vllm or tpu_inference"


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache", "--config", "pyproject.toml"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def house(tmp_path: Path) -> Path:
    """A copy of the four packages and their contracts, free to be broken."""
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def test_the_import_contracts_hold():
    result = lint_imports(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr
    for contract in (LAYERS, HOST_ONLY, NO_MAXTEXT, NO_TORCH):
        assert f"{contract} KEPT" in result.stdout


@pytest.mark.parametrize(
    ("package", "line", "broken"),
    [
        ("kv_common", "import jax", HOST_ONLY),
        ("kv_control", "import jax.numpy as jnp", HOST_ONLY),
        ("kv_control", "def late():\n    import maxtext", HOST_ONLY),
        ("kv_execution", "import maxtext", NO_MAXTEXT),
        ("kv_execution", "from maxtext.layers import attentions", NO_MAXTEXT),
        ("kv_common", "import kv_control.added_target", LAYERS),
        ("kv_control", "from kv_execution import added_target", LAYERS),
        ("kv_execution", "from maxtext_paged import added_target", LAYERS),
        ("maxtext_paged", "import torch", NO_TORCH),
        ("maxtext_paged", "from transformers import AutoTokenizer", NO_TORCH),
        ("maxtext_paged", "from vllm.config import VllmConfig", NO_TORCH),
        ("kv_execution", "import tpu_inference", NO_TORCH),
    ],
)
def test_a_forbidden_import_breaks_its_contract(house: Path, package: str, line: str, broken: str):
    for target in PACKAGES:
        (house / target / "added_target.py").write_text("")
    (house / package / "added.py").write_text(f"{line}\n")
    result = lint_imports(house)
    assert result.returncode == 1, result.stdout + result.stderr
    assert f"{broken} BROKEN" in result.stdout
    assert f"{package}.added" in result.stdout  # the place is named


def test_an_allowed_import_breaks_nothing(house: Path):
    """The control of the cases above: it is the import that breaks them, not the added file."""
    (house / "kv_execution" / "added.py").write_text("import jax\nimport kv_common.pages\n")
    (house / "maxtext_paged" / "added.py").write_text("import maxtext\nimport kv_execution.added\n")
    result = lint_imports(house)
    assert result.returncode == 0, result.stdout + result.stderr
