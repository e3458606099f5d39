"""Write smollm2-greedy.jsonl with Hugging Face transformers: an implementation without JAX or MaxText.

For:        making the expected greedy tokens again, as README.md beside this file says.
Not for:    the project's environment, which has no torch; it shares no code with maxtext_paged.convert.
May import: torch, transformers, gguf, tokenizers.

    python make_smollm2_greedy.py MODEL.gguf > smollm2-greedy.jsonl
"""

from __future__ import annotations

import json
import sys

import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import LlamaConfig, LlamaForCausalLM

NUM_PROMPT_TOKENS = NUM_NEW_TOKENS = 32

TEXTS = {
    # Public domain, cut to 32 tokens below.
    "alice": "Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to do: "
    "once or twice she had peeped into the book her sister was reading, but it had no pictures or conversations in it.",
    "origin": "When we look to the individuals of the same variety or sub-variety of our older cultivated plants and "
    "animals, one of the first points which strikes us, is, that they generally differ much more from each other.",
    "prejudice": "It is a truth universally acknowledged, that a single man in possession of a good fortune, must be "
    "in want of a wife. However little known the feelings or views of such a man may be on his first entering",
    "code": 'def quicksort(items):\n    """Sort a list by partitioning it around a pivot."""\n    if len(items) <= 1:\n'
    "        return items\n    pivot = items[len(items) // 2]\n    left = [x for x in items if x < pivot]\n",
    "chat": "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\nWhat causes ocean tides on our planet?<|im_end|>\n<|im_start|>assistant\n",
}

TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
PARTS = {
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


def load_model(reader: GGUFReader, meta: dict) -> LlamaForCausalLM:
    heads, kv_heads = meta["llama.attention.head_count"], meta["llama.attention.head_count_kv"]
    config = LlamaConfig(
        vocab_size=meta["llama.vocab_size"],
        hidden_size=meta["llama.embedding_length"],
        intermediate_size=meta["llama.feed_forward_length"],
        num_hidden_layers=meta["llama.block_count"],
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=meta["llama.context_length"],
        rope_parameters={"rope_type": "default", "rope_theta": meta["llama.rope.freq_base"]},
        rms_norm_eps=meta["llama.attention.layer_norm_rms_epsilon"],
        tie_word_embeddings=True,
    )
    state = {}
    for tensor in reader.tensors:
        name = tensor.name.removesuffix(".weight").split(".")
        weight = torch.tensor(dequantize(tensor.data, tensor.tensor_type))
        if rotated := {"attn_q": heads, "attn_k": kv_heads}.get(name[-1]):
            # llama.cpp keeps the two halves of a head's rows interleaved.
            weight = weight.unflatten(0, (rotated, -1, 2)).transpose(1, 2).reshape(weight.shape)
        path = TOP.get(name[0]) or f"model.layers.{name[1]}.{PARTS[name[2]]}"
        state[f"{path}.weight"] = weight.contiguous()
    model = LlamaForCausalLM(config).float().eval()
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert missing == ["lm_head.weight"] and not unexpected, (missing, unexpected)
    model.tie_weights()
    return model


def load_tokenizer(meta: dict) -> Tokenizer:
    tokens, types = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    merges = [tuple(m.split(" ")) for m in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [t for t, kind in zip(tokens, types, strict=True) if kind == 3]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control])
    return tokenizer


@torch.inference_mode()
def main() -> None:
    reader = GGUFReader(sys.argv[1])
    meta = {name: field.contents() for name, field in reader.fields.items()}
    model, tokenizer = load_model(reader, meta), load_tokenizer(meta)
    for name, text in TEXTS.items():
        prompt = tokenizer.encode(text).ids[:NUM_PROMPT_TOKENS]
        assert len(prompt) == NUM_PROMPT_TOKENS, (name, len(prompt))
        ids = torch.tensor([prompt])
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=NUM_NEW_TOKENS,
            eos_token_id=-1,  # end tokens are ordinary tokens here
            pad_token_id=2,
        )[0]
        logits = model(output[None, :-1]).logits[0, NUM_PROMPT_TOKENS - 1 :]
        first, second = logits.topk(2).values.unbind(-1)
        new = output[NUM_PROMPT_TOKENS:].tolist()
        assert logits.argmax(-1).tolist() == new, name
        record = {
            "name": name,
            "prompt": prompt,
            "new": new,
            "margins": [round(m, 5) for m in (first - second).tolist()],
            "prompt_text": tokenizer.decode(prompt, skip_special_tokens=False),
            "new_text": tokenizer.decode(new, skip_special_tokens=False),
        }
        print(json.dumps(record, ensure_ascii=False))


if __name__ == "__main__":
    main()
