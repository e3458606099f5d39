"""What is imported when: nothing by the package, MaxText's engine without JetStream, never torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import maxtext_paged

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def python(code: str, *, path: Path = ROOT, **environ: str | None) -> Any:
    """The JSON that ``code`` prints on its last line, run in a process of its own."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(path), str(ROOT)]), **environ}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={name: value for name, value in env.items() if value is not None},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_importing_the_package_imports_neither_jax_nor_maxtext() -> None:
    loaded = python(
        "import json, sys, maxtext_paged\n"
        "assert 'OfflineEngine' in dir(maxtext_paged)\n"
        "print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    )
    assert not {"jax", "jaxlib", "flax", "maxtext", "numpy", "transformers", "torch", "kv_control"} & set(loaded)


@pytest.mark.maxtext
def test_every_public_name_is_there_and_is_listed_once() -> None:
    assert set(maxtext_paged.__all__) == set(maxtext_paged._HOME)
    assert len(maxtext_paged.__all__) == len(set(maxtext_paged.__all__))
    for name in maxtext_paged.__all__:
        assert getattr(maxtext_paged, name).__name__ == name
    with pytest.raises(AttributeError, match="has no attribute 'Offline'"):
        maxtext_paged.Offline  # noqa: B018


CHECKED_IMPORT = """
import json, os, sys
import maxtext_paged
OfflineEngine = maxtext_paged.OfflineEngine
from maxtext.inference.offline_engine import OfflineEngine as MaxTextOfflineEngine
from maxtext.common.gcloud_stub import is_decoupled
assert issubclass(OfflineEngine, MaxTextOfflineEngine)
found = [os.environ.get("DECOUPLE_GCLOUD"), is_decoupled(), "jetstream" in sys.modules]
"""
"""Without JetStream, MaxText's own import of its engine raises while DECOUPLE_GCLOUD is TRUE."""


@pytest.mark.maxtext
@pytest.mark.slow
def test_the_engine_imports_without_jetstream_where_decouple_gcloud_is_unset() -> None:
    assert python(CHECKED_IMPORT + "print(json.dumps(found))", DECOUPLE_GCLOUD=None) == [None, False, False]


RUN = """
from tests.tiny_models import make_config
config = make_config(paged_max_num_seqs=2, paged_max_num_batched_tokens=8, base_num_decoder_layers=1)
[output] = OfflineEngine(config, eos_ids=[]).batch_inference([[3, 4]], max_tokens=2)
assert output.error is None and len(output.token_ids) == 4
import importlib.util
print(json.dumps([found, "torch" in sys.modules, importlib.util.find_spec("torch") is not None]))
"""


@pytest.fixture
def torch(tmp_path: Path) -> Path:
    """A folder with a torch that counts as installed (transformers asks for its version) and cannot be imported."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise SystemExit('torch was imported')\n")
    metadata = tmp_path / "torch-2.9.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.9.0\n")
    return tmp_path


@pytest.mark.maxtext
@pytest.mark.slow
def test_a_run_needs_no_jetstream_and_loads_no_torch_where_it_is_installed(torch: Path) -> None:
    found, loaded, installed = python(CHECKED_IMPORT + RUN, path=torch, DECOUPLE_GCLOUD="TRUE")
    assert found == ["TRUE", True, False], "the engine imports under this setting too, and leaves it as it was"
    assert not loaded
    assert installed, "hidden for the import only: who wants torch can still have it"


@pytest.mark.maxtext
@pytest.mark.slow
def test_without_hiding_torch_maxtext_loads_it(torch: Path) -> None:
    """The control: the test above must be able to fail."""
    with pytest.raises(AssertionError, match="torch was imported"):
        python("import maxtext.inference.maxengine.maxengine", path=torch)
