"""From a row of a file to a row of the loop: tokens, defaults, and the limits of one model.

For:        encoding, filling in the configured sampling, and refusing what this model can never run.
Not for:    the shape of a line (formats), or what the pool has room for (the scheduler says that at submit).
May import: the standard library, numpy, kv_common, kv_control, maxtext_paged.rows and formats.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from kv_common.errors import KvCacheError
from kv_control.logit_options import LogitOptions
from kv_control.plan import SamplingSpec
from maxtext_paged.formats import BadRow, InputRow, RowError
from maxtext_paged.row_limits import cannot_fit
from maxtext_paged.rows import Row, RowResult, row_seed


class Tokenizer(Protocol):
    """What a job needs of a tokenizer."""

    def encode(self, text: str) -> list[int]:
        """Ids of a raw prompt."""
        ...

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Ids of a chat."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Text of a whole sequence."""
        ...


@dataclass(frozen=True, slots=True)
class Intake:
    """Makes a ``Row`` of a line, or says why it cannot be one.

    Attributes:
      defaults: sampling where a row is silent.
      vocab_size: ids lie below it. max_model_len: most tokens of a prompt.
      repeated: ids that stand on several lines; each of those lines is refused.
    """

    tokenizer: Tokenizer
    defaults: SamplingSpec
    vocab_size: int
    max_model_len: int
    repeated: RepeatedIds | None = None

    def row(self, source: InputRow | BadRow) -> Row | BadRow:
        """The row to run. Whatever fails on the way fails this row only."""
        repeated = self.repeated.error(source.id, source.line) if self.repeated is not None else None
        if repeated is not None:
            return _bad(source, repeated)
        if isinstance(source, BadRow):
            return source
        count = cannot_fit(source.prompt, source.messages, self.max_model_len)
        if count is not None:
            message = f"the prompt has {count} characters, and the context holds {self.max_model_len} tokens"
            return _bad(source, RowError(message, "context_length_exceeded"))
        try:
            tokens = self._tokens(source)
        except KvCacheError as error:
            return _bad(source, RowError(str(error), "cannot_encode"))
        except Exception as error:  # a template or tokenizer that trips over one row must not end the job
            message = f"the tokenizer failed on this row: {type(error).__name__}: {error}"
            return _bad(source, RowError(message, "cannot_encode", "server_error"))
        beyond = self._beyond_limits(source, tokens)
        if beyond is not None:
            return _bad(source, beyond)
        return Row(
            index=source.index,
            id=source.id,
            tokens=np.asarray(tokens, np.int32),
            max_tokens=source.max_tokens,
            sampling=self._sampling(source),
            stop_token_ids=frozenset(source.stop_token_ids or ()),
            ignore_eos=bool(source.ignore_eos),
            min_tokens=source.min_tokens or 0,
            want_prompt_logprobs=bool(source.prompt_logprobs or (source.echo and source.logprobs)),
            n=source.n or 1,
            options=_logit_options(source),
            stop=(source.stop,) if isinstance(source.stop, str) else tuple(source.stop or ()),
            include_stop=bool(source.include_stop_str_in_output),
        )

    def _tokens(self, source: InputRow) -> list[int]:
        if source.tokens is not None:
            return source.tokens
        if source.messages is not None:
            return self.tokenizer.encode_chat(source.messages)
        return self.tokenizer.encode(source.prompt or "")

    def _beyond_limits(self, source: InputRow, tokens: list[int]) -> RowError | None:
        if not tokens:
            return RowError("the prompt has no tokens: a model needs at least one to continue", "empty_prompt")
        prompt = "prompt" if source.tokens is None else "tokens"
        bias = list(map(int, source.logit_bias or ()))
        for name, ids in ((prompt, tokens), ("stop_token_ids", source.stop_token_ids or ()), ("logit_bias", bias)):
            beyond = max(ids, default=0)
            if beyond >= self.vocab_size:
                return RowError(
                    f"{name}: id {beyond} is outside the vocabulary of {self.vocab_size}: was it made by another "
                    "model's tokenizer?",
                    "bad_value",
                )
        if (source.top_logprobs or 0) > self.vocab_size:
            return RowError(
                f"top_logprobs={source.top_logprobs}: the vocabulary has {self.vocab_size} tokens", "bad_value"
            )
        if len(tokens) > self.max_model_len:
            return RowError(
                f"the prompt has {len(tokens)} tokens, the context holds {self.max_model_len}: raise "
                "`max_target_length` or shorten the prompt",
                "context_length_exceeded",
            )
        return None

    def _sampling(self, source: InputRow) -> SamplingSpec:
        defaults = self.defaults
        return SamplingSpec(
            temperature=float(defaults.temperature if source.temperature is None else source.temperature),
            top_k=min(defaults.top_k if source.top_k is None else source.top_k, self.vocab_size),
            top_p=float(defaults.top_p if source.top_p is None else source.top_p),
            min_p=float(defaults.min_p if source.min_p is None else source.min_p),
            seed=row_seed(source.seed, source.index),
        )


