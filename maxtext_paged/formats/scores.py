"""Logprobs in records: our own lists, and the objects of OpenAI's two interfaces.

For:        tokens with their logprobs and alternatives, written.
Not for:    asking for them (row_fields.py) or computing them (kv_execution).
May import: the standard library, numpy, kv_control.

Numbers are of the model's own distribution: before bias, penalties, temperature and filters. What JSON cannot say is
null (no number: the first token of a prompt) or -9999 (probability 0), as vLLM writes it.
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kv_control.logit_options import Alternatives

_IMPOSSIBLE = -9999.0

Piece = Callable[[int], bytes]
"""What one token adds to a text, in UTF-8."""


@dataclass(frozen=True, slots=True)
class Scores:
    """Some tokens in a row, and what the model thought of each.

    Attributes:
      token_ids, logprobs: beside each other; NaN where there is no number.
      alternatives: the likeliest tokens at each, None where there are none; empty where nobody asked.
      piece: a token's text.
    """

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    piece: Piece
    alternatives: Sequence[Alternatives | None] = ()


def number(value: float) -> float | None:
    """A logprob as JSON can say it."""
    return None if math.isnan(value) else max(float(value), _IMPOSSIBLE)


def own_scores(scores: Scores) -> dict[str, Any]:
    """``logprobs``, and ``top_logprobs`` where they were asked for, beside a record's ``token_ids``."""
    written: dict[str, Any] = {"logprobs": [number(value) for value in scores.logprobs]}
    if scores.alternatives:
        written["top_logprobs"] = [
            None if best is None else [{"id": token, "logprob": number(value)} for token, value in _pairs(best)]
            for best in scores.alternatives
        ]
    return written


def completion_scores(scores: Scores) -> dict[str, Any]:
    """The ``logprobs`` of a choice of /v1/completions.

    The chosen token is among its ``top_logprobs`` also where it is not one of the best, so there may be one more.
    Tokens of equal text share an entry, the likelier one's.
    """
    pieces = [_text(scores.piece(token)) for token in scores.token_ids]
    top: list[dict[str, float | None] | None] = []
    for place, best in enumerate(scores.alternatives):
        if best is None:
            top.append(None)
            continue
        entries: dict[str, float | None] = {}
        for token, value in _pairs(best):
            entries.setdefault(_text(scores.piece(token)), number(value))
        entries.setdefault(pieces[place], number(scores.logprobs[place]))
        top.append(entries)
    return {
        "tokens": pieces,
        "token_logprobs": [number(value) for value in scores.logprobs],
        "top_logprobs": top if scores.alternatives else None,
        "text_offset": _offsets(map(scores.piece, scores.token_ids)),
    }


def chat_scores(scores: Scores) -> dict[str, Any]:
    """The ``logprobs`` of a choice of /v1/chat/completions."""
    listed = []
    for place, token in enumerate(scores.token_ids):
        best = scores.alternatives[place] if scores.alternatives else None
        top = [] if best is None else [_chat_token(scores, other, value) for other, value in _pairs(best)]
        listed.append({**_chat_token(scores, token, scores.logprobs[place]), "top_logprobs": top})
    return {"content": listed}


def prompt_scores(scores: Scores) -> list[dict[str, Any] | None]:
    """``prompt_logprobs`` as vLLM adds it to a choice: null for the first token, then an object of one token each."""
    return [
        None
        if math.isnan(value)
        else {str(int(token)): {"logprob": number(value), "decoded_token": _text(scores.piece(token))}}
        for token, value in zip(scores.token_ids, scores.logprobs, strict=True)
    ]


def _pairs(best: Alternatives) -> Iterable[tuple[int, float]]:
    return zip(best.ids.tolist(), best.logprobs.tolist(), strict=True)


def _chat_token(scores: Scores, token: int, value: float) -> dict[str, Any]:
    piece = scores.piece(token)
    return {"token": _text(piece), "logprob": number(value), "bytes": list(piece)}


def _text(piece: bytes) -> str:
    r"""A token's text, or its bytes where it is only part of a character.

    >>> _text(b"a"), _text(b"\xe2\x82")
    ('a', 'bytes:\\xe2\\x82')
    """
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def _offsets(pieces: Iterable[bytes]) -> list[int]:
    """Where in the text each token begins, in characters; a character cut in two begins with its first part."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    offsets, at = [], 0
    for piece in pieces:
        offsets.append(at)
        at += len(decoder.decode(piece))
    return offsets
