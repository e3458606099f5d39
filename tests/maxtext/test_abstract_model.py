"""A model that is built for its shapes alone is MaxText's own, and costs no more the more layers it has."""

from __future__ import annotations

import jax
import pytest
from flax import nnx
from flax.core.spmd import logical_axis_rules
from jax._src.interpreters import partial_eval
from maxtext.utils import model_creation_utils

from maxtext_paged.binding import attention_modules
from maxtext_paged.geometry import abstract_model, model_geometry
from maxtext_paged.model import MaxTextPagedModel
from tests.tiny_models import make_config, make_mesh

pytestmark = pytest.mark.maxtext


@pytest.fixture
def retold(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each time that jax walked all equations of a trace for the text of an error."""
    found: list[int] = []
    walk = partial_eval.JaxprStackFrame.find_progenitors

    def counted(frame: object, tracer: object) -> object:
        found.append(1)
        return walk(frame, tracer)

    monkeypatch.setattr(partial_eval.JaxprStackFrame, "find_progenitors", counted)
    return found


def described(model: nnx.Module) -> dict[str, tuple[object, ...]]:
    """Type, shape, dtype and logical axes of every variable but the random streams."""
    return {
        ".".join(map(str, path)): (
            type(variable),
            variable.get_value().shape,
            variable.get_value().dtype,
            variable.get_metadata().get("out_sharding"),
        )
        for path, variable in nnx.to_flat_state(nnx.state(model))
        if not isinstance(variable, nnx.RngState)
    }


def test_the_abstract_model_is_maxtexts_own(retold: list[int]) -> None:
    config = make_config("gemma2")
    mesh = make_mesh(config)
    with logical_axis_rules(config.logical_axis_rules):
        ours = abstract_model(config, mesh)
        by_ours = len(retold)
        theirs = nnx.eval_shape(
            model_creation_utils.get_nnx_create_model_fn(
                config, mesh=mesh, model_mode="prefill", quant_mode_str="train"
            )
        )
    # Four by each dense cache, which MaxText fills as it is built; otherwise twice by each key that is drawn, too.
    assert by_ours <= 4 * len(attention_modules(ours)) < (len(retold) - by_ours) / 2
    assert described(ours) == described(theirs) != {}


@pytest.mark.slow
def test_a_geometrys_model_is_bound_as_it_is_and_stays_unbound() -> None:
    from kv_execution.attention.reference import ReferenceBackend

    config = make_config()
    mesh = make_mesh(config)
    geometry = model_geometry(config, mesh)
    before = described(geometry.model)
    layout = geometry.layout(mesh, num_pages=4, tokens_per_page=8, dtype="float32")
    options = {"layout": layout, "head_axes": (), "backend": ReferenceBackend()}
    given = MaxTextPagedModel(config, mesh, **options, model=geometry.model)
    built = MaxTextPagedModel(config, mesh, **options)
    assert described(geometry.model) == before
    assert jax.tree.structure(given.abstract_params) == jax.tree.structure(built.abstract_params)
    assert jax.tree.leaves(given.abstract_params) == jax.tree.leaves(built.abstract_params)
    assert given.layer_names == built.layer_names
    assert nnx.to_flat_state(given._pools).paths == nnx.to_flat_state(built._pools).paths
