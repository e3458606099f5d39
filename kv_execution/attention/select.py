"""Which attention backend runs, as a value with its reason.

For:        turning the ``paged_backend`` option, the platform and the kill switch into one backend.
Not for:    any kernel, or reading the environment or a config (the caller does, and passes values).
May import: kv_common, kv_control, jax.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kv_common.errors import ConfigError, UnsupportedError
from kv_common.layout import KvStorageLayoutV1
from kv_execution.attention import triton_bridge
from kv_execution.attention.aiter_backend import AITER_CAPABILITIES, AiterBackend
from kv_execution.attention.api import AttentionOptions, PagedAttentionBackend
from kv_execution.attention.capabilities import FLASHINFER_CAPABILITIES, REFERENCE_CAPABILITIES, Capabilities
from kv_execution.attention.native import NATIVE_CAPABILITIES, NativeBackend
from kv_execution.attention.reference import ReferenceBackend
from kv_execution.attention.triton_backend import TRITON_CAPABILITIES, TritonBackend
from kv_execution.dispatch import SplitFloors
from kv_execution.native.aiter_library import aiter_available
from kv_execution.native.library import native_available, native_library

_log = logging.getLogger(__name__)
_announced: set[tuple[str, str]] = set()

KNOWN_BACKENDS = ("auto", "reference", "native", "triton", "aiter", "flashinfer")
_GPU_PLATFORMS = ("gpu", "cuda", "rocm")
_PLATFORMS = {"native": ("cpu",), "triton": _GPU_PLATFORMS, "aiter": ("gpu", "rocm"), "flashinfer": ("gpu", "cuda")}
_CAPABILITIES = {
    "native": NATIVE_CAPABILITIES,
    "triton": TRITON_CAPABILITIES,
    "aiter": AITER_CAPABILITIES,
    "flashinfer": FLASHINFER_CAPABILITIES,
}
_DEVICES = {"native": "CPUs", "triton": "GPUs", "aiter": "AMD GPUs", "flashinfer": "NVIDIA GPUs"}
_WHY_MISSING: dict[str, Callable[[], str | None]] = {
    "native": lambda: native_available(),
    "triton": lambda: triton_bridge.missing(),
    "aiter": aiter_available,
    "flashinfer": lambda: "no version of this package calls flashinfer yet",
}
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
      declined: why the platform's preferred kernels were passed over although nobody asked for that; None if they
        run, were not wanted, or none is made for the platform.
    """

    name: str
    reason: str
    backend: PagedAttentionBackend
    declined: str | None = None


def built_backends() -> tuple[str, ...]:
    """Names of the backends that can run in this installation, given the device they are made for."""
    return ("reference", *(name for name, why in _WHY_MISSING.items() if why() is None))


