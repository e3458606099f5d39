"""The vocabulary of a GGUF file as the files a tokenizer directory holds.

For:        tokenizer.json, tokenizer_config.json (with the chat template) and generation_config.json.
Not for:    encoding or decoding text (maxtext_paged/tokenizer.py).
May import: tokenizers, kv_common.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE

from kv_common.errors import UnsupportedError
from maxtext_paged.convert.gguf import GgufFile
from maxtext_paged.convert.sentencepiece import CONTROL, USER_DEFINED, sentencepiece_tokenizer


def _byte_level(*before: pre_tokenizers.PreTokenizer) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([*before, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])


_PRE_TOKENIZERS = {
    # llama.cpp's names for how text is split before byte-pair merges.
    "smollm": lambda: _byte_level(pre_tokenizers.Digits(individual_digits=True)),
    "gpt-2": lambda: _byte_level(),
}


def build_tokenizer(file: GgufFile) -> Tokenizer:
    """The file's tokenizer, as the ``tokenizers`` library holds it.

    Raises:
      UnsupportedError: a kind of vocabulary or of text splitting that is not known here. A near guess
        would give other token ids, and so another text, without a word.
    """
    kind = file.require("tokenizer.ggml.model")
    if kind not in _KINDS:
        raise UnsupportedError(
            f"{file.path.name}: vocabulary kind {kind!r} is not supported; this converter knows "
            f"{', '.join(map(repr, _KINDS))}"
        )
    tokenizer = _KINDS[kind](file)
    if file.metadata.get("tokenizer.ggml.add_bos_token", False):
        tokens, bos = file.require("tokenizer.ggml.tokens"), file.require("tokenizer.ggml.bos_token_id")
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos]} $A", pair=f"{tokens[bos]} $A $B", special_tokens=[(tokens[bos], bos)]
        )
    return tokenizer


def _byte_level_tokenizer(file: GgufFile) -> Tokenizer:
    split = file.require("tokenizer.ggml.pre")
    if split not in _PRE_TOKENIZERS:
        raise UnsupportedError(
            f"{file.path.name}: text splitting {split!r} is not supported; this converter knows "
            f"{sorted(_PRE_TOKENIZERS)}"
        )
    tokens: list[str] = file.require("tokenizer.ggml.tokens")
    types: list[int] = file.require("tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ", 1)) for merge in file.require("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[split]()
    tokenizer.decoder = decoders.ByteLevel()
    for token, type_ in zip(tokens, types, strict=True):
        if type_ == CONTROL:
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif type_ == USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, special=False, normalized=False)])
    return tokenizer


_KINDS = {"gpt2": _byte_level_tokenizer, "llama": sentencepiece_tokenizer}
"""``tokenizer.ggml.model`` to what builds it: byte-level BPE, and SentencePiece's."""


def write_tokenizer_files(file: GgufFile, directory: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and generation_config.json into ``directory``.

    The end tokens in generation_config.json are all that the file names: end of text, of turn, of message.

    Raises:
      UnsupportedError: see ``build_tokenizer``; or the file names no end token.
    """
    tokenizer = build_tokenizer(file)
    tokens: list[str] = file.require("tokenizer.ggml.tokens")

    def token_id(name: str) -> int | None:
        return file.metadata.get(f"tokenizer.ggml.{name}_token_id")

    eos_ids = sorted({i for name in ("eos", "eot", "eom") if (i := token_id(name)) is not None})
    if not eos_ids:
        raise UnsupportedError(f"{file.path.name}: the file names no end-of-text token")
    named = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    config: dict[str, Any] = {key: tokens[i] for key, name in named.items() if (i := token_id(name)) is not None}
    config |= {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": bool(file.metadata.get("tokenizer.ggml.add_bos_token", False)),
        "clean_up_tokenization_spaces": False,
    }
    if template := file.metadata.get("tokenizer.chat_template"):
        config["chat_template"] = template
    generation = {"eos_token_id": eos_ids[0] if len(eos_ids) == 1 else eos_ids}
    for key, name in (("bos_token_id", "bos"), ("pad_token_id", "padding")):
        if (i := token_id(name)) is not None:
            generation[key] = i

    tokenizer.save(str(directory / "tokenizer.json"))
    write_json(directory / "tokenizer_config.json", config)
    write_json(directory / "generation_config.json", generation)


def write_json(path: Path, value: object) -> None:
    """Write ``value`` as readable UTF-8 JSON."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
