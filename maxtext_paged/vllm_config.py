"""From a vLLM-shaped configuration to what a paged model is built from: MaxText's configuration, a mesh, a geometry.

For:        reading ``vllm_config`` by its fields; neither vllm nor tpu_inference is imported, and no device is asked.
Not for:    the model class (vllm.py).
May import: kv_common, kv_control, kv_execution, jax, maxtext, maxtext_paged.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from maxtext.configs import pyconfig
from maxtext.utils.globals import MAXTEXT_CONFIGS_DIR

from kv_common.dtypes import scale_bits
from kv_common.errors import ConfigError, UnsupportedError
from kv_common.layout import KvStorageLayoutV1
from kv_execution.sharding import head_shards
from maxtext_paged.assembly import backend_of, paging_config, products_of
from maxtext_paged.config import PagedMaxTextConfig, PagedOptions
from maxtext_paged.geometry import model_geometry
from maxtext_paged.model import MaxTextPagedModel
from maxtext_paged.options import check_options

MODEL_AXIS = "model"
"""The mesh axis of tensor parallelism in MaxText's configs/inference/vllm.yml and in tpu-inference."""

_TENSOR = {"sharding_config": "tp_size", "parallel_config": "tensor_parallel_size"}
_SINGLE = {
    "sharding_config": (
        "expert_size",
        "model_dp_size",
        "attn_dp_size",
        "attn_dp_expert_size",
        "sequence_size",
        "decode_cp_size",
        "prefill_cp_size",
    ),
    "parallel_config": (
        "data_parallel_size",
        "pipeline_parallel_size",
        "decode_context_parallel_size",
        "prefill_context_parallel_size",
        "enable_expert_parallel",
    ),
}
"""Degrees that must be 1 here. Data parallelism is replicas: one engine each."""


def tensor_parallelism(vllm_config: Any) -> int:
    """The degree of tensor parallelism: ``sharding_config``'s, or ``parallel_config``'s where there is none.

    Raises:
      ConfigError: any other parallelism is asked for; it is named.
    """
    source = "sharding_config" if getattr(vllm_config, "sharding_config", None) is not None else "parallel_config"
    held = getattr(vllm_config, source, None)
    for name in _SINGLE[source]:
        value = getattr(held, name, 1)
        if int(value) > (0 if isinstance(value, bool) else 1):
            raise ConfigError(
                f"{source}.{name}={value}: one engine serves tensor parallelism only; for more throughput run replicas"
            )
    return int(getattr(held, _TENSOR[source], 1))


def maxtext_config(vllm_config: Any, platform: str) -> Any:
    """MaxText's configuration: its configs/inference/vllm.yml under ``additional_config["maxtext_config"]``.

    ``max_target_length`` follows ``model_config.max_model_len`` unless it is given. Pages are the caller's blocks.

    Raises:
      ConfigError: an option is unknown, out of range, or contradicts the caller's own; it is named.
    """
    given = dict((getattr(vllm_config, "additional_config", None) or {}).get("maxtext_config") or {})
    if given.setdefault("attention", "gpu_paged") != "gpu_paged":
        raise ConfigError(f"maxtext_config.attention={given['attention']}: this model class is attention=gpu_paged")
    cache = vllm_config.cache_config
    theirs: dict[str, Any] = {"paged_tokens_per_page": int(cache.block_size)}
    if getattr(cache, "cache_dtype", "auto") != "auto":
        theirs["paged_kv_dtype"] = str(cache.cache_dtype)
    for name, value in theirs.items():
        if given.setdefault(name, value) != value:
            raise ConfigError(f"maxtext_config.{name}={given[name]!r}: the caller's cache_config says {value!r}")
    PagedOptions.checked({name: value for name, value in given.items() if name in PagedOptions.model_fields})
    max_model_len = getattr(getattr(vllm_config, "model_config", None), "max_model_len", None)
    if max_model_len is not None:
        given.setdefault("max_target_length", int(max_model_len))
    given.setdefault("hardware", platform if platform in ("cpu", "tpu") else "gpu")
    given.setdefault("enable_checkpointing", False)
    # MaxText wants one; nothing is ever written there.
    given.setdefault("base_output_directory", str(Path(tempfile.gettempdir()) / "maxtext-paged-unused"))
    try:
        # `pyconfig.initialize` would write /dev/termination-log and end the caller's process.
        held = pyconfig._initialize_pydantic(
            ["", os.path.join(MAXTEXT_CONFIGS_DIR, "inference", "vllm.yml")], config_class=PagedMaxTextConfig, **given
        )
    except ValueError as error:
        raise ConfigError(f"additional_config['maxtext_config']: {error}") from error
    return pyconfig.HyperParameters(held)


