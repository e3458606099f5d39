"""Tokenizers that callers and MaxText configs bring are used as they are, end tokens and templates included."""

from __future__ import annotations

import copy
import importlib.util
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kv_common.errors import ConfigError, UnsupportedError
from maxtext_paged.tokenizer import HfTokenizer, load_tokenizer

ASSETS = Path(importlib.util.find_spec("maxtext").origin).parent / "assets" / "tokenizers"
QWEN3 = ASSETS / "qwen3-tokenizer"
TEXTS = ["Hello world", "한국어 문장 👍", "zażółć  gęślą", "def f(x):\n    return x"]
CHAT = [{"role": "user", "content": "What is 2 + 2?"}]


@pytest.fixture(scope="module")
def transformers_tokenizer() -> Any:
    os.environ["HF_HUB_OFFLINE"] = "1"
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(str(QWEN3))


@pytest.fixture(scope="module")
def ours() -> HfTokenizer:
    return HfTokenizer.from_dir(QWEN3)


# Ours against transformers, on a published tokenizer


@pytest.mark.parametrize("text", [*TEXTS, "<|im_start|>user\nhi<|im_end|>"])
def test_ids_and_text_are_those_of_transformers(text, ours, transformers_tokenizer):
    ids = transformers_tokenizer.encode(text)
    assert ours.encode(text) == ids
    assert ours.decode(ids) == transformers_tokenizer.decode(ids, skip_special_tokens=True)
    assert (ours.eos_id, ours.pad_id) == (transformers_tokenizer.eos_token_id, transformers_tokenizer.pad_token_id)


@pytest.mark.parametrize(
    "messages",
    [
        CHAT,
        [{"role": "system", "content": "Be brief."}, *CHAT, {"role": "assistant", "content": "4"}, *CHAT],
    ],
    ids=["one turn", "a talk"],
)
def test_chats_are_rendered_as_transformers_renders_them(messages, ours, transformers_tokenizer):
    theirs = transformers_tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert ours.render_chat(messages) == theirs
    assert ours.encode_chat(messages) == transformers_tokenizer.encode(theirs)


def test_the_view_for_maxtexts_callers_speaks_like_transformers(ours, transformers_tokenizer):
    view = ours.tokenizer
    rows = [view.encode(text) for text in TEXTS]
    assert view.batch_decode(rows, skip_special_tokens=True) == transformers_tokenizer.batch_decode(
        rows, skip_special_tokens=True
    )
    assert view.apply_chat_template(CHAT, tokenize=False) == transformers_tokenizer.apply_chat_template(
        CHAT, tokenize=False
    )
    assert view.apply_chat_template(CHAT, add_generation_prompt=True) == ours.encode_chat(CHAT)
    assert view.eos_token_id == ours.eos_id
    view.pad_token_id = 7  # MaxEngine does this
    assert view.pad_token_id == 7


# A caller's own


def test_a_transformers_tokenizer_is_used_with_the_tokens_its_caller_added(transformers_tokenizer):
    theirs = copy.deepcopy(transformers_tokenizer)
    theirs.add_tokens(["<stop>"], special_tokens=True)
    stop = theirs.convert_tokens_to_ids("<stop>")
    tokenizer = HfTokenizer.wrap(theirs, eos_ids=[stop])
    ids = tokenizer.encode("hi<stop>")
    assert ids[-1] == stop and tokenizer.decode(ids) == "hi"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "hi<stop>"
    assert tokenizer.eos_ids == {theirs.eos_token_id, stop} and tokenizer.eos_id == theirs.eos_token_id
    assert tokenizer.tokenizer is theirs
    assert tokenizer.render_chat(CHAT) == theirs.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)


def test_maxtexts_shell_around_transformers_is_opened(transformers_tokenizer):
    shell = SimpleNamespace(
        tokenizer=transformers_tokenizer, encode=None, decode=None, eos_id=transformers_tokenizer.eos_token_id
    )
    assert HfTokenizer.wrap(shell).tokenizer is transformers_tokenizer


def test_wrapping_one_of_ours_again_keeps_everything_and_adds(ours):
    again = HfTokenizer.wrap(ours, eos_ids=5)
    assert again.eos_ids == ours.eos_ids | {5} and again.eos_id == ours.eos_id
    assert ours.eos_ids == {ours.eos_id}, "the caller's is unchanged"
    assert again.encode_chat(CHAT) == ours.encode_chat(CHAT)


class Doubling:
    """Adds both tokens to everything, like a tokenizer set up for training data."""

    bos_token_id, eos_token_id, pad_token_id = 1, 2, None
    bos_token = "<s>"
    chat_template = "{{ bos_token }}{{ messages[0]['content'] }}"

    def encode(self, text: str) -> list[int]:
        written = [1] * text.startswith("<s>")
        return [1, *written, *(ord(c) for c in text.removeprefix("<s>")), 2]

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


