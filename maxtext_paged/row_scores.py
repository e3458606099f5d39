"""The scores that a row of a file asks for, out of its result.

For:        which tokens a record lists logprobs of, prompt and completion.
Not for:    how they are written (formats/scores.py).
May import: the standard library, numpy, maxtext_paged.rows and formats.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from maxtext_paged.formats import InputRow
from maxtext_paged.formats.scores import Piece, Scores
from maxtext_paged.rows import RowResult


def listed_scores(tokenizer: Any, source: InputRow, result: RowResult) -> Scores | None:
    """Of the tokens that the record lists: the completion's, behind the prompt's where that is repeated."""
    if not source.logprobs or result.error is not None:
        return None
    num_prompt = len(result.row.tokens)
    first = 0 if source.echo else num_prompt
    alternatives = [None] * (num_prompt - first) + list(result.alternatives) if source.top_logprobs else []
    ids, logprobs = result.token_ids[first:].tolist(), result.logprobs[first:].tolist()
    return Scores(ids, logprobs, _piece(tokenizer), alternatives)


def prompt_scores(tokenizer: Any, source: InputRow, result: RowResult) -> Scores | None:
    """Of the prompt's tokens, where the row asks for them by name."""
    if not source.prompt_logprobs or result.error is not None:
        return None
    num_prompt = len(result.row.tokens)
    return Scores(result.token_ids[:num_prompt].tolist(), result.logprobs[:num_prompt].tolist(), _piece(tokenizer))


def _piece(tokenizer: Any) -> Piece:
    """A token's text, of whatever the tokenizer can tell."""
    given: Piece | None = getattr(tokenizer, "token_bytes", None)
    return partial(_decoded, tokenizer) if given is None else given


def _decoded(tokenizer: Any, token: int) -> bytes:
    text: str = tokenizer.decode([token])
    return text.encode()
