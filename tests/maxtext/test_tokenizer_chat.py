"""Chat templates: found wherever models publish them, rendered in a sandbox, with the begin token once."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, processors
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from kv_common.errors import ConfigError, RequestError
from maxtext_paged.chat_template import ChatTemplate
from maxtext_paged.convert import find_packaged_gguf
from maxtext_paged.convert.gguf import GgufFile
from maxtext_paged.convert.vocabulary import write_tokenizer_files
from maxtext_paged.tokenizer import HfTokenizer

CHAT = [{"role": "user", "content": "hello"}]
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Why 6 * 7?"},
    {"role": "assistant", "content": "42"},
    {"role": "user", "content": "Thanks 🎉"},
]


def plain(word: str) -> str:
    """A template whose output says which template it is."""
    return word + " {{ messages[0]['content'] }}"


def model_dir(
    directory: Path, config: Mapping[str, Any], *, bos_first: bool = False, files: Mapping[str, str] | None = None
) -> Path:
    vocabulary = {"<s>": 0, "</s>": 1, "hello": 2, "jinja": 3, "json": 4, "config": 5, "model": 6, "other": 7}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="</s>"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    if bos_first:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    directory.mkdir()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>", **config}))
    for name, text in (files or {}).items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text(text)
    return directory


# The real one


def chatml(messages: Sequence[Mapping[str, str]]) -> str:
    """SmolLM2's chat form written down by hand, without any template."""
    default = {
        "role": "system",
        "content": "You are a helpful AI assistant named SmolLM, trained by Hugging Face",
    }
    turns = list(messages) if messages[0]["role"] == "system" else [default, *messages]
    text = "".join(f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>\n" for turn in turns)
    return text + "<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> HfTokenizer:
    try:
        source = find_packaged_gguf()
    except ConfigError as error:
        pytest.skip(f"no SmolLM2 vocabulary: {error}")
    directory = tmp_path_factory.mktemp("smollm2")
    write_tokenizer_files(GgufFile(source), directory)
    return HfTokenizer.from_dir(directory)


@pytest.mark.parametrize("messages", [CHAT, TALK], ids=["default system", "own system"])
def test_smollm2s_template_writes_what_is_written_by_hand(messages, smollm2):
    assert smollm2.render_chat(messages) == chatml(messages)
    ids = smollm2.encode_chat(messages)
    assert smollm2.decode(ids, skip_special_tokens=False) == chatml(messages)
    assert ids.count(1) == len(messages) + 1 + (messages is CHAT) and ids[:2] != [1, 1]


def test_smollm2s_turns_begin_and_end_with_single_tokens(smollm2):
    opening = smollm2.encode("<|im_start|>assistant\n")
    assert smollm2.encode_chat(CHAT)[-len(opening) :] == opening and opening[0] == 1
    assert smollm2.encode("<|im_end|>") == [2]
    assert smollm2.eos_ids == {2} and smollm2.eos_id == 2


# Where a template may be

PLACES: dict[str, tuple[dict[str, Any], dict[str, str], str]] = {
    "tokenizer_config": ({"chat_template": plain("config")}, {}, "config hello"),
    "a file of its own": ({}, {"chat_template.jinja": plain("jinja")}, "jinja hello"),
    "a JSON file of its own": ({}, {"chat_template.json": json.dumps({"chat_template": plain("json")})}, "json hello"),
    "the file wins over the config": (
        {"chat_template": plain("config")},
        {"chat_template.jinja": plain("jinja"), "chat_template.json": json.dumps({"chat_template": plain("json")})},
        "jinja hello",
    ),
    "the default of a named list": (
        {"chat_template": [{"name": "rag", "template": "x"}, {"name": "default", "template": plain("config")}]},
        {},
        "config hello",
    ),
    "the only one of a named list": (
        {"chat_template": [{"name": "chat", "template": plain("config")}]},
        {},
        "config hello",
    ),
    "a mapping": ({"chat_template": {"default": plain("config"), "tool_use": "x"}}, {}, "config hello"),
    "a named list in the JSON file": (
        {},
        {"chat_template.json": json.dumps({"chat_template": [{"name": "default", "template": plain("json")}]})},
        "json hello",
    ),
    "a file beside named ones": (
        {},
        {"chat_template.jinja": plain("jinja"), "additional_chat_templates/rag.jinja": plain("other")},
        "jinja hello",
    ),
}


@pytest.mark.parametrize("place", PLACES, ids=lambda name: name.replace(" ", "-"))
def test_a_template_is_found_wherever_it_is_published(place, tmp_path):
    config, files, expected = PLACES[place]
    tokenizer = HfTokenizer.from_dir(model_dir(tmp_path / "m", config, files=files))
    assert tokenizer.render_chat(CHAT) == expected


def test_a_template_may_be_chosen_by_name_or_given(tmp_path):
    named = [{"name": "a", "template": plain("config")}, {"name": "b", "template": plain("other")}]
    directory = model_dir(tmp_path / "m", {"chat_template": named})
    assert HfTokenizer.from_dir(directory, chat_template="b").render_chat(CHAT) == "other hello"
    assert HfTokenizer.from_dir(directory, chat_template=plain("model")).render_chat(CHAT) == "model hello"
    with pytest.raises(ConfigError, match=r"\['a', 'b'\], none called 'default'"):
        HfTokenizer.from_dir(directory).render_chat(CHAT)
    with pytest.raises(ConfigError, match=r"no chat template is named 'c'; there are \['a', 'b'\]"):
        HfTokenizer.from_dir(directory, chat_template="c").render_chat(CHAT)


def test_without_a_template_the_error_lists_where_it_looked(tmp_path):
    tokenizer = HfTokenizer.from_dir(model_dir(tmp_path / "m", {}))
    with pytest.raises(ConfigError) as caught:
        tokenizer.encode_chat(CHAT)
    for place in ("chat_template.jinja", "chat_template.json", "tokenizer_config.json", str(tmp_path / "m"), "prompt"):
        assert place in str(caught.value)


@pytest.mark.parametrize(
    ("config", "files"),
    [
        ({"chat_template": 5}, {}),
        ({"chat_template": [{"name": "default"}]}, {}),
        ({"chat_template": ["{{ messages }}"]}, {}),
        ({}, {"chat_template.json": '{"template": "x"}'}),
        ({}, {"chat_template.json": "x"}),
        ({}, {"chat_template.jinja": "{% if %}"}),
    ],
)
def test_a_malformed_template_is_refused(config, files, tmp_path):
    with pytest.raises(ConfigError, match="template"):
        HfTokenizer.from_dir(model_dir(tmp_path / "m", config, files=files)).render_chat(CHAT)


# The begin token

WRITES_BOS = "{{ bos_token }} {{ messages[0]['content'] }}"  # as Llama-3's and Gemma's do


@pytest.mark.parametrize("template", [WRITES_BOS, "{{ messages[0]['content'] }}"], ids=["writes it", "leaves it out"])
@pytest.mark.parametrize("config", [{}, {"add_bos_token": True}], ids=["post-processor", "config"])
def test_the_begin_token_appears_exactly_once_in_chat_and_in_raw_text(template, config, tmp_path):
    config = {"chat_template": template, **config}
    tokenizer = HfTokenizer.from_dir(model_dir(tmp_path / "m", config, bos_first=not config.get("add_bos_token")))
    assert tokenizer.encode_chat(CHAT) == [0, 2]
    assert tokenizer.encode("hello") == [0, 2]
    assert tokenizer.tokenizer.apply_chat_template(CHAT) == [0, 2]


def test_a_tokenizer_that_uses_no_begin_token_gets_one_only_from_its_template(tmp_path):
    tokenizer = HfTokenizer.from_dir(model_dir(tmp_path / "m", {"chat_template": WRITES_BOS}))
    assert tokenizer.encode_chat(CHAT) == [0, 2]
    assert tokenizer.encode("hello") == [2]


def test_special_tokens_published_as_objects_reach_the_template_as_text(tmp_path):
    config = {"chat_template": WRITES_BOS, "bos_token": {"content": "<s>", "lstrip": False}}
    assert HfTokenizer.from_dir(model_dir(tmp_path / "m", config)).render_chat(CHAT) == "<s> hello"


# Rendering


def test_whitespace_is_trimmed_as_models_were_trained():
    template = ChatTemplate(
        "{% for m in messages %}\n    {% if true %}\n{{ m.content }};\n    {% endif %}\n{% endfor %}", {}
    )
    assert template.render(CHAT) == "hello;\n"


def test_the_models_turn_is_opened_only_when_asked():
    template = ChatTemplate("{{ messages[0].content }}{% if add_generation_prompt %}>{% endif %}", {})
    assert template.render(CHAT) == "hello>"
    assert template.render(CHAT, add_generation_prompt=False) == "hello"


def test_the_extensions_published_templates_use_are_there():
    source = (
        "{% for m in messages %}{% if loop.index0 == 1 %}{% break %}{% endif %}"
        "{% generation %}{{ m.content | tojson }}{% endgeneration %}{% endfor %} {{ strftime_now('%d %b %Y') }}"
        "{% if tools is none %} no tools{% endif %}"
    )
    template = ChatTemplate(source, {}, now=lambda: datetime(2024, 7, 26))
    messages = [{"role": "user", "content": "<é>"}, {"role": "user", "content": "unseen"}]
    assert template.render(messages) == '"<é>" 26 Jul 2024 no tools'


def test_a_variable_of_the_template_can_be_set():
    template = ChatTemplate("{{ messages[0].content }}{% if enable_thinking %} hm{% endif %}", {})
    assert template.render(CHAT, enable_thinking=True) == "hello hm"


def test_text_parts_are_joined():
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    assert ChatTemplate(plain("x"), {}).render([{"role": "user", "content": parts}]) == "x hello"


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "non-empty list"),
        ("hello", "non-empty list"),
        ({"role": "user", "content": "hello"}, "non-empty list"),
        (["hello"], r"messages\[0\] must be an object"),
        ([{"content": "hello"}], r"messages\[0\] must be an object with a `role`"),
        ([*CHAT, {"role": "user"}], r"messages\[1\]\.content must be text, not NoneType"),
        ([{"role": "user", "content": 5}], r"messages\[0\]\.content must be text, not int"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], "not text; only text"),
    ],
)
def test_malformed_messages_are_refused_for_their_row(messages, words):
    with pytest.raises(RequestError, match=words):
        ChatTemplate(plain("x"), {}).render(messages)


def test_a_templates_own_refusal_is_quoted():
    template = ChatTemplate("{{ raise_exception('Conversation roles must alternate') }}", {})
    with pytest.raises(RequestError, match="Conversation roles must alternate"):
        template.render(CHAT)


def test_hidden_attributes_are_out_of_a_templates_reach():
    assert ChatTemplate("{{ messages.__class__ }}{{ strftime_now.__globals__ }}", {}).render(CHAT) == ""


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'content': 'other'}) }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{% include '/etc/hostname' %}",
        "{{ messages[7].content }}",
        "{{ 1 / 0 }}",
        "{{ ('x' * 100000000000) }}",
    ],
)
def test_a_hostile_or_broken_template_fails_its_row_and_changes_nothing(source):
    template = ChatTemplate(source, {})
    messages = [{"role": "user", "content": "hello"}]
    with pytest.raises(RequestError):
        template.render(messages)
    assert messages == CHAT
