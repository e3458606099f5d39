"""Which attention backend runs, as a value with its reason.

For:        turning the ``paged_backend`` option, the platform and the kill switch into one backend.
Not for:    any kernel, or reading the environment or a config (the caller does, and passes values).
May import: kv_common, kv_control, jax.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from kv_common.errors import ConfigError, UnsupportedError
from kv_common.layout import KvStorageLayoutV1
from kv_execution.attention.api import AttentionOptions, PagedAttentionBackend
from kv_execution.attention.capabilities import REFERENCE_CAPABILITIES
from kv_execution.attention.reference import ReferenceBackend

_log = logging.getLogger(__name__)
_announced: set[tuple[str, str]] = set()

KNOWN_BACKENDS = ("auto", "reference", "native", "triton", "aiter", "flashinfer")
BUILT_BACKENDS = ("reference",)
_PREFERRED = {"cpu": "native", "cuda": "triton", "gpu": "triton", "rocm": "triton"}
_BFLOAT16_ON_CPU = (
    "slow with paged_kv_dtype=bfloat16: XLA:CPU turns each layer's whole pool into float32 and back at every "
    "step, and needs the memory for it; float16 and float32 are read and written in place"
)


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """The backend that runs, and why.

    Attributes:
      name: the backend's short name. reason: one line, with what was passed over and why.
      backend: the object to call.
    """

    name: str
    reason: str
    backend: PagedAttentionBackend


def choose_backend(
    requested: str,
    platform: str,
    layout: KvStorageLayoutV1,
    layers: Sequence[AttentionOptions] = (),
    *,
    has_sinks: bool = False,
    native_switch: int | None = None,
) -> BackendChoice:
    """Choose the backend of every layer, announcing each distinct choice once at INFO.

    Args:
      requested: ``paged_backend``, one of ``KNOWN_BACKENDS``.
      platform: jax's platform name, such as ``"cpu"``.
      layers: the distinct attention options of the model's layers, checked against the backend.
      has_sinks: whether any layer has attention sinks.
      native_switch: ``paged_attention_native``; 0 forbids custom kernels and wins over everything, 1
        asks for them whatever the floors say, None leaves the choice open.

    Raises:
      ConfigError: ``requested`` is not a known name.
      UnsupportedError: the backend asked for by name is not built here, is forbidden by the kill
        switch, or cannot serve this geometry.

    >>> layout = KvStorageLayoutV1(1, 8, 16, num_kv_heads=2, head_dim=64, dtype="float32")
    >>> choose_backend("auto", "cpu", layout).reason
    'native is not built: the jnp reference serves cpu'
    """
    if requested not in KNOWN_BACKENDS:
        raise ConfigError(f"paged_backend={requested!r}: choose one of {', '.join(KNOWN_BACKENDS)}")
    killed = native_switch == 0
    if requested not in ("auto", *BUILT_BACKENDS):
        why = "paged_attention_native=0 forbids it" if killed else "it is not built"
        raise UnsupportedError(
            f"paged_backend={requested}: {why}. Built here: {', '.join(BUILT_BACKENDS)}; "
            "paged_backend=auto takes the best of them"
        )
    for options in layers or (AttentionOptions(scale=1.0, sliding_window=None, soft_cap=None),):
        refusal = REFERENCE_CAPABILITIES.refusal(layout, options, has_sinks=has_sinks)
        if refusal is not None:
            raise UnsupportedError(f"paged_backend=reference cannot serve {refusal}")
    if requested == "reference":
        reason = "asked for by paged_backend=reference"
    else:
        preferred = _PREFERRED.get(platform)
        missing = f"{preferred} is not built" if preferred else f"no kernel is made for {platform}"
        reason = f"{missing}: the jnp reference serves {platform}"
    if killed:
        reason = f"paged_attention_native=0 forbids custom kernels; {reason}"
    if platform == "cpu" and layout.dtype == "bfloat16":
        reason += f"; {_BFLOAT16_ON_CPU}"
    choice = BackendChoice("reference", reason, ReferenceBackend())
    _announce(choice)
    return choice


def _announce(choice: BackendChoice) -> None:
    kind = (choice.name, choice.reason)
    if kind not in _announced:
        _announced.add(kind)
        _log.info("paged attention backend: %s (%s)", choice.name, choice.reason)
