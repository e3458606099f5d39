"""The rows of one ``batch_inference`` call: MaxText's inputs, read one at a time.

For:        turning whatever callers pass into rows, with each row's own settings; a row that cannot be read is
            set aside with the reason.
Not for:    running them (worker.py) or rows of a file (intake.py).
May import: numpy, kv_common, kv_control, maxtext_paged; MaxText's ``InputData``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kv_common.errors import RequestError
from kv_control.logit_options import NO_LOGIT_OPTIONS
from kv_control.plan import SamplingSpec
from maxtext_paged.imports import import_dense_engine
from maxtext_paged.rows import MAX_SAMPLES, Row, RowResult, row_seed
from maxtext_paged.tokenizer import as_token_ids

InputData = import_dense_engine().InputData

PerRow = Any | Sequence[Any]
"""One value for all rows, or a sequence or array with one for each; None is the default."""


class BatchRows:
    """Iterate once, for every row that can run.

    Attributes:
      unreadable: results of rows that no prompt could be made of; complete once the iteration is.
    """

    def __init__(
        self,
        data: Iterable[Any],
        *,
        defaults: SamplingSpec,
        max_tokens: PerRow = None,
        min_tokens: PerRow = None,
        ignore_eos: bool = False,
        sampling: PerRow = None,
        seed: PerRow = None,
        n: int = 1,
        options: PerRow = None,
        stop: str | Sequence[str] = (),
    ) -> None:
        """Check what concerns the call as a whole; arguments and errors as in ``OfflineEngine.batch_inference``.

        Args:
          defaults: sampling where a row is silent.
        """
        self.unreadable: list[RowResult] = []
        self._items = list(data)
        self._ids = [item.id if isinstance(item, InputData) else place for place, item in enumerate(self._items)]
        _check_unique(self._ids)
        self._defaults = defaults
        self._ignore_eos = ignore_eos
        if type(n) is not int or not 1 <= n <= MAX_SAMPLES:
            raise ValueError(f"n={n!r}: must be a whole number in 1..{MAX_SAMPLES}")
        self._n = n
        self._stop = (stop,) if isinstance(stop, str) else tuple(stop)
        if any(not isinstance(text, str) or not text for text in self._stop):
            raise ValueError(f"stop={stop!r}: must be strings of at least one character")
        self._max_tokens = self._per_row("max_tokens", max_tokens, operator.index)
        self._min_tokens = self._per_row("min_tokens", min_tokens, operator.index)
        self._seeds = self._per_row("seed", seed, operator.index)
        self._sampling = self._per_row("sampling", sampling, _without_seed)
        self._options = self._per_row("options", options, lambda given: given)

    def __len__(self) -> int:
        """Rows of the call, readable or not."""
        return len(self._items)

    def __iter__(self) -> Iterator[Row]:
        for place, item in enumerate(self._items):
            try:
                tokens = _tokens(item)
            except RequestError as error:
                self._set_aside(place, str(error))
                continue
            except Exception as error:  # whatever an object does when it is read is that row's fault alone
                self._set_aside(place, f"the row cannot be read: {type(error).__name__}: {error}")
                continue
            yield Row(
                index=place,
                id=self._ids[place],
                tokens=tokens,
                max_tokens=self._max_tokens[place],
                min_tokens=self._min_tokens[place] or 0,
                sampling=replace(self._sampling[place] or self._defaults, seed=row_seed(self._seeds[place], place)),
                ignore_eos=self._ignore_eos,
                want_prompt_logprobs=True,
                n=self._n,
                options=self._options[place] or NO_LOGIT_OPTIONS,
                stop=self._stop,
            )

    def _set_aside(self, place: int, error: str) -> None:
        row = Row(index=place, id=self._ids[place], tokens=np.zeros(0, np.int32))
        self.unreadable.append(RowResult.refused(row, error))

    def _per_row(self, name: str, value: PerRow, checked: Callable[[Any], Any]) -> list[Any]:
        if isinstance(value, Sequence | np.ndarray):
            if len(value) != len(self):
                raise ValueError(f"{name} has {len(value)} values for {len(self)} rows")
            return [None if one is None else checked(one) for one in value]
        return [None if value is None else checked(value)] * len(self)


def _tokens(item: Any) -> NDArray[np.int64]:
    """A row's prompt, int64 ``[n]``.

    Raises:
      RequestError: it is none.
    """
    if not isinstance(item, InputData):
        return np.asarray(as_token_ids(item), np.int64)
    tokens, length = np.asarray(item.tokens), operator.index(item.true_length)
    if tokens.ndim == 2 and len(tokens) == 1:
        tokens = tokens[0]
    if tokens.ndim != 1 or not 0 <= length <= len(tokens):
        raise RequestError(f"true_length={length} does not fit tokens of shape {list(tokens.shape)}")
    return np.asarray(as_token_ids(tokens[:length]), np.int64)


def _without_seed(spec: SamplingSpec) -> SamplingSpec:
    if spec.seed:
        raise ValueError("SamplingSpec.seed is not read here: give `seed=`, one number or one per row")
    return spec


def _check_unique(ids: Sequence[Any]) -> None:
    """Outputs carry ids as text, so two that read alike are one."""
    seen: dict[str, Any] = {}
    for row_id in ids:
        if str(row_id) in seen:
            raise ValueError(f"All data ids must be unique: {seen[str(row_id)]!r} and {row_id!r} are the same as text")
        seen[str(row_id)] = row_id
