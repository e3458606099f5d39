"""What a tokenizer is made of: a tokenizer.json, or an object the caller brings.

For:        one protocol over both, with the rule for begin and end tokens in one place.
Not for:    chat templates or end tokens of the generation config (tokenizer.py).
May import: the standard library, tokenizers, kv_common.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping
from functools import cache, cached_property
from typing import Any, Protocol

import tokenizers

from kv_common.errors import ConfigError

_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class Backend(Protocol):
    """Text to ids and back, and which ids are special.

    Attributes:
      name: what to call it in an error.
      reads_special_tokens: the text ``<|im_end|>`` becomes that one token; chat templates need it.
      special_tokens: texts of the named special tokens, by transformers' names (``bos_token``, ...).
      transformers_object: the caller's own object, if it has transformers' methods.
    """

    name: str
    reads_special_tokens: bool
    special_tokens: Mapping[str, str]
    bos_id: int | None
    pad_id: int | None
    eos_ids: list[int]
    transformers_object: Any | None

    def encode(self, text: str) -> list[int]:
        """Ids of a prompt: the begin token at most once, no end token appended."""
        ...

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        """Text of a whole sequence."""
        ...

    def special_id(self, text: str) -> int | None:
        """The special token that is written so, and that ``decode`` can leave out."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """What one token adds to a text, in UTF-8; of a special token its name."""
        ...


def with_prefix(prefix: list[int], ids: list[int]) -> list[int]:
    """``ids`` after ``prefix``, unless they begin with it already (a rendered template, a pasted prompt).

    >>> with_prefix([1], [5, 6]), with_prefix([1], [1, 5, 6]), with_prefix([], [5])
    ([1, 5, 6], [1, 5, 6], [5])
    """
    return ids if ids[: len(prefix)] == prefix else prefix + ids


class TokenizersBackend:
    """A tokenizer.json and the settings published beside it."""

    name = "this tokenizer.json"
    reads_special_tokens = True
    transformers_object = None

    def __init__(self, loaded: tokenizers.Tokenizer, config: Mapping[str, Any], *, add_bos: bool | None = None) -> None:
        """Prepare ``loaded``, whose truncation and padding are switched off: give a copy of a caller's.

        Args:
          config: tokenizer_config.json; tokens may be texts or objects with a ``content``.
          add_bos: as in ``HfTokenizer.from_dir``.

        Raises:
          ConfigError: the end token is not in the vocabulary, or a named token is neither text nor object.
        """
        self._tokenizer = loaded
        # Settings of some training pipeline: they would cut or lengthen prompts without a word.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.special_tokens: Mapping[str, str] = {
            key: text for key in _NAMED if (text := _token_text(key, config.get(key))) is not None
        }
        self.bos_id = self._id("bos_token")
        self.pad_id = self._id("pad_token")
        eos_id = self._id("eos_token")
        if eos_id is None and "eos_token" in self.special_tokens:
            raise ConfigError(f"eos_token {self.special_tokens['eos_token']!r} is not in the vocabulary")
        self.eos_ids = [] if eos_id is None else [eos_id]
        self._prefix = self._prompt_prefix(config.get("add_bos_token") if add_bos is None else add_bos)

    def encode(self, text: str) -> list[int]:
        # The post-processor is left out: it may also append end tokens, which have no place in a prompt.
        return with_prefix(self._prefix, self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def special_id(self, text: str) -> int | None:
        return next((token for token, added in self._special.items() if added == text), None)

    def token_bytes(self, token: int) -> bytes:
        if token in self._special:
            return self._special[token].encode()
        return piece_bytes(self._tokenizer.id_to_token(token) or "", byte_level=self._byte_level)

    @cached_property
    def _special(self) -> dict[int, str]:
        added = self._tokenizer.get_added_tokens_decoder()
        return {token: entry.content for token, entry in added.items() if entry.special}

    @cached_property
    def _byte_level(self) -> bool:
        return "ByteLevel" in json.dumps(json.loads(self._tokenizer.to_str()).get("decoder"))

    def _prompt_prefix(self, add_bos: bool | None) -> list[int]:
        """What the post-processor puts before a text, corrected by an explicit wish about the begin token."""
        bare = self._tokenizer.encode("a", add_special_tokens=False).ids
        full = self._tokenizer.encode("a").ids
        starts = [i for i in range(len(full) - len(bare) + 1) if full[i : i + len(bare)] == bare]
        prefix = full[: starts[0]] if bare and starts else []
        if add_bos is False:
            return [] if self.bos_id is None else [i for i in prefix if i != self.bos_id]
        if add_bos and self.bos_id is not None and self.bos_id not in prefix:
            return [self.bos_id, *prefix]
        return prefix

    def _id(self, name: str) -> int | None:
        return self._tokenizer.token_to_id(self.special_tokens[name]) if name in self.special_tokens else None


class CallersTokenizer:
    """A transformers tokenizer, one of MaxText's, or anything that speaks like either."""

    def __init__(self, theirs: Any) -> None:
        """Look at ``theirs`` without changing it.

        Raises:
          ConfigError: it lacks ``encode``, ``decode``, or both ``eos_token_id`` and ``eos_id``.
        """
        inner = getattr(theirs, "tokenizer", None)
        if not hasattr(theirs, "eos_token_id") and hasattr(inner, "eos_token_id"):
            theirs = inner  # MaxText's HFTokenizer is a shell around transformers'.
        like_transformers = hasattr(theirs, "eos_token_id")
        missing = [name for name in ("encode", "decode") if not callable(getattr(theirs, name, None))]
        if missing or not (like_transformers or hasattr(theirs, "eos_id")):
            raise ConfigError(
                f"{type(theirs).__name__} cannot serve as a tokenizer: it lacks "
                f"{', '.join(missing) or 'eos_token_id (or eos_id)'}"
            )
        self._theirs = theirs
        self.name = type(theirs).__name__
        suffix = "_token_id" if like_transformers else "_id"
        self.bos_id = next(iter(_known_ids(theirs, f"bos{suffix}")), None)
        self.pad_id = next(iter(_known_ids(theirs, f"pad{suffix}")), None)
        stops = (f"eos{suffix}", "eos_ids", "eos_token_ids", "stop_tokens")
        self.eos_ids = [i for name in stops for i in _known_ids(theirs, name)]
        self.reads_special_tokens = like_transformers
        self.special_tokens: Mapping[str, str] = {
            key: str(v) for key in _NAMED if (v := getattr(theirs, key, None)) is not None
        }
        template = getattr(theirs, "chat_template", None)
        self.templates: dict[str, str] = {"default": template} if isinstance(template, str) else dict(template or {})
        has_views = all(callable(getattr(theirs, name, None)) for name in ("apply_chat_template", "batch_decode"))
        self.transformers_object = theirs if has_views else None
        # tiktoken writes special tokens out; transformers takes an argument; sentencepiece never writes them.
        written_out = getattr(theirs, "special_tokens", None)
        self._special_ids = set(written_out.values()) if isinstance(written_out, Mapping) else set()
        self._skips = _takes_argument(theirs.decode, "skip_special_tokens")
        probe = [int(i) for i in theirs.encode("a")]
        self._appends_eos = len(probe) > 1 and probe[-1] in self.eos_ids

    def encode(self, text: str) -> list[int]:
        ids = [int(i) for i in self._theirs.encode(text)]
        if self._appends_eos:
            ids = ids[:-1]
        if self.bos_id is not None and ids[:2] == [self.bos_id] * 2:
            ids = ids[1:]
        return ids

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        if self._skips:
            return self._theirs.decode(ids, skip_special_tokens=skip_special_tokens)
        if skip_special_tokens:
            ids = [i for i in ids if i not in self._special_ids]
        return self._theirs.decode(ids)

    def special_id(self, text: str) -> int | None:
        return next((token for token, name in self._special_names.items() if name == text), None)

    def token_bytes(self, token: int) -> bytes:
        if token in self._special_names:
            return self._special_names[token].encode()
        pieces = getattr(self._theirs, "convert_ids_to_tokens", None)
        if pieces is None:
            return self.decode([token], skip_special_tokens=False).encode()
        piece = str(pieces(token))
        return piece_bytes(piece, byte_level=all(letter in _byte_letters() for letter in piece))

    @cached_property
    def _special_names(self) -> dict[int, str]:
        written_out = getattr(self._theirs, "special_tokens", None)
        if isinstance(written_out, Mapping):
            return {int(token): str(name) for name, token in written_out.items()}
        names, ids = (getattr(self._theirs, f"all_special_{kind}", None) for kind in ("tokens", "ids"))
        return dict(zip(map(int, ids), map(str, names), strict=False)) if names and ids else {}


