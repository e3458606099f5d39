"""Text to token ids and back, on the ``tokenizers`` library alone.

For:        a tokenizer from a model directory, or around the one a caller brings; its end tokens and chat form.
Not for:    finding and rendering templates (chat_template.py). torch and transformers are never imported.
May import: the standard library, numpy, tokenizers, chat_template, kv_common; MaxText only for its own tokenizer types.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from kv_common.errors import ConfigError, RequestError, UnsupportedError
from maxtext_paged.chat_template import ChatTemplate, Templates, choose_template, find_templates
from maxtext_paged.tokenizer_backends import Backend, CallersTokenizer, TokenizersBackend

EosIds = int | Iterable[int] | None


class HfTokenizer:
    """One tokenizer with everything generation needs of it.

    The begin token appears exactly once in what ``encode`` and ``encode_chat`` return, if this tokenizer
    uses one at all; an end token is never appended to a prompt.

    Attributes:
      eos_ids: every id that ends generation: of the tokenizer, the generation config and the caller.
      eos_id: the tokenizer's own end token, else the first of ``eos_ids``, else ``None``.
      bos_id: the begin token, or ``None``.
      pad_id: the padding token, or ``None``; nothing in the paged path needs one.
      tokenizer: the same tokenizer with the method names of transformers.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        eos_ids: EosIds = (),
        templates: Templates | None = None,
        chat_template: str | None = None,
        directory: Path | None = None,
    ) -> None:
        """Most callers want ``from_dir``, ``wrap`` or ``load_tokenizer``."""
        self._backend = backend
        self._templates = templates or {}
        self._asked_template = chat_template
        self._directory = directory
        self._compiled: ChatTemplate | None = None
        self.bos_id = backend.bos_id
        self.pad_id = backend.pad_id
        listed = list(dict.fromkeys([*as_ids(backend.eos_ids), *as_ids(eos_ids)]))
        self.eos_id = listed[0] if listed else None
        self.eos_ids = frozenset(listed)
        self.tokenizer = backend.transformers_object or TransformersView(self)

    @classmethod
    def from_dir(
        cls,
        path: Path | str,
        *,
        eos_ids: EosIds = (),
        chat_template: str | None = None,
        add_bos: bool | None = None,
    ) -> HfTokenizer:
        """Load a model directory: tokenizer.json, and what stands beside it.

        Args:
          eos_ids: end tokens known from elsewhere, such as the model's config.
          chat_template: a template's text, or the name of one of several published ones.
          add_bos: ``False`` never adds the begin token, ``True`` always does where there is one;
            ``None`` leaves it to the directory's files.

        Raises:
          ConfigError: a file is missing or malformed; the message names it.
        """
        return cls.from_file(
            Path(path) / "tokenizer.json", eos_ids=eos_ids, chat_template=chat_template, add_bos=add_bos
        )

    @classmethod
    def from_file(
        cls,
        path: Path | str,
        *,
        eos_ids: EosIds = (),
        chat_template: str | None = None,
        add_bos: bool | None = None,
    ) -> HfTokenizer:
        """As ``from_dir``, from the path of a tokenizer.json."""
        path = Path(path)
        if not path.is_file():
            raise ConfigError(f"{path}: no such file; a tokenizer directory must hold a tokenizer.json")
        try:
            loaded = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ConfigError(f"{path}: not a tokenizer.json ({error})") from error
        directory = path.parent
        special = _read_json(directory / "special_tokens_map.json")
        config = {**special, **_read_json(directory / "tokenizer_config.json")}
        backend = TokenizersBackend(loaded, config, add_bos=add_bos)
        stops = [
            i
            for name in ("generation_config.json", "config.json")
            for i in as_ids(_read_json(directory / name).get("eos_token_id"), directory / name)
        ]
        return cls(
            backend,
            eos_ids=[*stops, *as_ids(eos_ids)],
            templates=find_templates(directory, config),
            chat_template=chat_template,
            directory=directory,
        )

    @classmethod
    def wrap(cls, tokenizer: Any, *, eos_ids: EosIds = (), chat_template: str | None = None) -> HfTokenizer:
        """Use the tokenizer a caller brings, with the tokens and the template it has.

        Args:
          tokenizer: an ``HfTokenizer``, a ``tokenizers.Tokenizer``, a transformers tokenizer, or one of
            MaxText's; anything with ``encode``, ``decode`` and ``eos_token_id`` or ``eos_id``.

        Raises:
          ConfigError: it lacks one of those.
        """
        if isinstance(tokenizer, HfTokenizer):
            return cls(
                tokenizer._backend,
                eos_ids=[*tokenizer._ordered_eos_ids(), *as_ids(eos_ids)],
                templates=tokenizer._templates,
                chat_template=chat_template or tokenizer._asked_template,
                directory=tokenizer._directory,
            )
        if isinstance(tokenizer, tokenizers.Tokenizer):
            return cls(TokenizersBackend(copy.deepcopy(tokenizer), {}), eos_ids=eos_ids, chat_template=chat_template)
        backend = CallersTokenizer(tokenizer)
        return cls(backend, eos_ids=eos_ids, templates=backend.templates, chat_template=chat_template)

    def encode(self, text: str) -> list[int]:
        """Token ids of a raw prompt, with exactly one begin token where this tokenizer uses one.

        Raises:
          RequestError: ``text`` is not a string.
        """
        if not isinstance(text, str):
            raise RequestError(f"a prompt must be text, not {type(text).__name__}")
        return self._backend.encode(text)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of a chat, ending where the model's turn begins.

        Raises:
          ConfigError: there is no chat template (the message says where it was looked for).
          RequestError: the messages are malformed, or the template refuses them.
        """
        return self.encode(self.render_chat(messages))

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The text of a chat, as the model was trained to read it. Errors as in ``encode_chat``."""
        if not self._backend.reads_special_tokens:
            raise UnsupportedError(
                f"{self._backend.name} has no way to write chat markers: use tokenizer_type=huggingface, "
                "or give `prompt` text instead of `messages`"
            )
        if self._compiled is None:
            source = choose_template(self._templates, self._asked_template, self._directory)
            self._compiled = ChatTemplate(source, self._backend.special_tokens)
        return self._compiled.render(messages, add_generation_prompt=add_generation_prompt, **variables)

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Text of a whole sequence.

        Special tokens are left out of the text (they stay in the caller's ids). A character cut off in
        the middle shows as U+FFFD; give whole sequences, never one token at a time.
        """
        return self._backend.decode([int(i) for i in ids], skip_special_tokens)

    def special_id(self, text: str) -> int | None:
        """The special token that is written as ``text``, which ``decode`` leaves out; None where there is none."""
        return self._backend.special_id(text)

    def token_bytes(self, token: int) -> bytes:
        """What one token adds to a text, in UTF-8; of a special token its name. A character may be two of them."""
        return self._backend.token_bytes(token)

    def _ordered_eos_ids(self) -> list[int]:
        return [] if self.eos_id is None else [self.eos_id, *sorted(self.eos_ids - {self.eos_id})]


class TransformersView:
    """An ``HfTokenizer`` under the method names of transformers, for callers written against those.

    Ids come back as plain lists. Attributes may be set, as MaxText does with ``pad_token_id``.
    """

    def __init__(self, owner: HfTokenizer) -> None:
        self._owner = owner
        self.eos_token_id = owner.eos_id
        self.bos_token_id = owner.bos_id
        self.pad_token_id = owner.pad_id
        tokens = owner._backend.special_tokens
        self.eos_token, self.bos_token = tokens.get("eos_token"), tokens.get("bos_token")
        self.pad_token, self.unk_token = tokens.get("pad_token"), tokens.get("unk_token")

    def encode(self, text: str) -> list[int]:
        return self._owner.encode(text)

    def decode(self, token_ids: Any, skip_special_tokens: bool = False) -> str:
        return self._owner.decode(as_token_ids(token_ids), skip_special_tokens=skip_special_tokens)

    def batch_decode(self, sequences: Iterable[Any], skip_special_tokens: bool = False) -> list[str]:
        return [self.decode(ids, skip_special_tokens) for ids in sequences]

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        *,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        **variables: Any,
    ) -> list[int] | str:
        """The chat's ids, or with ``tokenize=False`` its text."""
        text = self._owner.render_chat(conversation, add_generation_prompt=add_generation_prompt, **variables)
        return self._owner.encode(text) if tokenize else text


def load_tokenizer(config: Any, *, eos_ids: EosIds = ()) -> HfTokenizer:
    """The tokenizer that a MaxText config names (``tokenizer_type``, ``tokenizer_path``, ``add_bos``).

    ``add_bos=false`` keeps the begin token away. ``add_bos=true``, MaxText's default, adds it where the
    model's own files say so (huggingface) or always (sentencepiece, tiktoken). ``add_eos`` is for training
    data: a prompt never ends with an end token. ``chat_template`` and ``chat_template_path`` are honoured.

    Raises:
      ConfigError: ``tokenizer_path`` is not a local directory or file of that type.
      UnsupportedError: another ``tokenizer_type``.
    """
    # An enum in MaxText's config, a string in others'; compared here and nowhere else.
    kind = str(getattr(config.tokenizer_type, "value", config.tokenizer_type))
    path = Path(config.tokenizer_path or "")
    template = getattr(config, "chat_template", None) or _template_file(getattr(config, "chat_template_path", None))
    if kind == "huggingface":
        return _load_huggingface(path, None if config.add_bos else False, eos_ids, template)
    if kind not in ("sentencepiece", "tiktoken"):
        raise UnsupportedError(f"tokenizer_type={kind!r} is not supported: huggingface, sentencepiece or tiktoken")
    if not path.is_file():
        raise ConfigError(f"tokenizer_path={str(path)!r}: no such {kind} model file")
    from maxtext.input_pipeline import tokenizer as maxtext_tokenizer  # imports transformers

    classes = {
        "sentencepiece": maxtext_tokenizer.SentencePieceTokenizer,
        "tiktoken": maxtext_tokenizer.TikTokenTokenizer,
    }
    try:
        theirs = classes[kind](str(path), config.add_bos, False)
    except ValueError as error:
        raise ConfigError(f"tokenizer_path={str(path)!r}: {error}") from error
    return HfTokenizer.wrap(theirs, eos_ids=eos_ids, chat_template=template)


def as_ids(value: EosIds, place: Path | None = None) -> list[int]:
    """End tokens as published: one id, a list of them, or nothing."""
    if value is None:
        return []
    listed = [value] if isinstance(value, int) else list(value)
    if not all(isinstance(i, int | np.integer) and not isinstance(i, bool) for i in listed):
        raise ConfigError(f"{place or 'eos_ids'}: end tokens must be whole numbers, not {listed}")
    return [int(i) for i in listed if i >= 0]


def as_token_ids(value: Any) -> list[int]:
    """A prompt given as ids, in any of the shapes tokenizers return.

    Args:
      value: whole numbers in a list, tuple or array ``[n]``; the same as the only row of ``[1, n]``;
        or a mapping with such ``input_ids``.

    Raises:
      RequestError: anything else, negative numbers included; the message says what was given.

    >>> as_token_ids({"input_ids": np.array([[3, 1]])})
    [3, 1]
    """
    if isinstance(value, Mapping):
        if "input_ids" not in value:
            raise RequestError(f"a prompt given as an object must hold input_ids, not {sorted(map(str, value))}")
        value = value["input_ids"]
    try:
        ids = np.asarray(value)
    except (ValueError, TypeError, RuntimeError) as error:
        raise RequestError(f"token ids must be one list of whole numbers: {error}") from error
    if ids.ndim == 2 and ids.shape[0] == 1:
        ids = ids[0]
    if ids.size == 0 and ids.ndim == 1:
        return []
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise RequestError(
            f"token ids must be one list of whole numbers, not {type(value).__name__} of {ids.dtype} {list(ids.shape)}"
        )
    if ids.min() < 0:
        raise RequestError(f"token ids must not be negative; got {int(ids.min())}")
    return [int(i) for i in ids]


def _load_huggingface(path: Path, add_bos: bool | None, eos_ids: EosIds, template: str | None) -> HfTokenizer:
    if path.is_dir():
        return HfTokenizer.from_dir(path, eos_ids=eos_ids, chat_template=template, add_bos=add_bos)
    if path.is_file():
        return HfTokenizer.from_file(path, eos_ids=eos_ids, chat_template=template, add_bos=add_bos)
    raise ConfigError(
        f"tokenizer_path={str(path)!r}: no such directory; give a local directory that holds tokenizer.json "
        "(names on a model hub are not fetched)"
    )


def _template_file(path: str | None) -> str | None:
    """MaxText's ``chat_template_path``: Jinja, or JSON with a ``chat_template``."""
    if not path:
        return None
    file = Path(path)
    if not file.is_file():
        raise ConfigError(f"chat_template_path={path!r}: no such file")
    if file.suffix != ".json":
        return file.read_text(encoding="utf-8")
    template = _read_json(file).get("chat_template")
    if not isinstance(template, str):
        raise ConfigError(f"chat_template_path={path!r}: the object holds no chat_template text")
    return template


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object; an absent file reads as an empty one."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON ({error})") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: expected a JSON object")
    return value