def _logit_options(source: InputRow) -> LogitOptions:
    return LogitOptions(
        repetition_penalty=1.0 if source.repetition_penalty is None else float(source.repetition_penalty),
        presence_penalty=float(source.presence_penalty or 0),
        frequency_penalty=float(source.frequency_penalty or 0),
        logit_bias={int(token): float(bias) for token, bias in (source.logit_bias or {}).items() if bias},
        top_logprobs=source.top_logprobs or 0,
    )


def completion_text(tokenizer: Tokenizer, result: RowResult) -> str:
    """Text of a row's whole completion; the token that ended it stays out of it (and in the ids), and so does a stop
    string with all behind it."""
    if result.text is not None:
        return result.text
    ids = result.completion_ids
    return tokenizer.decode(ids[:-1].tolist() if result.finish_reason == "stop" else ids.tolist())


def _bad(source: InputRow | BadRow, error: RowError) -> BadRow:
    return BadRow(source.index, source.line, error, source.id)


# --- ids that stand more than once -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RepeatedIds:
    """Ids that several lines share. Whoever joins results by id could take one line's for another's: none of them runs.

    Attributes:
      lines: digest of an id to its first two lines and how many there are.
    """

    lines: dict[int, tuple[int, int, int]] = field(default_factory=dict)

    def error(self, row_id: str | int | None, line: int) -> RowError | None:
        """Why the row on ``line`` is refused, if its id is one of them."""
        found = self.lines.get(id_digest(row_id)) if row_id is not None and self.lines else None
        if found is None:
            return None
        first, second, count = found
        where = f"lines {first} and {second}"
        if count > 2:
            where = f"{count} lines, this one ({line}) among them, {first} and {second} the first"
        return RowError(f"id={json.dumps(row_id)[:80]} stands on {where}: ids must be unique", "duplicate_id")


class IdCheck:
    """Every row's id, in 12 bytes a row: finds those that repeat.

    >>> check = IdCheck()
    >>> for line, row_id in enumerate(["a", 1, "1", "a"], start=1):
    ...     check.add(row_id, line)
    >>> check.repeated().error("a", 4).message
    'id="a" stands on lines 1 and 4: ids must be unique'
    """

    def __init__(self) -> None:
        self._digests = array("Q")
        self._lines = array("I")

    def __len__(self) -> int:
        return len(self._digests)

    def add(self, row_id: str | int | None, line: int) -> None:
        """Take the id of the next row, the one on ``line``; those without one are not compared."""
        self._digests.append(_NO_ID if row_id is None else id_digest(row_id))
        self._lines.append(line)

    def is_of(self, index: int, row_id: str | int | None) -> bool:
        """Whether row ``index`` has this id."""
        return self._digests[index] == (_NO_ID if row_id is None else id_digest(row_id))

    def repeated(self) -> RepeatedIds:
        """The ids that were added more than once."""
        if not self._digests:
            return RepeatedIds()
        digests = np.frombuffer(self._digests, np.uint64)
        ordered = np.sort(digests)  # a copy, and the only one
        several = np.unique(ordered[1:][ordered[1:] == ordered[:-1]])
        found: dict[int, tuple[int, int, int]] = {}
        for place in np.flatnonzero(np.isin(digests, several[several != _NO_ID])).tolist():
            digest, line = self._digests[place], self._lines[place]
            first, second, count = found.get(digest, (line, line, 0))
            found[digest] = (first, line if count == 1 else second, count + 1)
        return RepeatedIds(found)


_NO_ID = 0


def id_digest(row_id: str | int) -> int:
    """64 bits of a cryptographic hash; "1" and 1 differ."""
    data = json.dumps(row_id).encode()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