def choose_backend(
    requested: str,
    platform: str,
    layout: KvStorageLayoutV1,
    layers: Sequence[AttentionOptions] = (),
    *,
    has_sinks: bool = False,
    native_switch: int | None = None,
    floors: SplitFloors | None = None,
) -> BackendChoice:
    """Choose the backend of every layer, announcing each distinct choice once: INFO, or WARNING where it disappoints.

    Args:
      requested: ``paged_backend``, one of ``KNOWN_BACKENDS``.
      platform: jax's platform name, such as ``"cpu"``.
      layers: the distinct attention options of the model's layers, checked against the backend.
      has_sinks: whether any layer has attention sinks.
      native_switch: ``paged_attention_native``; 0 forbids custom kernels and wins over everything, 1
        asks for them whatever the floors say, None leaves the choice open.
      floors: when a native backend cuts decode rows; None: always.

    Raises:
      ConfigError: ``requested`` is not a known name.
      UnsupportedError: the backend asked for by name is not built here, is forbidden by the kill
        switch, or cannot serve this geometry.

    >>> layout = KvStorageLayoutV1(1, 8, 16, num_kv_heads=2, head_dim=64, dtype="float32")
    >>> choose_backend("auto", "tpu", layout).reason
    'no kernel is made for tpu: the jnp reference serves tpu'
    >>> choose_backend("auto", "cpu", layout, native_switch=0).reason
    'paged_attention_native=0 forbids custom kernels: the jnp reference serves cpu'
    """
    if requested not in KNOWN_BACKENDS:
        raise ConfigError(f"paged_backend={requested!r}: choose one of {', '.join(KNOWN_BACKENDS)}")
    killed = native_switch == 0
    preferred = _PREFERRED.get(platform) if requested == "auto" else requested
    declined = None
    if preferred is not None and preferred != "reference":
        declined = (
            "is forbidden by paged_attention_native=0"
            if killed
            else _unbuilt(preferred, platform) or _unserved(_CAPABILITIES[preferred], layout, layers, has_sinks)
        )
        if requested != "auto" and declined is not None:
            raise UnsupportedError(
                f"paged_backend={requested}: it {declined}. Built here: {', '.join(built_backends())}; "
                "paged_backend=auto takes the best of them"
            )
    applied = floors if floors is not None and native_switch != 1 else SplitFloors()
    if preferred == "native" and declined is None:
        choice = _native_choice(requested, layout, applied)
    elif preferred == "triton" and declined is None:
        choice = _triton_choice(requested, layout, applied)
    elif preferred == "aiter" and declined is None:
        reason = "asked for by paged_backend=aiter; AMD's kernels, on no device proven by this project"
        choice = BackendChoice("aiter", reason, AiterBackend(layout.heads_per_shard()))
    else:
        refusal = _unserved(REFERENCE_CAPABILITIES, layout, layers, has_sinks)
        if refusal is not None:
            raise UnsupportedError(f"paged_backend=reference {refusal}")
        if requested == "reference":
            reason = "asked for by paged_backend=reference"
            if killed:
                reason = f"paged_attention_native=0 forbids custom kernels; {reason}"
        elif killed:
            reason = f"paged_attention_native=0 forbids custom kernels: the jnp reference serves {platform}"
        else:
            why = f"{preferred} {declined}" if preferred else f"no kernel is made for {platform}"
            reason = f"{why}: the jnp reference serves {platform}"
        if platform == "cpu" and layout.dtype == "bfloat16":
            reason += f"; {_BFLOAT16_ON_CPU}"
        choice = BackendChoice("reference", reason, ReferenceBackend(), None if killed else declined)
    _announce(choice)
    return choice


def _native_choice(requested: str, layout: KvStorageLayoutV1, floors: SplitFloors) -> BackendChoice:
    library = native_library()
    asked = "the default on CPUs" if requested == "auto" else "asked for by paged_backend=native"
    backend = NativeBackend(layout.heads_per_shard(), floors.min_tokens, floors.min_tokens_per_request)
    return BackendChoice("native", f"{asked}; C++ kernels for {library.best}", backend)


def _triton_choice(requested: str, layout: KvStorageLayoutV1, floors: SplitFloors) -> BackendChoice:
    asked = "the default on GPUs" if requested == "auto" else "asked for by paged_backend=triton"
    return BackendChoice("triton", f"{asked}; Triton kernels", TritonBackend(layout.heads_per_shard(), floors))


def _unbuilt(name: str, platform: str) -> str | None:
    """Why a backend other than the reference cannot run here at all."""
    if platform not in _PLATFORMS[name]:
        return f"runs on {_DEVICES[name]}, not on {platform}"
    missing = _WHY_MISSING[name]()
    return None if missing is None else f"is not built ({missing})"


def _unserved(
    capabilities: Capabilities, layout: KvStorageLayoutV1, layers: Sequence[AttentionOptions], has_sinks: bool
) -> str | None:
    for options in layers or (AttentionOptions(scale=1.0, sliding_window=None, soft_cap=None),):
        refusal = capabilities.refusal(layout, options, has_sinks=has_sinks)
        if refusal is not None:
            return f"cannot serve {refusal}"
    return None


def _announce(choice: BackendChoice) -> None:
    kind = (choice.name, choice.reason)
    if kind not in _announced:
        _announced.add(kind)
        level = logging.INFO if choice.declined is None else logging.WARNING
        _log.log(level, "paged attention backend: %s (%s)", choice.name, choice.reason)
