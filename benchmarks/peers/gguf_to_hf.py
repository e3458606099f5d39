"""A llama GGUF's weights in the forms that peers read: Hugging Face float32, and GGUF in float32 and float16.

For:        giving every peer weights of one origin (``install.sh model``).
Not for:    converting for MaxText (``maxtext-paged convert``).
May import: numpy, gguf, safetensors, tokenizers.

    python benchmarks/peers/gguf_to_hf.py MODEL.gguf OUT_DIR

Writes OUT_DIR/hf, OUT_DIR/model.F32.gguf and OUT_DIR/model.F16.gguf. llama.cpp stores the rows of Q and K interleaved
(its RoPE turns neighbours), Hugging Face in halves.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType
from gguf.quants import dequantize
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
CONTROL = 3
"""llama.cpp's type of special tokens."""


def hf_name(name: str) -> str:
    """Hugging Face's name of a llama.cpp tensor."""
    if name in TOP:
        return TOP[name]
    _, layer, part, _ = name.split(".")
    return f"model.layers.{layer}.{LAYER[part]}.weight"


def halves(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Rows of a Q or K projection from interleaved to halves."""
    half = weight.shape[0] // heads // 2
    return weight.reshape(heads, half, 2, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def write_hf(out: Path, meta: dict[str, Any], dense: dict[str, NDArray[np.float32]]) -> None:
    """config.json, weights and tokenizer."""
    out.mkdir(parents=True, exist_ok=True)
    heads, kv_heads = meta["llama.attention.head_count"], meta["llama.attention.head_count_kv"]
    state = {}
    for name, weight in dense.items():
        kind = name.rsplit(".", 2)[-2]
        if kind in ("attn_q", "attn_k"):
            weight = halves(weight, heads if kind == "attn_q" else kv_heads)
        state[hf_name(name)] = np.ascontiguousarray(weight)
    save_file(state, out / "model.safetensors", metadata={"format": "pt"})
    vocab, hidden = state["model.embed_tokens.weight"].shape
    ends = {
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
        "pad_token_id": meta["tokenizer.ggml.padding_token_id"],
    }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": meta["llama.feed_forward_length"],
        "num_hidden_layers": meta["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "vocab_size": vocab,
        "max_position_embeddings": meta["llama.context_length"],
        "rope_theta": meta["llama.rope.freq_base"],
        "rope_scaling": None,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": "lm_head.weight" not in state,
        "torch_dtype": "float32",
        "use_cache": True,
        **ends,
    }
    (out / "config.json").write_text(json.dumps(config, indent=2))
    (out / "generation_config.json").write_text(json.dumps(ends, indent=2))
    write_tokenizer(out, meta)


def write_tokenizer(out: Path, meta: dict[str, Any]) -> None:
    """Peers are given ids; their loaders still want a tokenizer."""
    tokens, types = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    made = Tokenizer(BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    digits, bytes_ = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([digits, bytes_])
    made.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL]
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    made.save(str(out / "tokenizer.json"))
    named = {
        key: tokens[meta[f"tokenizer.ggml.{name}_token_id"]]
        for key, name in (("bos_token", "bos"), ("eos_token", "eos"), ("pad_token", "padding"))
    }
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **named}
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2))


def write_gguf(path: Path, reader: GGUFReader, dense: dict[str, NDArray[np.float32]], half: bool) -> None:
    """The same file with dense weights; norms stay float32."""
    writer = GGUFWriter(path, "llama")
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        value, kind = field.contents(), field.types[0]
        if field.name == "general.file_type":
            value = int(LlamaFileType.MOSTLY_F16 if half else LlamaFileType.ALL_F32)
        inner = field.types[-1] if kind == GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, value, kind, sub_type=inner)
    for name, weight in dense.items():
        writer.add_tensor(name, weight.astype(np.float16) if half and weight.ndim > 1 else weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    """Write all three."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    reader = GGUFReader(options.gguf)
    meta = {field.name: field.contents() for field in reader.fields.values()}
    dense = {tensor.name: dequantize(tensor.data, tensor.tensor_type).astype(np.float32) for tensor in reader.tensors}
    write_hf(options.out / "hf", meta, dense)
    write_gguf(options.out / "model.F32.gguf", reader, dense, half=False)
    write_gguf(options.out / "model.F16.gguf", reader, dense, half=True)
    print(f"{len(dense)} tensors, {sum(weight.size for weight in dense.values())} parameters")


if __name__ == "__main__":
    main()