def tensor_mesh(mesh_axes: Any, tensor: int) -> Mesh:
    """A mesh over the first ``tensor`` devices, all on the model axis."""
    devices = jax.devices()
    if len(devices) < tensor:
        raise ConfigError(f"tensor parallelism {tensor}: jax sees {len(devices)} devices")
    shape = [tensor if axis == MODEL_AXIS else 1 for axis in mesh_axes]
    return Mesh(np.array(devices[:tensor]).reshape(shape), tuple(mesh_axes))


class PagedModels:
    """The bound model of one vLLM-shaped configuration, for whatever number of blocks the caller allocates.

    It holds no array. Two of the same configuration are still two: jax tells them apart by identity.

    Attributes:
      config, options: MaxText's configuration and the ``paged_*`` options. mesh: what the model runs on.
      one_page: geometry of the caches, but for the number of blocks.
    """

    def __init__(self, vllm_config: Any, mesh: Mesh | None) -> None:
        tensor = tensor_parallelism(vllm_config)
        platform = (mesh.devices.flat[0] if mesh is not None else jax.devices()[0]).platform
        config = maxtext_config(vllm_config, platform)
        check_options(config)
        self.config = paging_config(config)
        self.options = PagedOptions.from_config(self.config)
        self.mesh = tensor_mesh(config.mesh_axes, tensor) if mesh is None else mesh
        self._geometry = model_geometry(self.config, self.mesh)
        shards = head_shards(self.mesh, self._geometry.head_axes)
        if (shards, self.mesh.size) != (tensor, tensor):
            sizes = {axis: size for axis, size in self.mesh.shape.items() if size > 1}
            raise ConfigError(
                f"tensor parallelism {tensor} was asked for, the mesh has {self.mesh.size} devices "
                f"({sizes or 'no axis above 1'}) and spreads KV heads over {shards}: give a mesh of {tensor} devices "
                f"on axis {MODEL_AXIS!r}"
            )
        self._bound: dict[KvStorageLayoutV1, MaxTextPagedModel] = {}
        self.one_page = self._geometry.layout(
            self.mesh,
            num_pages=1,
            tokens_per_page=self.options.paged_tokens_per_page,
            dtype=np.dtype(self.config.dtype).name
            if self.options.paged_kv_dtype == "auto"
            else self.options.paged_kv_dtype,
        )

        if scale_bits(self.one_page.dtype):
            raise UnsupportedError(
                f"paged_kv_dtype={self.one_page.dtype}: a caller's caches have no place for scales; use float32, "
                "bfloat16 or float16 (our own loop serves quantised pools)"
            )

    def layout(self, num_blocks: int) -> KvStorageLayoutV1:
        """Geometry of caches of ``num_blocks`` blocks."""
        return replace(self.one_page, num_pages=num_blocks)

    def model(self, layout: KvStorageLayoutV1 | None = None) -> MaxTextPagedModel:
        """The model bound to pools of ``layout``, made once; to any where none is given."""
        layout = self.one_page if layout is None else layout
        if layout not in self._bound:
            backend = backend_of(self.options, self._geometry, self.mesh, layout).backend
            # A caller may be tracing: what the model keeps must be arrays, not that trace's values.
            with jax.ensure_compile_time_eval():
                self._bound[layout] = MaxTextPagedModel(
                    self.config,
                    self.mesh,
                    layout=layout,
                    head_axes=self._geometry.head_axes,
                    backend=backend,
                    products=products_of(self.options, self.config, self.mesh),
                    model=self._geometry.model,
                )
        return self._bound[layout]


def loads_random_weights(vllm_config: Any) -> bool:
    """Whether ``load_config.load_format`` is "dummy": random weights, a checkpoint ignored."""
    return getattr(getattr(vllm_config, "load_config", None), "load_format", "auto") == "dummy"
