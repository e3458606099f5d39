"""A session's namespace: whatever changes its K and V changes the digest, and nothing else does."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import pytest

from kv_common.namespace import CacheNamespace
from maxtext_paged.assembly import assemble
from maxtext_paged.namespace import cache_namespace, rope_identity, weights_fingerprint
from tests.tiny_models import dense_model, make_config, make_mesh

pytestmark = pytest.mark.maxtext

POOL = {"paged_num_pages": 8, "paged_tokens_per_page": 8}


@functools.cache
def namespace(revision: int = 0, tokenizer: str = "t", devices: int = 1, **overrides: Any) -> CacheNamespace:
    config = make_config("llama2", **{**POOL, **overrides})
    assembly = assemble(config, mesh=make_mesh(config, jax.devices()[:devices]))
    params = dense_model().params
    return cache_namespace(assembly.model, assembly.options, params, revision=revision, tokenizer=tokenizer)


def test_the_same_session_twice_has_one_digest() -> None:
    again = namespace.__wrapped__()
    assert again is not namespace() and again.digest() == namespace().digest()


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"revision": 1}, "weights_revision"),
        ({"tokenizer": "u"}, "tokenizer"),
        ({"paged_tenant": "a"}, "tenant"),
        ({"rope_max_timescale": 500_000}, "rope"),
        ({"paged_kv_dtype": "bfloat16"}, "kv_dtype"),
        ({"paged_kv_dtype": "int8"}, "kv_dtype"),
        ({"paged_tokens_per_page": 16}, "layout"),
    ],
    ids=lambda value: str(value),
)
def test_what_changes_kv_changes_its_own_field_and_the_digest(change: dict[str, Any], field: str) -> None:
    other = namespace(**change)
    assert other.digest() != namespace().digest()
    assert getattr(other, field) != getattr(namespace(), field)


@pytest.mark.slow
@pytest.mark.parametrize(
    "change", [{"paged_num_pages": 9}, {"paged_max_num_seqs": 3}, {"paged_file_order": "input"}], ids=str
)
def test_what_does_not_change_kv_leaves_the_digest(change: dict[str, Any]) -> None:
    assert namespace(**change).digest() == namespace().digest()


@pytest.mark.multi_device
def test_another_sharding_is_another_namespace() -> None:
    sharded = namespace(devices=2, ici_tensor_parallelism=2)
    assert sharded.sharding != namespace().sharding and sharded.digest() != namespace().digest()


def test_other_weights_of_the_same_shapes_have_another_fingerprint_and_so_has_a_renamed_leaf() -> None:
    params = {"a": np.arange(40.0, dtype=np.float32).reshape(5, 8), "b": np.ones(3, np.float32)}
    base = weights_fingerprint(params)
    assert base == weights_fingerprint(jax.tree.map(jax.numpy.asarray, params))
    changed = params["a"].copy()
    changed[2, 3] += 1e-6
    assert (
        len(
            {
                base,
                weights_fingerprint({**params, "a": changed}),
                weights_fingerprint({"a": params["a"], "c": params["b"]}),
            }
        )
        == 3
    )


def test_every_rope_option_of_maxtext_is_part_of_the_regime() -> None:
    config = make_config("llama2")
    names = {name for name, _ in rope_identity(config)}
    rope = {name for name in config.get_keys() if "rope" in name or "yarn" in name}
    assert rope and rope <= names
    assert "max_target_length" in names
