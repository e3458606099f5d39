"""Engines that several test files share; each is built once per process.

jax may not be imported before tests/conftest.py has chosen its devices, so everything is imported inside.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from maxtext_paged import OfflineEngine, PagedMaxEngine

OPTIONS = {
    "paged_tokens_per_page": 8,
    "paged_num_pages": 40,
    "paged_max_num_seqs": 8,
    "paged_max_num_batched_tokens": 32,
    "paged_check_invariants": True,
    "paged_poison_on_free": True,
}
"""Five pages hold the context of 64; a step has room for one short prompt and some decodes."""


@pytest.fixture(scope="session")
def engine_options() -> dict[str, Any]:
    return dict(OPTIONS)


@pytest.fixture(scope="session")
def offline_engine() -> Iterator[OfflineEngine]:
    """Tiny llama2, the weights of ``dense_model()``; token 1 is its tokenizer's end, 2 its caller's."""
    from maxtext_paged import OfflineEngine
    from tests.tiny_models import dense_model, make_config, make_mesh

    class Tokenizer:
        eos_id = 1

        def encode(self, text: str) -> list[int]:
            return [ord(letter) % 256 for letter in text]

        def decode(self, ids: list[int]) -> str:
            return "".join(map(chr, ids))

    config = make_config(**OPTIONS)
    engine = OfflineEngine(
        config, params=dense_model().params, tokenizer=Tokenizer(), eos_ids=[2], mesh=make_mesh(config)
    )
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def max_engine() -> Iterator[PagedMaxEngine]:
    """Tiny llama2 behind ``MaxEngine``'s entry points, started, on one device."""
    import jax

    from maxtext_paged import PagedMaxEngine
    from tests.tiny_models import dense_model, make_config

    engine = PagedMaxEngine(make_config(**OPTIONS), jax.devices()[:1])
    engine.init_paged_runtime(engine.load_params(params=dense_model().params))
    yield engine
    engine.session.close()
