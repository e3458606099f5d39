"""A running paged loop: weights, pools, control plane, runtime and driver of one assembled model.

For:        worker, engine, command and benchmarks, which all open a session here.
Not for:    what a configuration comes to (assembly.py), or any of the parts.
May import: kv_common, kv_control, kv_execution, jax, maxtext, maxtext_paged.
"""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kv_common.dtypes import ELEMENT_BITS, described
from kv_common.errors import KvCacheError
from kv_control.bucketing import token_ladder
from kv_control.control_plane import ControlPlane
from kv_control.scheduler import Scheduler
from kv_execution.attention.decode_plans import (
    context_ladder,
)
from kv_execution.attention.select import KNOWN_BACKENDS, BackendChoice
from kv_execution.dispatch import DecodeDispatch
from kv_execution.driver import PagedDriver
from kv_execution.products import num_native_products
from kv_execution.runtime import PagedRuntime
from maxtext_paged.assembly import PagedAssembly, assemble
from maxtext_paged.collector import collector_paused
from maxtext_paged.config import PagedOptions
from maxtext_paged.loading import params_from_tree, prepare_params
from maxtext_paged.model import MaxTextPagedModel
from maxtext_paged.namespace import cache_namespace
from maxtext_paged.processes import check_agreement
from maxtext_paged.sizing import PoolSize
from maxtext_paged.window_sizing import describe_group

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PagedSession:
    """A model, its pools and its loop, assembled.

    Attributes:
      config: MaxText's configuration, as the model was built from it. options: the ``paged_*`` ones.
      model: the bound model. control, runtime, driver: the loop over it.
      backend: which attention kernels run, and why. decode: how decode rows are dispatched.
      pool: how many pages, and why.
      max_num_seqs: requests that run at once.
    """

    config: Any
    options: PagedOptions
    model: MaxTextPagedModel
    control: ControlPlane
    runtime: PagedRuntime
    driver: PagedDriver
    backend: BackendChoice
    decode: DecodeDispatch
    pool: PoolSize
    max_num_seqs: int

    def update_params(self, params: Any) -> None:
        """Exchange the weights: scanned or not, however sharded. Nothing compiles.

        Raises:
          KvCacheError: requests are under way; their K/V is the old weights', and would be read by the new.
        """
        if self.driver.scheduler.has_work:
            scheduler = self.driver.scheduler
            raise KvCacheError(
                f"{scheduler.num_running} requests run and {scheduler.num_waiting} wait: finish or cancel them before "
                "update_params"
            )
        params, namespace = params_from_tree(self.model, params), None
        if self.control.prefix_index is not None:
            revision = self.runtime.params_revision + 1
            namespace = prefix_namespace(self.model, self.options, params, revision=revision)
        cleared = self.runtime.update_params(params, prefix_namespace=namespace)
        if cleared:
            logger.info("update_params: %d cached pages of the old weights were forgotten", cleared)

    def reset_prefix_cache(self) -> int:
        """Forget every cached page. Running requests keep theirs. Returns how many pages the cache held."""
        cleared = self.runtime.reset_prefix_cache()
        logger.info("prefix cache: %s, %d pages forgotten", _on_or_off(self.control), cleared)
        return cleared

    @property
    def asleep(self) -> bool:
        """Whether ``sleep`` gave the pools back."""
        # Not whether arrays are deleted: a step's old pools are, in the moment before the new ones take their place.
        return not self.runtime.has_pools

    def sleep(self) -> int:
        """Give the pools' memory back until ``wake``; cached pages are forgotten, weights stay. Returns the bytes.

        Raises:
          KvCacheError: requests are under way; their K/V would be lost.
        """
        scheduler = self.driver.scheduler
        if scheduler.has_work:
            raise KvCacheError(
                f"{scheduler.num_running} requests run and {scheduler.num_waiting} wait: finish or cancel them before "
                "sleep"
            )
        self.driver.settle()
        self.runtime.reset_prefix_cache()
        self.runtime.drop_pools()
        return self.model.total_pool_bytes()

    def wake(self) -> None:
        """Take the pools' memory again, after ``sleep``. Nothing compiles."""
        if self.asleep:
            self.runtime.pools = self.model.create_pools()

    def set_rng(self, rng: Any) -> None:
        """Sample from another run key (``jax.random.key`` or ``PRNGKey``) from the next step on; no step recompiles."""
        self.runtime.run_key = run_key(rng, self.model.mesh)

    def num_native_products(self) -> int:
        """Matrix products that our kernel has computed in this process so far, warm-up included."""
        return num_native_products()

    def close(self) -> None:
        """Give the pools' memory back. Weights may be the caller's and are only let go; no step runs any more."""
        self.runtime.drop_pools()


_NO_WEIGHTS = bytes(32)
"""The namespace of a cache before its weights are there: nothing is kept under it."""


def prefix_namespace(model: MaxTextPagedModel, options: PagedOptions, params: Any, *, revision: int) -> bytes:
    """The digest under which a session with these weights caches pages."""
    config = model.config
    tokenizer = f"{config.tokenizer_type} {config.tokenizer_path}"
    return cache_namespace(model, options, params, revision=revision, tokenizer=tokenizer).digest()


def _on_or_off(control: ControlPlane) -> str:
    digest = control.prefix_namespace
    return "off" if digest is None else f"on, namespace {digest.hex()[:12]}"


