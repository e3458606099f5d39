"""Whether MaxText's own dense offline engine can run in this process.

For:        refusing by name what would end, inside MaxText, in a hanging or killed process.
Not for:    running it.
May import: kv_common, jax, numpy, maxtext.
"""

from __future__ import annotations

import warnings

import jax
import numpy as np
from maxtext.inference.maxengine import maxengine

from kv_common.errors import UnsupportedError


def check_dense_engine(attention: str) -> None:
    """Refuse a dense configuration where MaxText 0.2.5's dense engine is known to fail.

    Raises:
      UnsupportedError: names what is missing, and the way out.
    """
    reasons = _obstacles()
    if reasons:
        raise UnsupportedError(
            f"attention={attention} runs MaxText's dense engine, which cannot run here: {'; '.join(reasons)}. "
            "Set attention=gpu_paged"
        )


def _obstacles() -> list[str]:
    """What stands in the dense engine's way, found by trying it."""
    found = []
    results = maxengine.engine_api.ResultTokens
    if jax.tree_util.treedef_is_leaf(jax.tree.structure(results(data=np.zeros(1)))):
        found.append("JetStream is not installed, and its stub cannot leave a jitted prefill")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            int(np.zeros(1))
        except TypeError:
            found.append(
                f"numpy {np.__version__} refuses int() of a one-element array, upon which its reader thread kills "
                "the process"
            )
    return found
