"""Weights into a bound model: restored straight into their sharding, unscanned, in compute dtype.

For:        ``load_parameters_path``, parameters handed over by a trainer, and random weights for tests.
Not for:    converting other formats (convert/) or quantised checkpoints (refused).
May import: kv_common, jax, flax, orbax, maxtext_paged.unscan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path as FilePath
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from flax import nnx
from flax.core.spmd import logical_axis_rules
from jax.sharding import NamedSharding, PartitionSpec
from maxtext.common.common_types import MODEL_MODE_PREFILL
from maxtext.utils import model_creation_utils

from kv_common.errors import ConfigError
from maxtext_paged.model import MaxTextPagedModel
from maxtext_paged.unscan import Path, StackedSource, is_scanned, locate


def load_params(model: MaxTextPagedModel, rng_seed: int | None = None) -> nnx.State:
    """The weights a configuration asks for: its checkpoint, or random ones without ``load_parameters_path``."""
    return prepare_params(model, rng_seed)()


def prepare_params(model: MaxTextPagedModel, rng_seed: int | None = None) -> Callable[[], nnx.State]:
    """What loads the weights a configuration asks for, once called; whether they fit is found out now.

    Raises:
      ConfigError: as ``restore_params``, before anything large is read or allocated.
    """
    path = model.config.load_parameters_path
    return _prepare_restore(model, path) if path else partial(init_params, model, rng_seed)


def init_params(model: MaxTextPagedModel, seed: int | jax.Array | None = None) -> nnx.State:
    """Random weights as MaxText initialises them, created under their sharding; ``seed`` may be a key."""
    config = model.config
    key = seed if isinstance(seed, jax.Array) else None
    if key is None:
        key = jax.random.PRNGKey(config.init_weights_seed if seed is None else seed)
    create = model_creation_utils.get_nnx_create_model_fn(
        config, mesh=model.mesh, model_mode=MODEL_MODE_PREFILL, rng_key=key, quant_mode_str="train"
    )

    def weights() -> nnx.State:
        with logical_axis_rules(config.logical_axis_rules):
            state = nnx.state(create(), nnx.Param)
        return jax.tree.map(lambda leaf, held: leaf.astype(held.dtype), state, model.abstract_params)

    shardings = jax.tree.map(lambda leaf: leaf.sharding, model.abstract_params)
    return jax.jit(weights, out_shardings=shardings)()


def restore_params(model: MaxTextPagedModel, checkpoint: str) -> nnx.State:
    """Restore an Orbax checkpoint (Linen or NNX layout, scanned or not) straight into its sharding.

    Raises:
      ConfigError: nothing readable is there, or parameters are missing or shaped otherwise; all are named.
    """
    return _prepare_restore(model, checkpoint)()


def _prepare_restore(model: MaxTextPagedModel, checkpoint: str) -> Callable[[], nnx.State]:
    directory = FilePath(checkpoint).expanduser().resolve()
    checkpointer = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
    try:
        metadata = checkpointer.metadata(str(directory))
        tree = metadata.item_metadata.tree if metadata is not None and metadata.item_metadata is not None else None
    except (FileNotFoundError, ValueError, NotImplementedError) as error:
        raise ConfigError(
            f"load_parameters_path={checkpoint}: no Orbax checkpoint can be read there ({error})"
        ) from None
    if not tree:
        raise ConfigError(
            f"load_parameters_path={checkpoint}: no Orbax checkpoint there; name the folder that holds the items, "
            "for example .../0/items"
        )
    stored = {_plain(path): (path, leaf) for path, leaf in _leaves(tree)}
    sources, shapes = _sources(model, {path: leaf for path, (_, leaf) in stored.items()})
    targets: dict[Path, jax.ShapeDtypeStruct] = {}
    for path, source in sources.items():
        held = _abstract(model)[path]
        sharding = held.sharding if source.index is None else _stacked_sharding(model, held)
        targets[source.path] = jax.ShapeDtypeStruct(shapes[source.path], held.dtype, sharding=sharding)
    item: dict[str, Any] = {}
    for path, target in targets.items():
        _put(item, stored[path][0], target)

    def restore() -> nnx.State:
        restored = checkpointer.restore(
            str(directory),
            item=item,
            transforms={},
            restore_args=ocp.checkpoint_utils.construct_restore_args(item),
        )
        arrays = {_plain(path): leaf for path, leaf in _leaves(restored)}
        return _assemble(model, sources, arrays)

    return restore


def params_from_tree(model: MaxTextPagedModel, params: Any) -> nnx.State:
    """A trainer's parameters, scanned or not and however sharded, as this model's weights. Compiles nothing new
    when repeated.

    Args:
      params: an ``nnx.State``, or a (possibly Linen-style nested) mapping of arrays.
    """
    if isinstance(params, nnx.State):
        params = nnx.to_pure_dict(params)
    arrays = {_plain(path): leaf for path, leaf in _leaves(params)}
    sources, _ = _sources(model, arrays)
    return _assemble(model, sources, arrays)


def _abstract(model: MaxTextPagedModel) -> dict[Path, jax.ShapeDtypeStruct]:
    return {tuple(map(str, path)): leaf.get_value() for path, leaf in nnx.to_flat_state(model.abstract_params)}


def _leaves(tree: Any, prefix: Path = ()) -> list[tuple[Path, Any]]:
    if isinstance(tree, Mapping):
        return [leaf for key, value in tree.items() for leaf in _leaves(value, (*prefix, str(key)))]
    return [] if tree is None else [(prefix, tree)]


def _plain(path: Path) -> Path:
    """A checkpoint's path without the wrappers of its layout (``params.params``, ``base``, ``.value``)."""
    while path[:1] in (("params",), ("base",)):
        path = path[1:]
    return path[:-1] if path[-1:] == ("value",) else path