def piece_bytes(piece: str, *, byte_level: bool) -> bytes:
    r"""The text of one entry of a vocabulary, in UTF-8; such entries are written in one of two ways.

    Args:
      byte_level: a letter for each byte, as GPT-2 has it; else text with a lower bar for a space, bytes as ``<0x0A>``.

    >>> piece_bytes("\u0120a", byte_level=True), piece_bytes("\u2581a", byte_level=False)
    (b' a', b' a')
    >>> piece_bytes("<0xE2>", byte_level=False)
    b'\xe2'
    """
    if byte_level:
        letters = _byte_letters()
        return b"".join(bytes([letters[letter]]) if letter in letters else letter.encode() for letter in piece)
    byte = re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", piece)
    return bytes([int(byte[1], 16)]) if byte else piece.replace("\u2581", " ").encode()


@cache
def _byte_letters() -> dict[str, int]:
    """GPT-2's letter for each byte: its own where that prints, else one from behind the first 256."""
    prints = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(prints)]
    return {chr(byte): byte for byte in prints} | {chr(256 + place): byte for place, byte in enumerate(hidden)}


def _token_text(key: str, value: Any) -> str | None:
    """A special token's text; published as the text or as an object around it."""
    if isinstance(value, Mapping):
        value = value.get("content")
    if value is not None and not isinstance(value, str):
        raise ConfigError(f"tokenizer_config.json: {key} must be a text or an object with a content")
    return value


def _known_ids(theirs: Any, name: str) -> list[int]:
    """Token ids under an attribute: one or several, or a method that returns them (sentencepiece)."""
    value = getattr(theirs, name, None)
    value = value() if callable(value) else value
    listed = value if isinstance(value, list | tuple | set | frozenset) else [value]
    return sorted(i for i in listed if isinstance(i, int) and i >= 0)  # -1 means "none" in MaxText


def _takes_argument(function: Any, name: str) -> bool:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # a function of an extension module
        return False
    return name in parameters
