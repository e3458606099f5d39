"""What becomes of MaxText's own options under ``attention=gpu_paged``: one table, none ignored silently.

For:        refusing, by name and with a way out, every setting that the bound path would not follow.
Not for:    this package's own options (config.py).
May import: kv_common, maxtext's common types.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from maxtext.common.common_types import ShardMode

from kv_common.errors import ConfigError


class Verdict(enum.Enum):
    """What the paged path does with an option."""

    HONOURED = "honoured"
    REFUSED = "refused"
    IRRELEVANT = "irrelevant"


@dataclass(frozen=True, slots=True)
class OptionRule:
    """One option of MaxText and its fate.

    Attributes:
      name: the key.
      verdict: what happens to it. REFUSED means: refused where ``harmless`` does not hold.
      why: the reason, and for a refusal what to set instead.
      harmless: whether a value leaves the paged path right although it would not follow the option.
    """

    name: str
    verdict: Verdict
    why: str
    harmless: Callable[[Any], bool] = lambda _: True


def _off(value: Any) -> bool:
    return not value


def _one(value: Any) -> bool:
    return value in (1, None)


def _refused(name: str, why: str, harmless: Callable[[Any], bool] = _off) -> OptionRule:
    return OptionRule(name, Verdict.REFUSED, why, harmless)


def _honoured(name: str, why: str) -> OptionRule:
    return OptionRule(name, Verdict.HONOURED, why)


def _irrelevant(name: str, why: str) -> OptionRule:
    return OptionRule(name, Verdict.IRRELEVANT, why)


_ONLY_AXES = "only tensor, tensor_sequence, autoregressive, expert, data and fsdp axes are served; set it to 1"

OPTION_TABLE: tuple[OptionRule, ...] = (
    _honoured("dtype", "compute dtype; weights are held in it"),
    _honoured("weight_dtype", "dtype the checkpoint is restored in, before it is converted to `dtype`"),
    _honoured("sliding_window_size", "read off each local_sliding layer"),
    _honoured("attn_logits_soft_cap", "read off each layer; 0 and null mean off"),
    _honoured("final_logits_soft_cap", "MaxText's own output head runs"),
    _honoured("attention_sink", "sinks enter the softmax of every layer"),
    _honoured("float32_qk_product", "scores are always products of float32 values"),
    _honoured("float32_logits", "the softmax is always float32"),
    _honoured("scan_layers", "layers are always unscanned here; scanned weights are unscanned on load and update"),
    _honoured("max_target_length", "longest prompt + completion of a request"),
    _honoured(
        "max_prefill_predict_length",
        "accepted for MaxText's sake; prompts may be as long as max_target_length - 1",
    ),
    _honoured("per_device_batch_size", "times devices, raises the default of `paged_max_num_seqs`"),
    _honoured(
        "decode_sampling_strategy",
        "default where a request is silent: greedy, weighted, nucleus, topk, composite",
    ),
    _honoured("decode_sampling_temperature", "default where a request is silent"),
    _honoured("decode_sampling_top_k", "default where a request is silent; 0 means off"),
    _honoured("decode_sampling_nucleus_p", "default where a request is silent; -1 means off"),
    _honoured("load_parameters_path", "Orbax checkpoint, restored straight into its sharding"),
    _honoured("init_weights_seed", "random weights without a checkpoint"),
    _honoured("return_log_prob", "logprobs are always returned by batch_inference"),
    _irrelevant("remat_policy", "nothing is differentiated"),
    _irrelevant("prefill_cache_axis_order", "there is no dense cache"),
    _irrelevant("ar_cache_axis_order", "there is no dense cache"),
    _irrelevant("stack_prefill_result_cache", "there is no dense cache"),
    _irrelevant("compute_axis_order", "attention runs on `[token, head, dim]`"),
    _irrelevant("prefill_chunk_size", "see `paged_prefill_chunk_tokens`"),
    _irrelevant("dropout_rate", "steps are deterministic"),
    _irrelevant("num_vocab_tiling", "used in training only"),
    _refused("quantize_kvcache", "the pool's dtype is `paged_kv_dtype`; set quantize_kvcache=false"),
    _refused("quantization", "quantised weights are not loaded yet; leave it empty"),
    _refused("use_ragged_attention", "ragged attention belongs to the dense cache; set it to false"),
    _refused("use_chunked_prefill", "prompts are chunked by `paged_prefill_chunk_tokens`; set it to false"),
    _refused("reshape_q", "queries are `[token, head, dim]`; set it to false"),
    _refused("use_qk_clip", "an MLA option; set it to false"),
    _refused("moba", "block-sparse attention is not served; set it to false"),
    _refused("use_indexer", "sparse attention is not served; set it to false"),
    _refused("use_multimodal", "text only; set it to false"),
    _refused("use_audio", "text only; set it to false"),
    _refused("mtp_num_layers", "multi-token prediction heads are not served; set it to 0"),
    _refused("engram_layers", "engram layers look at neighbouring tokens of the flat step; leave it empty"),
    _refused("mhc_expansion_rate", "hyper-connections were not tested; set it to 1", _one),
    _refused("parameter_memory_host_offload", "weights stay on the device; set it to false"),
    _refused(
        "capacity_factor",
        "token-dropping MoE makes a row's answer depend on its batch mates; set it to -1",
        lambda value: value is None or value <= 0,
    ),
    _refused(
        "shard_mode",
        "explicit sharding is not supported; set shard_mode=auto",
        lambda value: value in (ShardMode.AUTO, "auto", None),
    ),
    _refused("ici_context_parallelism", _ONLY_AXES, _one),
    _refused("ici_context_usp_ulysses_parallelism", _ONLY_AXES, _one),
    _refused("ici_context_autoregressive_parallelism", _ONLY_AXES, _one),
    _refused("ici_pipeline_parallelism", _ONLY_AXES, _one),
    _refused("ici_diloco_parallelism", _ONLY_AXES, _one),
    _refused("dcn_pipeline_parallelism", _ONLY_AXES, _one),
    _refused("dcn_context_parallelism", _ONLY_AXES, _one),
    _refused("dcn_context_autoregressive_parallelism", _ONLY_AXES, _one),
)


def _joint_refusals(config: Any) -> list[str]:
    """Settings that are refused only together."""
    problems = []
    get = lambda name, default=None: getattr(config, name, default)  # noqa: E731
    if get("fused_qkv") and any((get(f"ici_{axis}_parallelism") or 1) > 1 for axis in ("data", "fsdp")):
        problems.append("fused_qkv=true with data or fsdp parallelism is not supported: set fused_qkv=false")
    if (get("num_experts") or 1) > 1 and get("sparse_matmul") and get("megablox"):
        problems.append(
            "sparse_matmul=true with megablox=true runs interpreted Pallas off TPU: set megablox=false (ragged_dot)"
        )
    if getattr(get("rope_type"), "value", get("rope_type")) == "yarn":  # an enum: a string compare never matches
        limit = get("max_position_embeddings")
        if limit and get("max_target_length") > limit:
            problems.append(
                f"max_target_length={get('max_target_length')} exceeds max_position_embeddings={limit}, beyond which "
                "YaRN's tables clamp: lower max_target_length"
            )
    return problems


def check_options(config: Any) -> None:
    """Refuse every setting that the paged path would not follow.

    Raises:
      ConfigError: names each such option, its value and what to set.
    """
    problems = []
    for rule in OPTION_TABLE:
        value = getattr(config, rule.name, None)
        if rule.verdict is Verdict.REFUSED and not rule.harmless(value):
            problems.append(f"{rule.name}={getattr(value, 'value', value)}: {rule.why}")
    problems += _joint_refusals(config)
    if problems:
        raise ConfigError("attention=gpu_paged refuses: " + "; ".join(problems))
