"""Hugging Face safetensors of a Llama-shaped model through MaxText's own converter are the same model on paged pools.

The command is docs/checkpoints.md's, for a model of two layers made here. The yardstick is a numpy forward of the same
weights in llama.cpp's layout. No torch takes part.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from maxtext.configs import pyconfig
from safetensors.numpy import save_file

from kv_control.plan import RequestId
from kv_control.request import Request
from maxtext_paged.config import PagedMaxTextConfig
from maxtext_paged.convert.llama import unpermute_rope
from maxtext_paged.session import open_session
from tests.llama_numpy import LlamaNumpy
from tests.parity import assert_teacher_forced
from tests.tiny_gguf import EMB, HEADS, KV_HEADS, LAYERS, MLP, VOCAB, tensors, write_gguf
from tests.tiny_models import BASE, make_mesh

pytestmark = [pytest.mark.maxtext, pytest.mark.long]

HEAD_DIM = 128
"""Of Llama 3.1 8B, by whose name the converter scales queries."""

PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
MODEL = [
    "model_name=llama3.1-8b",
    "override_model_config=true",
    f"base_emb_dim={EMB}",
    f"base_num_decoder_layers={LAYERS}",
    f"base_num_query_heads={HEADS}",
    f"base_num_kv_heads={KV_HEADS}",
    f"head_dim={HEAD_DIM}",
    f"base_mlp_dim={MLP}",
    f"vocab_size={VOCAB}",
    "rope_use_scale=false",
    "scan_layers=false",
    "hardware=cpu",
    "skip_jax_distributed_system=true",
    "log_config=false",
]


def hugging_face_weights(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same model under Hugging Face's names, its rotated rows in halves instead of pairs."""
    found = {
        "model.embed_tokens.weight": weights["token_embd.weight"],
        "model.norm.weight": weights["output_norm.weight"],
        "lm_head.weight": weights["output.weight"],
    }
    for layer in range(LAYERS):
        for theirs, name in PARTS.items():
            tensor = weights[f"blk.{layer}.{theirs}.weight"]
            heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(theirs)
            found[f"model.layers.{layer}.{name}.weight"] = tensor if heads is None else unpermute_rope(tensor, heads)
    return {name: np.ascontiguousarray(tensor) for name, tensor in found.items()}


class Numpy:
    """The yardstick as ``assert_teacher_forced`` wants it."""

    def __init__(self, source: Path) -> None:
        self._model = LlamaNumpy(source)

    def logits(self, tokens: np.ndarray, pad_to: int | None = None) -> np.ndarray:
        return self._model.forward(tokens.tolist())


def test_safetensors_through_maxtexts_converter_are_the_same_model_on_paged_pools(tmp_path: Path) -> None:
    weights = tensors(head_dim=HEAD_DIM, own_head=True)
    (tmp_path / "hf").mkdir()
    save_file(hugging_face_weights(weights), tmp_path / "hf" / "model.safetensors")
    command = [sys.executable, "-m", "maxtext.checkpoint_conversion.to_maxtext", BASE, *MODEL]
    command += [f"base_output_directory={tmp_path / 'maxtext'}", "--lazy_load_tensors=true", "--save_dtype=float32"]
    command += [f"--hf_model_path={tmp_path / 'hf'}", "--simulated_cpu_devices_count=2"]
    done = subprocess.run(
        command, env={**os.environ, "JAX_PLATFORMS": "cpu"}, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]

    header = {"llama.rope.freq_base": 500_000.0, "llama.attention.key_length": HEAD_DIM}
    source = write_gguf(tmp_path / "model.gguf", weights=weights, header=header)
    options = ["attention=gpu_paged", "dtype=float32", "weight_dtype=float32", "max_target_length=64", "run_name=t"]
    options += ["max_prefill_predict_length=32", "base_output_directory=unused", "enable_checkpointing=false"]
    options += [f"load_parameters_path={tmp_path / 'maxtext' / '0' / 'items'}", "paged_num_pages=16"]
    config = pyconfig.initialize(["test", BASE, *MODEL, *options], config_class=PagedMaxTextConfig)
    session = open_session(config, mesh=make_mesh(config))
    rng = np.random.default_rng(0)
    requests = [
        Request(RequestId(i), rng.integers(0, VOCAB, n), max_tokens=8, want_prompt_logprobs=True)
        for i, n in enumerate((20, 5))
    ]
    for request in requests:
        session.driver.submit(request)
    list(session.driver.run())
    assert_teacher_forced(requests, Numpy(source), relative=2e-5)
