"""The cache namespace of a session: what its K/V depends on, read off what it runs.

For:        the digest under which a session's pages are cached.
Not for:    the namespace itself (kv_common) or the cache (kv_control).
May import: kv_common, jax, maxtext_paged.
"""

from __future__ import annotations

import hashlib
from typing import Any

import jax
import numpy as np

from kv_common.namespace import CacheNamespace, Identity, encode
from maxtext_paged.config import PagedOptions
from maxtext_paged.model import MaxTextPagedModel

SAMPLED_ELEMENTS = 64
"""Elements of every shard of every weight that enter the fingerprint."""

_POSITIONS = ("rope", "rotary", "yarn", "position", "original_max", "beta_", "mscale", "partial_rotary", "nope")
"""Parts of the names of MaxText's options that positions depend on; a new one is taken in by its name."""


def cache_namespace(
    model: MaxTextPagedModel, options: PagedOptions, params: Any, *, revision: int, tokenizer: str
) -> CacheNamespace:
    """The namespace of a model with these weights.

    Args:
      revision: how often the weights were exchanged. The cache lives in this process and is emptied at every exchange,
        so fingerprint and revision are a second line of defence.
      tokenizer: which tokenizer makes the tokens.
    """
    layout, config = model.layout, model.config
    return CacheNamespace(
        weights=weights_fingerprint(params),
        weights_revision=revision,
        tokenizer=tokenizer,
        tenant=options.paged_tenant or None,
        rope=rope_identity(config),
        kv_dtype=layout.dtype,
        quantization=(str(getattr(config, "quantization", "") or ""), np.dtype(config.dtype).name),
        layout=(model.num_layers, layout.tokens_per_page, layout.num_kv_heads, layout.head_dim),
        sharding=(tuple((axis, model.mesh.shape[axis]) for axis in model.head_axes), layout.pool_replicas),
    )


def rope_identity(config: Any) -> Identity:
    """Every option of MaxText that changes how a position is rotated, by name."""
    keys = config.get_keys()
    chosen = sorted(name for name in keys if any(part in name for part in _POSITIONS))
    # Tables are made for the whole context, so its length may select the regime of a scaled RoPE.
    return tuple((name, repr(keys[name])) for name in [*chosen, "max_target_length"])


def weights_fingerprint(params: Any) -> str:
    """A digest of every weight's path, shape and dtype, and of elements sampled evenly over each of its shards.

    Reads ``SAMPLED_ELEMENTS`` per shard instead of whole models, and compiles one gather per shape. Two sets of
    weights of one model that agree in all of them are told apart by ``weights_revision``.
    """
    whole = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        whole.update(encode((jax.tree_util.keystr(path), str(leaf.shape), str(leaf.dtype))))
        shards = leaf.addressable_shards if isinstance(leaf, jax.Array) else ()
        for data in [shard.data for shard in shards if shard.replica_id == 0] or [leaf]:
            where = np.linspace(0, max(data.size - 1, 0), num=min(SAMPLED_ELEMENTS, data.size), dtype=np.int64)
            sampled = data[np.unravel_index(where, data.shape)] if data.ndim else data
            whole.update(np.asarray(sampled).tobytes())
    return whole.hexdigest()
