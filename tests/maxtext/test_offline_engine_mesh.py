"""Both entry points on a mesh of their caller's choice: tensor=2 x fsdp=2 on four of eight devices."""

from __future__ import annotations

from typing import Any

import jax
import pytest

from kv_control.plan import SamplingSpec
from maxtext_paged import OfflineEngine, PagedMaxEngine
from tests.completions import PROMPTS, as_request, assert_whole, token_lists
from tests.parity import assert_teacher_forced
from tests.tiny_models import dense_model, make_config, make_mesh

pytestmark = [pytest.mark.maxtext, pytest.mark.multi_device, pytest.mark.slow]

AXES = {"ici_tensor_parallelism": 2, "ici_fsdp_parallelism": 2}


def test_the_offline_engine_uses_the_given_mesh_and_one_form_of_key(engine_options: dict[str, Any]) -> None:
    config = make_config(**engine_options, **AXES)
    mesh = make_mesh(config, jax.devices()[2:6])
    engine = OfflineEngine(config, params=dense_model().params, eos_ids=[], mesh=mesh, rng=jax.random.PRNGKey(3))
    assert engine.mesh is mesh
    outputs = engine.batch_inference(PROMPTS, max_tokens=6)
    assert_whole(outputs)
    assert_teacher_forced([as_request(output) for output in outputs], dense_model(), relative=2e-5)
    for leaf in [*jax.tree.leaves(engine.params), *jax.tree.leaves(engine.session.runtime.pools)]:
        assert leaf.sharding.device_set == set(jax.devices()[2:6])
    compiled = engine.session.runtime.metrics().compiled["paged_step"]
    sampled = {"max_tokens": 6, "sampling": SamplingSpec(temperature=1.0)}
    # A key that lives on another device, as one does that comes out of a caller's own program.
    first = engine.batch_inference(PROMPTS, rng=jax.device_put(jax.random.key(5), jax.devices()[7]), **sampled)
    again = engine.batch_inference(PROMPTS, rng=jax.random.PRNGKey(5), **sampled)
    assert token_lists(first) == token_lists(again)
    assert engine.session.runtime.metrics().compiled["paged_step"] == compiled


def test_the_max_engine_uses_the_given_devices(engine_options: dict[str, Any]) -> None:
    engine = PagedMaxEngine(make_config(**engine_options, **AXES), jax.devices()[4:])
    params = engine.load_params(params=dense_model().params)
    engine.init_paged_runtime(params)
    assert all(leaf.sharding.device_set == set(jax.devices()[4:]) for leaf in jax.tree.leaves(params))
    request, *_ = engine.prefill_paged(PROMPTS[2], max_tokens=4, return_prompt_logp=True)
    while engine.generate_paged():
        pass
    assert request.num_generated == 4
    assert_teacher_forced([request], dense_model(), relative=2e-5)
