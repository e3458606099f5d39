"""A token's own text, as logprobs name it, and the special tokens that text leaves out."""

from __future__ import annotations

from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, pre_tokenizers
from tokenizers.models import BPE

from maxtext_paged.tokenizer import HfTokenizer
from maxtext_paged.tokenizer_backends import CallersTokenizer

TEXT = "né 日本\n a\x7f🙂"


def byte_level() -> HfTokenizer:
    """A letter for each byte, two merges, one special token."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: i for i, letter in enumerate([*letters, "nÃ", "Ġa"])}
    made = tokenizers.Tokenizer(BPE(vocab, [("n", "Ã"), ("Ġ", "a")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<|end|>"])
    return HfTokenizer.wrap(made, eos_ids=[len(vocab)])


def lower_bar() -> HfTokenizer:
    """Words with a bar for a space, and bytes by their number."""
    pieces = ["<unk>", "▁a", "b", "▁", *(f"<0x{byte:02X}>" for byte in range(256))]
    made = tokenizers.Tokenizer(BPE({piece: i for i, piece in enumerate(pieces)}, [], byte_fallback=True))
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    made.add_special_tokens(["<unk>"])
    return HfTokenizer.wrap(made, eos_ids=[0])


def test_the_tokens_of_a_text_are_the_text_also_where_one_is_part_of_a_character() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode(TEXT)
    pieces = [tokenizer.token_bytes(token) for token in ids]
    assert b"".join(pieces) == TEXT.encode()
    assert b"n\xc3" in pieces and b" a" in pieces


def test_bars_are_spaces_and_numbered_bytes_are_bytes() -> None:
    tokenizer = lower_bar()
    ids = [1, 4 + 0xE6, 4 + 0x97, 4 + 0xA5, 2, 3]
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == tokenizer.decode(ids) == " a日b "


def test_a_special_token_is_its_name_and_is_found_by_it() -> None:
    tokenizer = byte_level()
    [end] = tokenizer.eos_ids
    assert tokenizer.token_bytes(end) == b"<|end|>"
    assert tokenizer.special_id("<|end|>") == end
    assert tokenizer.special_id("n") is None  # ordinary text is no special token
    assert tokenizer.decode([end]) == ""


class Transformers:
    """Speaks as transformers' tokenizers do."""

    eos_token_id, eos_token = 9, "</s>"
    all_special_ids, all_special_tokens = (9,), ("</s>",)

    def encode(self, text: str) -> list[int]:
        return [0]

    def decode(self, ids: Any, skip_special_tokens: bool = False) -> str:
        return " a"

    def convert_ids_to_tokens(self, token: int) -> str:
        return {0: "Ġa", 1: "▁b", 2: "Ã"}[token]


class Plain:
    eos_id = 1

    def encode(self, text: str) -> list[int]:
        return [5]

    def decode(self, ids: Any) -> str:
        return "".join(chr(90 + token) for token in ids)


@pytest.mark.parametrize(
    ("theirs", "token", "text"),
    [(Transformers(), 0, b" a"), (Transformers(), 1, b" b"), (Transformers(), 2, b"\xc3"), (Plain(), 5, b"_")],
)
def test_a_callers_tokenizer_says_what_it_can(theirs: Any, token: int, text: bytes) -> None:
    assert CallersTokenizer(theirs).token_bytes(token) == text


def test_a_callers_special_tokens_are_found() -> None:
    backend = CallersTokenizer(Transformers())
    assert (backend.special_id("</s>"), backend.special_id("a"), backend.token_bytes(9)) == (9, None, b"</s>")
    assert CallersTokenizer(Plain()).special_id("a") is None
