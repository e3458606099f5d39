"""Two processes, two devices each, one mesh: the answer of one process; or a refusal in both, never a wait for ever."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from benchmarks.sharding import dense_of, make_requests, one_device
from kv_common.errors import ConfigError
from maxtext_paged.processes import check_agreement, require_one_process
from tests.parity import log_softmax
from tests.tiny_models import make_config, mesh_of

pytestmark = pytest.mark.maxtext

ROOT = Path(__file__).parents[2]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


@pytest.mark.slow
@pytest.mark.multi_device
@pytest.mark.timeout(280)
def test_two_processes_run_one_sharded_batch_and_give_the_answer_of_one() -> None:
    port = free_port()
    environment = {key: value for key, value in os.environ.items() if key not in ("XLA_FLAGS", "PYTEST_CURRENT_TEST")}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.two_process_run", str(rank), str(port), "auto"],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=240) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, errors[-2000:]
    results = [json.loads(output.splitlines()[-1]) for output, _ in outputs]
    for result in results:
        assert not result["errors"]
        assert result["tokens"] == one_device("llama2", 4).tokens
        assert not result["moved"], "donation must keep every shard where it is"
        assert "paged_num_pages is 24, 25" in result["refusal"], "each process was given another pool"
        for request, tokens, logprobs in zip(make_requests(), result["tokens"], result["logprobs"], strict=True):
            dense = log_softmax(dense_of("llama2", 4).logits(tokens, pad_to=32))
            rows = np.arange(len(request.prompt) - 1, len(tokens) - 1)
            np.testing.assert_allclose(logprobs, dense[rows, np.array(tokens)[rows + 1]], rtol=0, atol=1e-4)
    assert [result["held"] * 2 for result in results] == [results[0]["counted"]] * 2, "each holds its half"


def test_a_mesh_of_one_process_needs_no_agreement(monkeypatch: pytest.MonkeyPatch) -> None:
    from maxtext_paged import processes

    monkeypatch.setattr(processes.multihost_utils, "process_allgather", lambda *_: pytest.fail("a collective"))
    check_agreement(mesh_of(make_config(), {}), {"paged_num_pages": 3})


def test_a_mesh_that_leaves_out_a_process_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    devices = np.array([SimpleNamespace(process_index=0), SimpleNamespace(process_index=2)], object)
    with pytest.raises(ConfigError, match=r"devices of processes 0, 2 of 3: .* must have devices of all"):
        check_agreement(SimpleNamespace(devices=devices), {})  # type: ignore[arg-type]


def test_the_command_refuses_to_be_one_of_several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    require_one_process("maxtext-paged generate")
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ConfigError, match=r"maxtext-paged generate runs in one process.*one of 2.*OfflineEngine"):
        require_one_process("maxtext-paged generate")


def test_the_command_asks_before_it_opens_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    from maxtext_paged.cli import model

    monkeypatch.setattr(model, "prepare_environment", lambda *_, **__: None)
    monkeypatch.setattr(model, "load_configuration", lambda *_, **__: None)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ConfigError, match="generate runs in one process"):
        model.open_model("c.yml", [])
