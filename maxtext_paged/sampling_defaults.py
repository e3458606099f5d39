"""MaxText's ``decode_sampling_*`` options as one ``SamplingSpec``.

For:        the default wherever a request is silent: batch_inference, the engine, the command.
Not for:    sampling itself (kv_execution.sampling) or a request's own settings.
May import: kv_common, kv_control.
"""

from __future__ import annotations

import math
from typing import Any

from kv_common.errors import ConfigError
from kv_control.plan import GREEDY, SamplingSpec

_USES_TOP_K = frozenset({"topk", "composite"})
_USES_TOP_P = frozenset({"nucleus", "composite"})
_STRATEGIES = frozenset({"greedy", "weighted"}) | _USES_TOP_K | _USES_TOP_P


def default_sampling(config: Any) -> SamplingSpec:
    """How a request is sampled that does not say so itself.

    ``decode_sampling_strategy`` says which of the other options count, as in MaxText: ``weighted`` looks at the
    temperature alone, ``topk`` and ``nucleus`` at one filter each, ``composite`` at both. MaxText's "off" values
    mean off here (0 or less for ``decode_sampling_top_k`` and ``decode_sampling_nucleus_p``), where its own
    sampler raises, and temperature 0 chooses the likeliest token, where its own divides by zero. One difference
    is on purpose: the temperature acts before the filters, as everywhere else in the field; MaxText applies it
    behind them, which matters to ``nucleus`` and ``composite`` at temperatures other than 1.

    Raises:
      ConfigError: the strategy is unknown, or a value is out of range.
    """
    # An enum in MaxText's configuration, a plain string in others'; compared here and nowhere else.
    strategy = str(getattr(config.decode_sampling_strategy, "value", config.decode_sampling_strategy))
    if strategy not in _STRATEGIES:
        raise ConfigError(f"decode_sampling_strategy={strategy!r}: must be one of {', '.join(sorted(_STRATEGIES))}")
    if strategy == "greedy":
        return GREEDY
    temperature = float(config.decode_sampling_temperature)
    if not 0 <= temperature < math.inf:
        raise ConfigError(f"decode_sampling_temperature={temperature}: must be at least 0 and finite")
    top_k = int(config.decode_sampling_top_k) if strategy in _USES_TOP_K else 0
    top_p = float(config.decode_sampling_nucleus_p) if strategy in _USES_TOP_P else 1.0
    if not top_p <= 1:
        raise ConfigError(f"decode_sampling_nucleus_p={top_p}: must be at most 1; 0 or -1 turn it off")
    return SamplingSpec(temperature=temperature, top_k=max(top_k, 0), top_p=top_p if top_p > 0 else 1.0)