def test_a_callers_begin_token_is_not_doubled_and_its_end_token_not_appended():
    tokenizer = HfTokenizer.wrap(Doubling())
    assert tokenizer.encode("ab") == [1, 97, 98]
    assert tokenizer.encode_chat([{"role": "user", "content": "ab"}]) == [1, 97, 98]


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        (object(), "object cannot serve as a tokenizer: it lacks encode, decode"),
        (SimpleNamespace(encode=len, decode=len), r"lacks eos_token_id \(or eos_id\)"),
        ("gpt2", "str cannot serve as a tokenizer"),
    ],
)
def test_what_is_no_tokenizer_is_refused_by_what_it_lacks(theirs, words):
    with pytest.raises(ConfigError, match=words):
        HfTokenizer.wrap(theirs)


# What a MaxText config names


def config(kind: str, path: Path | str, **more: Any) -> SimpleNamespace:
    return SimpleNamespace(**{"tokenizer_type": kind, "tokenizer_path": str(path), "add_bos": True, **more})


@pytest.mark.slow
@pytest.mark.maxtext
@pytest.mark.parametrize(
    ("kind", "path", "bos"),
    [
        ("huggingface", QWEN3, []),
        ("huggingface", QWEN3 / "tokenizer.json", []),
        ("sentencepiece", ASSETS / "tokenizer.llama2", [1]),
        ("tiktoken", ASSETS / "tokenizer_llama3.tiktoken", [128000]),
    ],
)
def test_each_tokenizer_type_of_a_real_config_is_served(kind, path, bos):
    """The type is an enum there, not a string."""
    from tests.tiny_models import make_config

    maxtext_config = make_config(tokenizer_type=kind, tokenizer_path=path)
    assert type(maxtext_config.tokenizer_type).__name__ == "TokenizerType"
    tokenizer = load_tokenizer(maxtext_config)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids[: len(bos)] == bos and ids[-1] not in tokenizer.eos_ids
        assert tokenizer.decode([*ids, tokenizer.eos_id]) == text
    without = load_tokenizer(make_config(tokenizer_type=kind, tokenizer_path=path, add_bos="false"))
    assert bos + without.encode("hi") == tokenizer.encode("hi")


@pytest.mark.parametrize(
    ("kind", "path", "eos"),
    [
        ("sentencepiece", ASSETS / "tokenizer.llama2", {2}),
        ("tiktoken", ASSETS / "tokenizer_llama3.tiktoken", {128001, 128009}),
    ],
)
def test_maxtexts_own_types_keep_every_end_token_and_mark_a_cut_character(kind, path, eos):
    tokenizer = load_tokenizer(config(kind, path), eos_ids=7)
    assert tokenizer.eos_ids == eos | {7}
    ids = tokenizer.encode("ok 🫠")
    assert tokenizer.decode(ids) == "ok 🫠"
    assert tokenizer.decode(ids[:-1]).startswith("ok \N{REPLACEMENT CHARACTER}")
    with pytest.raises(UnsupportedError, match=r"no way to write chat markers: use tokenizer_type=huggingface"):
        tokenizer.encode_chat(CHAT)


def test_another_type_is_refused_by_name():
    with pytest.raises(UnsupportedError, match="tokenizer_type='grain' is not supported"):
        load_tokenizer(config("grain", QWEN3))


@pytest.mark.parametrize(
    ("kind", "path", "words"),
    [
        ("huggingface", "HuggingFaceTB/SmolLM2-135M", "names on a model hub are not fetched"),
        ("huggingface", ASSETS, "tokenizer.json"),
        ("sentencepiece", "nowhere.model", "no such sentencepiece model file"),
        ("sentencepiece", QWEN3 / "tokenizer.json", "Failed to load sentencepiece"),
        ("tiktoken", QWEN3 / "tokenizer.json", "Failed to load tiktoken"),
        ("huggingface", "", "no such directory|tokenizer.json"),
    ],
)
def test_a_path_that_is_not_a_tokenizer_of_that_type_is_refused(kind, path, words):
    with pytest.raises(ConfigError, match=words):
        load_tokenizer(config(kind, path))


@pytest.mark.slow
def test_a_configs_chat_template_is_honoured(tmp_path):
    text = "{{ messages[0]['content'] }}!"
    (tmp_path / "t.jinja").write_text(text)
    (tmp_path / "t.json").write_text('{"chat_template": "' + text.replace('"', '\\"') + '"}')
    (tmp_path / "empty.json").write_text("{}")
    for more in (
        {"chat_template": text},
        {"chat_template": "", "chat_template_path": str(tmp_path / "t.jinja")},
        {"chat_template_path": str(tmp_path / "t.json")},
    ):
        assert load_tokenizer(config("huggingface", QWEN3, **more)).render_chat(CHAT) == "What is 2 + 2?!"
    for name in ("empty.json", "gone.jinja"):
        with pytest.raises(ConfigError, match=f"chat_template_path=.*{name}"):
            load_tokenizer(config("huggingface", QWEN3, chat_template_path=str(tmp_path / name)))