def _put(tree: dict[str, Any], path: Path, leaf: Any) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = leaf


def _sources(
    model: MaxTextPagedModel, leaves: Mapping[Path, Any]
) -> tuple[dict[Path, StackedSource], dict[Path, tuple[int, ...]]]:
    """For each parameter of the model, where it is; everything missing, misshapen or quantised is refused at once.

    Args:
      leaves: whatever has a shape and a dtype, by path.

    Returns:
      The places, and the shape of each leaf.
    """
    shapes = {path: tuple(leaf.shape) for path, leaf in leaves.items()}
    axis = int(model.config.param_scan_axis)
    num_layers = int(model.config.num_decoder_layers)
    found = locate(shapes, num_layers) if is_scanned(shapes) else {path: StackedSource(path, None) for path in shapes}
    problems = []
    sources = {}
    for path, held in _abstract(model).items():
        name = ".".join(path)
        source = found.get(path)
        if source is None:
            problems.append(f"{name} is missing")
            continue
        shape = shapes[source.path]
        expected = held.shape
        if source.index is not None:
            expected = (*expected[:axis], shape[axis] if axis < len(shape) else -1, *expected[axis:])
            if axis < len(shape) and source.index >= shape[axis]:
                problems.append(f"{name} is index {source.index} of only {shape[axis]} stacked layers")
                continue
        if shape != tuple(expected):
            problems.append(f"{name} has shape {shape}, the model needs {tuple(expected)}")
            continue
        if _is_quantised(dtype := jnp.dtype(leaves[source.path].dtype)):
            problems.append(f"{name} holds {dtype.name}: quantised weights are not loaded")
            continue
        sources[path] = source
    if problems:
        more = f" (and {len(problems) - 6} more)" if len(problems) > 6 else ""
        raise ConfigError("the parameters do not fit the model: " + "; ".join(problems[:6]) + more)
    return sources, shapes


def _is_quantised(dtype: Any) -> bool:
    """Whether numbers of this dtype mean something only together with a scale, which is not read here."""
    return not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize < 2


def _stacked_sharding(model: MaxTextPagedModel, held: jax.ShapeDtypeStruct) -> NamedSharding:
    """Sharding of a stacked array: its layers' own, with the scan axis unsharded."""
    axis = int(model.config.param_scan_axis)
    spec = list(held.sharding.spec) + [None] * (len(held.shape) - len(held.sharding.spec))
    spec.insert(axis, None)
    return NamedSharding(model.mesh, PartitionSpec(*spec))


def _assemble(model: MaxTextPagedModel, sources: dict[Path, StackedSource], arrays: dict[Path, Any]) -> nnx.State:
    axis = int(model.config.param_scan_axis)
    abstract = _abstract(model)
    values = {}
    for path, source in sources.items():
        held = abstract[path]
        array = arrays[source.path]
        if source.index is not None:
            array = (
                jnp.take(array, source.index, axis=axis)
                if isinstance(array, jax.Array)
                else array.take(source.index, axis)
            )
        values[path] = jax.device_put(array if array.dtype == held.dtype else array.astype(held.dtype), held.sharding)
    state = jax.tree.map(lambda leaf: leaf, model.abstract_params)
    flat = nnx.to_flat_state(state)
    for path, variable in flat:
        variable.set_value(values[tuple(map(str, path))])
    return nnx.from_flat_state(flat)
