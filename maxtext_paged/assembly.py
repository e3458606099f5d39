"""What a MaxText configuration comes to, before any weight is loaded or page allocated.

For:        the one assembly of options, mesh, geometry, pool size, backend and bound model, which sessions start
            from and ``plan`` and ``doctor`` print.
Not for:    any of those parts, loading weights or running steps (session.py).
May import: kv_common, kv_control, kv_execution, jax, maxtext, maxtext_paged.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jax.sharding import Mesh
from maxtext.configs import pyconfig
from maxtext.utils import maxtext_utils

from kv_common.errors import ConfigError
from kv_common.layout import KvStorageLayoutV1
from kv_common.window_group import WindowGroup
from kv_execution.attention.decode_plans import decode_floors, decode_plans, decode_workspace_bytes, has_split_kv
from kv_execution.attention.select import BackendChoice, choose_backend
from kv_execution.dispatch import DecodeDispatch, SplitFloors, floors_for
from kv_execution.products import ProductChoice, choose_products
from maxtext_paged.collector import collector_paused
from maxtext_paged.config import DEFAULT_MAX_NUM_SEQS, PagedOptions
from maxtext_paged.geometry import ModelGeometry, model_geometry, weight_device_bytes
from maxtext_paged.model import MaxTextPagedModel
from maxtext_paged.options import check_options
from maxtext_paged.sizing import PoolSize, free_memory, pool_size
from maxtext_paged.window_sizing import GroupDemand


@dataclass(frozen=True, slots=True)
class PagedAssembly:
    """What a configuration decides before any weight is loaded or page allocated.

    Attributes:
      config: MaxText's configuration, as the model was built from it. options: the ``paged_*`` ones.
      model: the bound model. backend: which attention kernels it was bound with, and why.
      decode: how decode rows are dispatched.
      pool: how many pages, and why. max_num_seqs: requests that run at once.
    """

    config: Any
    options: PagedOptions
    model: MaxTextPagedModel
    backend: BackendChoice
    decode: DecodeDispatch
    pool: PoolSize
    max_num_seqs: int


@collector_paused()
def assemble(config: Any, *, mesh: Mesh | None = None) -> PagedAssembly:
    """What a configuration comes to; nothing is allocated.

    Args:
      config: MaxText's configuration with ``attention=gpu_paged``.
      mesh: devices to use; by default MaxText's mesh over all of them.

    Raises:
      ConfigError, UnsupportedError: by name.
    """
    if config.attention != "gpu_paged":
        raise ConfigError(f"attention={config.attention}: a paged session needs attention=gpu_paged")
    options = PagedOptions.from_config(config)
    check_options(config)
    config = paging_config(config)
    mesh = default_mesh(config) if mesh is None else mesh
    geometry = model_geometry(config, mesh)
    max_model_len = int(config.max_target_length)
    max_num_seqs = options.paged_max_num_seqs or min(
        max(DEFAULT_MAX_NUM_SEQS, int(config.per_device_batch_size * mesh.size)), options.paged_max_num_batched_tokens
    )
    activations = np.dtype(config.dtype).name
    kv_dtype = activations if options.paged_kv_dtype == "auto" else options.paged_kv_dtype
    one_page = geometry.layout(mesh, num_pages=1, tokens_per_page=options.paged_tokens_per_page, dtype=kv_dtype)
    query_heads = geometry.num_query_heads // one_page.head_shards
    nominal = backend_of(options, geometry, mesh, one_page).backend
    workspace = decode_workspace_bytes(nominal, one_page, query_heads, activations, max_num_seqs, max_model_len)
    fraction = options.paged_kv_memory_fraction
    # Layers with a window that gets pages of their own leave the pools of the others.
    windows = geometry.window_layers(max_model_len) if options.paged_window_pages == "auto" else {}
    one_page = replace(one_page, num_layers=one_page.num_layers - sum(windows.values()))
    pool = pool_size(
        one_page,
        num_pages=options.paged_num_pages,
        budget_bytes=options.paged_kv_budget_bytes,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        memory_fraction=fraction,
        free=free_memory(mesh.local_devices) if fraction else None,
        step_workspace_bytes=workspace,
        weight_bytes=geometry.weight_bytes,
        demands=[
            GroupDemand.of(
                WindowGroup(window, replace(one_page, num_layers=num_layers)),
                max_num_seqs=max_num_seqs,
                max_model_len=max_model_len,
                step_tokens=options.paged_max_num_batched_tokens,
                prefix_cache=options.paged_enable_prefix_cache,
            )
            for window, num_layers in windows.items()
        ],
    )
    layout = replace(one_page, num_pages=pool.num_pages)
    backend = backend_of(options, geometry, mesh, layout)  # again: kernels may limit a pool's pages
    decode = DecodeDispatch(
        tuple(dict.fromkeys(layer.sliding_window for layer in geometry.layer_options)),
        None if has_split_kv(backend.backend) else f"the {backend.name} backend has no split-KV ({backend.reason})",
        decode_floors(backend.backend, split_floors(options, mesh)),
        forced=native_switch(options) == 1,
        plans=decode_plans(backend.backend, layout, query_heads, activations),
    )
    model = MaxTextPagedModel(
        config,
        mesh,
        layout=layout,
        head_axes=geometry.head_axes,
        backend=backend.backend,
        products=products_of(options, config, mesh),
        model=geometry.model,
        window_groups=pool.window_groups,
    )
    pool = replace(pool, weight_bytes=weight_device_bytes(model.abstract_params))  # as held: maybe half
    return PagedAssembly(config, options, model, backend, decode, pool, max_num_seqs)


def paging_config(config: Any) -> Any:
    """The configuration as the paged model is built from it.

    ``scan_layers=false``: layers run one by one, whatever the checkpoint holds. ``max_prefill_predict_length`` sizes
    only the dense cache that is thrown away, but MaxText refuses to build one that leaves no room to decode.
    """
    update: dict[str, Any] = {}
    if config.scan_layers:
        update["scan_layers"] = False
    if config.max_prefill_predict_length >= config.max_target_length:
        update["max_prefill_predict_length"] = max(1, config.max_target_length - 1)
    return pyconfig.HyperParameters(config._pydantic_config.model_copy(update=update)) if update else config


def default_mesh(config: Any, devices: Any = None) -> Mesh:
    """MaxText's own mesh for this configuration."""
    return Mesh(maxtext_utils.create_device_mesh(config=config, devices=devices), config.mesh_axes)


