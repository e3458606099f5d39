"""Which of MaxText's model families may be bound, and why the others may not.

For:        one answer, by name and with its reason, before a model is built.
Not for:    binding (binding.py), options (options.py) or the figures behind the answer (benchmarks/families.py).
May import: kv_common, maxtext.
"""

from __future__ import annotations

from typing import Any

from maxtext.common.common_types import AttentionType, DecoderBlockType
from maxtext.layers.attentions import Attention

from kv_common.errors import UnsupportedError

SUPPORTED_BLOCKS = frozenset(
    {
        DecoderBlockType.DEFAULT,
        DecoderBlockType.LLAMA2,
        DecoderBlockType.MISTRAL,
        DecoderBlockType.MIXTRAL,
        DecoderBlockType.GEMMA,
        DecoderBlockType.GEMMA2,
        DecoderBlockType.GEMMA3,
        DecoderBlockType.QWEN2,
        DecoderBlockType.QWEN3,
        DecoderBlockType.QWEN3_MOE,
        DecoderBlockType.GPT_OSS,
        DecoderBlockType.OLMO3,
        DecoderBlockType.LLAMA4,
        DecoderBlockType.ENVY,
    }
)
"""Decoder blocks that the family suite compares with MaxText's dense forward (docs/families.md)."""

REFUSED_BLOCKS = {
    DecoderBlockType.DEEPSEEK: "its attention is MLA, whose cache holds a latent instead of K and V",
    DecoderBlockType.DEEPSEEK4: "its attention is compressed, with caches of its own",
    DecoderBlockType.GEMMA4: (
        "its global layers have another head size and other KV heads than its local ones: one pool geometry serves one"
    ),
    DecoderBlockType.GEMMA4_SMALL: "some of its layers attend to another layer's K and V",
    DecoderBlockType.QWEN3_CUSTOM_MOE: "its attention is a class of its own, with an output of another size",
    DecoderBlockType.QWEN3_NEXT: "most of its layers are linear attention, whose state is no page of K and V",
    DecoderBlockType.QWEN3_5: "most of its layers are linear attention, whose state is no page of K and V",
    DecoderBlockType.GPT3: "its attention is a class of its own, and its final norm no RMSNorm",
    DecoderBlockType.SIMPLE: "it has no attention",
    DecoderBlockType.SIMPLE_MLP: "it has no attention",
}
"""All others, and what stands in the way."""

_SUPPORTED_ATTENTION = (AttentionType.GLOBAL, AttentionType.LOCAL_SLIDING)


def require_supported_block(config: Any) -> None:
    """Refuse, before a model is built, a decoder block that was never compared with dense.

    Raises:
      UnsupportedError: names the block and the reason.
    """
    block = config.decoder_block
    if block not in SUPPORTED_BLOCKS:
        raise UnsupportedError(
            f"decoder_block={block.value} is not supported by attention=gpu_paged: "
            f"{REFUSED_BLOCKS.get(block, 'it was never compared with MaxText')}; "
            f"supported: {', '.join(sorted(block.value for block in SUPPORTED_BLOCKS))}"
        )


def require_supported_attention(name: str, attention: Attention) -> None:
    """Refuse one attention module whose mask no kernel here draws.

    A chunked layer (llama4) sees its own chunk of the context only. While no request outgrows the first chunk that is
    plain causal attention, and it is bound as such.

    Raises:
      UnsupportedError: names the module and its kind, for chunks also the option to lower.
    """
    kind, config = attention.attention_type, attention.config
    if kind in _SUPPORTED_ATTENTION:
        return
    if kind is AttentionType.CHUNK:
        if config.max_target_length <= config.chunk_attn_window_size:
            return
        raise UnsupportedError(
            f"{name} has attention_type=chunk with chunk_attn_window_size={config.chunk_attn_window_size}: "
            f"attention=gpu_paged serves it up to there; lower max_target_length={config.max_target_length} to "
            f"{config.chunk_attn_window_size}"
        )
    raise UnsupportedError(
        f"{name} has attention_type={kind.value}: attention=gpu_paged serves "
        f"{', '.join(sorted(served.value for served in _SUPPORTED_ATTENTION))}"
    )
