"""A SentencePiece vocabulary, as GGUF holds it, for the ``tokenizers`` library.

For:        pieces with scores (``tokenizer.ggml.model`` "llama") that are merged best score first, as in Gemma.
Not for:    byte-level vocabularies with merges of their own (vocabulary.py).
May import: tokenizers, kv_common.

SentencePiece joins, of all neighbours whose union is a piece, the pair whose union scores best, the leftmost where
scores are equal. Byte-pair merges ranked by the score of what they make do the same, so scores become merges here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, normalizers
from tokenizers.models import BPE

from kv_common.errors import UnsupportedError
from maxtext_paged.convert.gguf import GgufFile

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Entries of ``tokenizer.ggml.token_type``. CONTROL and USER_DEFINED are matched whole, before the text is split."""

_SPACE = "\u2581"
_TEXT_RULES = {
    "add_space_prefix": (True, False),
    "remove_extra_whitespaces": (False, False),
    "precompiled_charsmap": (None, None),
    "treat_whitespace_as_suffix": (False, False),
}
"""``tokenizer.ggml.*`` keys that change texts: what an absent one means, and the one value that is carried over."""


def sentencepiece_tokenizer(file: GgufFile) -> Tokenizer:
    """The file's tokenizer, without begin or end tokens.

    Raises:
      UnsupportedError: a rule for texts, or a vocabulary, that would be another one here.
    """
    for name, (default, carried) in _TEXT_RULES.items():
        value: Any = file.metadata.get(f"tokenizer.ggml.{name}", default)
        if value != carried:
            raise UnsupportedError(
                f"{file.path.name}: tokenizer.ggml.{name} = {value!r} is not supported for a SentencePiece vocabulary; "
                f"this converter knows {carried!r}"
            )
    tokens: list[str] = file.require("tokenizer.ggml.tokens")
    types: list[int] = file.require("tokenizer.ggml.token_type")
    scores: list[float] = file.require("tokenizer.ggml.scores")
    if len(set(tokens)) != len(tokens):
        raise UnsupportedError(f"{file.path.name}: two tokens of the vocabulary have the same text")
    if not {f"<0x{byte:02X}>" for byte in range(256)} <= {tokens[i] for i, kind in enumerate(types) if kind == BYTE}:
        raise UnsupportedError(
            f"{file.path.name}: the vocabulary lacks byte tokens, which spell what is in no other token"
        )
    unknown = file.metadata.get("tokenizer.ggml.unknown_token_id", 0)
    model = BPE(
        vocab={token: i for i, token in enumerate(tokens)},
        merges=merges_of(tokens, scores, types),
        unk_token=tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
    tokenizer.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind == CONTROL
        ]
    )
    # Normalised: several spaces in a row are such a token, spelled with SentencePiece's sign for a space.
    tokenizer.add_tokens(
        [
            AddedToken(token, special=False, normalized=True)
            for token, kind in zip(tokens, types, strict=True)
            if kind == USER_DEFINED
        ]
    )
    return tokenizer


def merges_of(tokens: Sequence[str], scores: Sequence[float], types: Sequence[int]) -> list[tuple[str, str]]:
    """Every pair of pieces whose union is one, best score first; of one union's pairs the shorter left part first.

    >>> merges_of(["a", "b", "c", "ab", "bc", "abc"], [0, 0, 0, -2.0, -1.0, -3.0], [1] * 6)
    [('b', 'c'), ('a', 'b'), ('a', 'bc'), ('ab', 'c')]
    """
    pieces = {token for token, kind in zip(tokens, types, strict=True) if kind == NORMAL}
    made = sorted(
        (i for i, kind in enumerate(types) if kind == NORMAL and len(tokens[i]) > 1), key=lambda i: -scores[i]
    )
    return [
        (token[:cut], token[cut:])
        for token in (tokens[i] for i in made)
        for cut in range(1, len(token))
        if token[:cut] in pieces and token[cut:] in pieces
    ]
