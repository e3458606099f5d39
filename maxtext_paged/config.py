"""The ``paged_*`` options: one table, read and validated once.

``PagedMaxTextConfig`` is MaxText's own configuration class with these keys added, given to
``pyconfig.initialize(argv, config_class=PagedMaxTextConfig)``: an official seam. A configuration that
was built without it gets the defaults.

For:        naming, documenting and validating every option of this package.
Not for:    MaxText's own options (options.py says what becomes of those).
May import: kv_common, pydantic, maxtext's configuration types.
"""

from __future__ import annotations

import os
from typing import Annotated, Any, Literal

from maxtext.configs.types import MaxTextConfig
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from kv_common.errors import ConfigError
from kv_execution.dispatch import MEASURED_FLOORS, UNMEASURED_FLOORS
from kv_execution.products import MEASURED_MAX_FEW_ROWS, MEASURED_MAX_ROWS

NATIVE_ENVIRONMENT_VARIABLE = "PAGED_ATTENTION_NATIVE"
"""Environment form of ``paged_attention_native``: the kill switch wins over everything."""

FLOOR_ENVIRONMENT_VARIABLES = {
    "paged_split_kv_min_tokens": "PAGED_SPLIT_KV_MIN_TOKENS",
    "paged_split_kv_min_tokens_per_request": "PAGED_SPLIT_KV_MIN_TOKENS_PER_REQUEST",
}
"""Environment forms of the floors; they win over the configuration."""

DEFAULT_MAX_NUM_SEQS = 32
"""Requests that run at once where nothing is set."""


def _as_word(value: Any) -> Any:
    """YAML and ``key=value`` read a bare 0 or 1 as a number; the option is a word."""
    return str(int(value)) if isinstance(value, int) else value


def _as_switch(value: Any) -> Any:
    """YAML reads a bare on or off as a truth value; the option is a word."""
    return ("off", "on")[value] if isinstance(value, bool) else value