def run_key(rng: Any, mesh: Mesh) -> jax.Array:
    """A run key in the one form that the step program is fed: typed, and on every device of the mesh.

    In another form each program would compile again. None is key 0.
    """
    key = jax.random.key(0) if rng is None else jnp.asarray(rng)
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.wrap_key_data(key)
    # By its words: a key that lives on one device cannot be put on another process's, an array of the host can.
    replicated = NamedSharding(mesh, PartitionSpec())
    words = jax.device_put(np.asarray(jax.random.key_data(key)), replicated)
    return jax.jit(partial(jax.random.wrap_key_data, impl=jax.random.key_impl(key)), out_shardings=replicated)(words)


def open_session(config: Any, *, mesh: Mesh | None = None, params: Any = None, rng: Any = None) -> PagedSession:
    """Assemble everything; logs one INFO line that says what was allocated and what decided it.

    Args:
      config: MaxText's configuration with ``attention=gpu_paged``.
      mesh: devices to use; by default MaxText's mesh over all of them.
      params: weights (an ``nnx.State`` or mapping, scanned or not); by default ``load_parameters_path``'s.
      rng: the run key of sampling (``jax.random.key`` or ``PRNGKey``).

    Raises:
      ConfigError, UnsupportedError: by name, before anything large is allocated.
    """
    return start_session(assemble(config, mesh=mesh), params=params, rng=rng)


@collector_paused()
def start_session(
    assembly: PagedAssembly, *, params: Any = None, rng: Any = None, first_step_tokens: int = 0
) -> PagedSession:
    """Load weights, and beside that allocate pools and start the loop; arguments as in ``open_session``.

    Args:
      first_step_tokens: of the first step, where somebody knows: its program is obtained while weights load.
    """
    options, model = assembly.options, assembly.model
    max_num_seqs, max_model_len = assembly.max_num_seqs, int(assembly.config.max_target_length)
    check_agreement(model.mesh, _agreed(assembly))
    load = prepare_params(model) if params is None else None  # what does not fit is found before pools are made
    if params is not None:
        params = params_from_tree(model, params)
    control = ControlPlane(
        model.layout,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        token_ladder=token_ladder(options.paged_max_num_batched_tokens),
        prefix_namespace=_NO_WEIGHTS if options.paged_enable_prefix_cache else None,
        window_groups=model.window_groups,
    )
    _log_pools(assembly)
    make_runtime = partial(
        PagedRuntime,
        model,
        control=control,
        run_key=run_key(rng, model.mesh),
        backend=assembly.backend.name,
        decode=assembly.decode,
        context_ladder=context_ladder(assembly.backend.backend, max_model_len),
        poison_on_free=options.paged_poison_on_free,
    )
    if load is None:
        runtime = make_runtime(params=params)
    else:
        with ThreadPoolExecutor(1, thread_name_prefix="load-params") as loader:
            loading = loader.submit(load)
            runtime = make_runtime(params=model.abstract_params)
            if first_step_tokens:
                runtime.compile_step(min(first_step_tokens, control.token_ladder.top))
            runtime.params = loading.result()
    if options.paged_enable_prefix_cache:
        control.reset_prefix_cache(prefix_namespace(model, options, runtime.params, revision=0))
    logger.info("prefix cache: %s", _on_or_off(control))
    scheduler = Scheduler(
        control,
        max_num_batched_tokens=options.paged_max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        prefill_chunk_tokens=options.paged_prefill_chunk_tokens or None,
        release=runtime.release,
    )
    driver = PagedDriver(runtime, scheduler, check=options.paged_check_invariants, ahead=options.paged_async_scheduling)
    return PagedSession(
        config=assembly.config,
        options=options,
        model=model,
        control=control,
        runtime=runtime,
        driver=driver,
        backend=assembly.backend,
        decode=assembly.decode,
        pool=assembly.pool,
        max_num_seqs=max_num_seqs,
    )


def _agreed(assembly: PagedAssembly) -> dict[str, int]:
    """What every process of a run must have decided alike: their steps are one program's."""
    options, model, layout = assembly.options, assembly.model, assembly.model.layout
    return {
        "paged_num_pages": layout.num_pages,
        "paged_tokens_per_page": layout.tokens_per_page,
        "paged_max_num_seqs": assembly.max_num_seqs,
        "paged_max_num_batched_tokens": options.paged_max_num_batched_tokens,
        "paged_kv_dtype": list(ELEMENT_BITS).index(layout.dtype),
        "paged_prefill_chunk_tokens": options.paged_prefill_chunk_tokens,
        "paged_enable_prefix_cache": int(options.paged_enable_prefix_cache),
        "paged_backend": KNOWN_BACKENDS.index(assembly.backend.name),
        "max_target_length": int(assembly.config.max_target_length),
        **{f"pages of window {group.window}": group.layout.num_pages for group in model.window_groups},
    }


def _log_pools(assembly: PagedAssembly) -> None:
    model, layout = assembly.model, assembly.model.layout
    max_model_len = int(assembly.config.max_target_length)
    logger.info(
        "KV pool: %d pages of %d tokens, %d layers, %s, %.1f MiB a device, %.1f MiB in all, beside %.1f MiB of "
        "split-KV workspace and %.1f MiB of weights a device (%s)",
        layout.num_pages,
        layout.tokens_per_page,
        layout.num_layers,
        described(layout.dtype),
        layout.device_pool_bytes() / 2**20,
        layout.total_pool_bytes() / 2**20,
        assembly.pool.workspace_bytes / 2**20,
        assembly.pool.weight_bytes / 2**20,
        assembly.pool.reason,
    )
    for group in model.window_groups:
        logger.info("KV pool beside it: %s", describe_group(group))
    if layout.num_slots < max_model_len:
        logger.warning(
            "the pool holds %d tokens, max_target_length=%d: longer requests are refused when they are submitted",
            layout.num_slots,
            max_model_len,
        )