def split_floors(options: PagedOptions, mesh: Mesh) -> SplitFloors:
    """From how many visible tokens on decode rows are cut over their keys: the options', or the devices' own."""
    given = options.paged_split_kv_min_tokens, options.paged_split_kv_min_tokens_per_request
    return floors_for(mesh.devices.flat[0].platform, *given)


def native_switch(options: PagedOptions) -> int | None:
    """``paged_attention_native`` as a number; None leaves the choice open."""
    return None if options.paged_attention_native == "auto" else int(options.paged_attention_native)


def backend_of(options: PagedOptions, geometry: ModelGeometry, mesh: Mesh, layout: KvStorageLayoutV1) -> BackendChoice:
    """Which attention kernels serve a model with pools of this layout."""
    return choose_backend(
        options.paged_backend,
        mesh.devices.flat[0].platform,
        layout,
        tuple(dict.fromkeys(geometry.layer_options)),
        has_sinks=geometry.has_sinks,
        native_switch=native_switch(options),
        floors=split_floors(options, mesh),
    )


def products_of(options: PagedOptions, config: Any, mesh: Mesh) -> ProductChoice:
    """Which matrix products of a model run natively."""
    return choose_products(
        options.paged_native_products,
        platform=mesh.devices.flat[0].platform,
        num_devices=mesh.size,
        dtype=np.dtype(config.dtype).name,
        native_switch=native_switch(options),
        weight_dtype=options.paged_weight_dtype,
    )