class PagedOptions(BaseModel):
    """Every option of this package. Keep this table and docs/options.md in step (a test compares them)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    paged_tokens_per_page: int = Field(16, ge=1, le=256, description="Tokens of one page.")
    paged_num_pages: int = Field(
        0,
        ge=0,
        description="Pages of the pool. 0: from `paged_kv_budget_bytes`, or the default described there.",
    )
    paged_window_pages: Annotated[Literal["auto", "off"], BeforeValidator(_as_switch)] = Field(
        "auto",
        description="auto: layers with a sliding window have their own pools and keep only the pages of their window. "
        "Their page count follows from `paged_num_pages` or the budget. off: all layers keep all pages.",
    )
    paged_kv_budget_bytes: int = Field(
        0,
        ge=0,
        description="Bytes of all pools on one device. 0: enough for `paged_max_num_seqs` requests of "
        "`max_target_length` tokens, at most 1 GiB. The split-KV workspace is paid from it.",
    )
    paged_kv_memory_fraction: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Share of a device's free memory, after the weights, that pools and split-KV workspace take; on a "
        "CPU of the machine's available memory, divided by the devices on it. 0: unset. `paged_num_pages` and "
        "`paged_kv_budget_bytes` win over it.",
    )
    paged_max_num_seqs: int = Field(
        0,
        ge=0,
        le=4096,
        description=f"Requests that run at once. 0: {DEFAULT_MAX_NUM_SEQS}, or `per_device_batch_size` times the "
        "devices of the mesh where that is more, but never more than `paged_max_num_batched_tokens`. MaxText's dense "
        "engine reserves a full context for each of its slots; here pages, not slots, cost memory.",
    )
    paged_max_num_batched_tokens: int = Field(
        512, ge=1, description="Tokens of one step, prompts and decodes together: bounds a step's latency."
    )
    paged_prefill_chunk_tokens: int = Field(
        0,
        ge=0,
        description="Longest piece of one prompt that runs in one step. 0: whatever the step has room for.",
    )
    paged_async_scheduling: bool = Field(
        True,
        description="Dispatch each step before the results of the last one are read; sampled tokens go from step to "
        "step on the device. A request that a stop token ends runs one token too many, which is dropped. Results do "
        "not depend on it.",
    )
    paged_enable_prefix_cache: bool = Field(
        False,
        description="Keep whole pages of ended requests while there is room, and share them between requests with "
        "equal prefixes; requests that arrive together wait for the first to compute what they share. Emptied when "
        "weights are exchanged.",
    )
    paged_tenant: str = Field(
        "",
        description="Whose prompts this engine serves: cached pages are shared within one tenant only. A setting of "
        "the engine's owner; rows cannot choose it.",
    )
    paged_file_order: Literal["auto", "input", "prefix"] = Field(
        "auto",
        description="Order in which the rows of a file or a list are started. prefix: within windows of the input, "
        "rows that share a beginning side by side, families with long outputs first. auto: prefix where the prefix "
        "cache is on. Results do not depend on it.",
    )
    paged_backend: Literal["auto", "reference", "native", "triton", "aiter", "flashinfer"] = Field(
        "auto", description="Attention kernels. auto: the best that is built for the platform."
    )
    paged_attention_native: Annotated[Literal["auto", "0", "1"], BeforeValidator(_as_word)] = Field(
        "auto",
        description="0: never a native kernel, whatever else is set (also as the environment variable "
        "PAGED_ATTENTION_NATIVE). 1: native kernels without regard to the floors below.",
    )
    paged_native_products: Annotated[Literal["auto", "on", "off"], BeforeValidator(_as_switch)] = Field(
        "auto",
        description="Matrix products of a step in C++ instead of XLA's. on: or an error. auto: on one CPU device, "
        f"float32, up to {max(MEASURED_MAX_ROWS.values())} rows with AVX-512 and {MEASURED_MAX_FEW_ROWS} without it.",
    )
    paged_weight_dtype: Literal["auto", "bfloat16"] = Field(
        "auto",
        description="Element type in which the weights of dense layers are held. auto: the model's `dtype`. bfloat16: "
        "half the memory, and half the reading of a decode step; they are widened as they are read, and all arithmetic "
        "stays float32. Exact where the checkpoint's own values are bfloat16. Needs native products.",
    )
    paged_split_kv_min_tokens: int = Field(
        -1,
        ge=-1,
        description="Visible KV tokens from which one request alone is decoded with split-KV (also as the environment "
        "variable PAGED_SPLIT_KV_MIN_TOKENS, which wins). "
        f"-1: {MEASURED_FLOORS['cpu'].min_tokens} on CPUs, as measured, and "
        f"{UNMEASURED_FLOORS.min_tokens} on other devices.",
    )
    paged_split_kv_min_tokens_per_request: int = Field(
        -1,
        ge=-1,
        description="Visible KV tokens per request from which several are decoded with split-KV (also as the "
        "environment variable PAGED_SPLIT_KV_MIN_TOKENS_PER_REQUEST, which wins). -1: "
        f"{MEASURED_FLOORS['cpu'].min_tokens_per_request} on CPUs, as measured, and "
        f"{UNMEASURED_FLOORS.min_tokens_per_request} on other devices.",
    )
    paged_kv_dtype: Literal["auto", "float32", "bfloat16", "float16", "float8_e4m3fn", "int8"] = Field(
        "auto",
        description="Element type of the pools. auto: the model's `dtype`. float8_e4m3fn, int8: about a quarter of "
        "float32's bytes, with a float32 scale for each token and head, which lies and dies with its page; scales "
        "come from the data, nothing is calibrated. What each costs in accuracy stands in docs/kv-dtypes.md.",
    )
    paged_poison_on_free: bool = Field(
        False,
        description="Fill pages with NaN when they are freed: a debugging aid that makes a stray read visible.",
    )
    paged_check_invariants: bool = Field(
        False, description="Check the conservation laws of pages after every step: a debugging aid."
    )

    @classmethod
    def from_config(cls, config: Any) -> PagedOptions:
        """The options of a MaxText configuration; keys it does not have keep their defaults.

        Raises:
          ConfigError: a value is out of range; the message names the option.
        """
        values = {name: getattr(config, name) for name in cls.model_fields if _has(config, name)}
        native = os.environ.get(NATIVE_ENVIRONMENT_VARIABLE)
        if native is not None and values.get("paged_attention_native") != "0":
            values["paged_attention_native"] = native
        values |= {name: os.environ[key] for name, key in FLOOR_ENVIRONMENT_VARIABLES.items() if key in os.environ}
        return cls.checked(values)

    @classmethod
    def checked(cls, values: dict[str, Any]) -> PagedOptions:
        """Validate, turning pydantic's report into one line per option."""
        try:
            return cls(**values)
        except ValidationError as error:
            lines = [f"{'.'.join(map(str, item['loc']))}={item['input']!r}: {item['msg']}" for item in error.errors()]
            raise ConfigError("; ".join(lines)) from None


def _has(config: Any, name: str) -> bool:
    try:
        return getattr(config, name, None) is not None
    except ValueError:  # MaxEngineConfig raises ValueError for an unknown key
        return False


class PagedMaxTextConfig(PagedOptions, MaxTextConfig):
    """MaxText's configuration with the ``paged_*`` keys of ``PagedOptions``."""

    model_config = ConfigDict(extra="forbid", frozen=False, protected_namespaces=())
