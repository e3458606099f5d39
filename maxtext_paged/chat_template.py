"""Chat messages to prompt text: finding a model's template and rendering it.

For:        the templates models publish, in any of the places they publish them, in a sandbox.
Not for:    token ids.
May import: the standard library, jinja2, kv_common.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kv_common.errors import ConfigError, RequestError

Templates = Mapping[str, str]
"""Template texts by name; a model's only template is called ``default``."""


class ChatTemplate:
    """One compiled template. Rendering it has no side effects and reaches no files or modules."""

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], *, now: Callable[[], datetime] = datetime.now
    ) -> None:
        """Compile ``source``.

        Args:
          special_tokens: texts the template may name, such as ``{"bos_token": "<s>"}``.
          now: the clock behind ``strftime_now``, with which some templates write today's date.

        Raises:
          ConfigError: the template is not valid Jinja.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: now().strftime(form)
        self._special_tokens = dict(special_tokens)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigError(f"the chat template is not valid Jinja: {error}") from error

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **more: Any) -> str:
        """The prompt text of ``messages``.

        Args:
          messages: dicts with a ``role`` and a text ``content`` (a string, or OpenAI's list of text parts).
          add_generation_prompt: end with what opens the model's turn.
          more: further variables that the template reads.

        Raises:
          RequestError: the messages are malformed, or the template refuses them (its own words are quoted).
        """
        checked = [_message(index, message) for index, message in enumerate(_listed(messages))]
        variables = {"tools": None, "documents": None, **self._special_tokens, **more}
        try:
            return self._template.render(messages=checked, add_generation_prompt=add_generation_prompt, **variables)
        except Exception as error:  # a template is a stranger's program: whatever it raises fails this row only
            reason = str(error) or type(error).__name__
            raise RequestError(f"the chat template refuses these messages: {reason}") from error


def find_templates(directory: Path, tokenizer_config: Mapping[str, Any]) -> Templates:
    """All templates of a model directory, by name; empty if there are none.

    A template in a file of its own wins over one inside tokenizer_config.json, as in transformers.

    Raises:
      ConfigError: a place holds something that is not a template.
    """
    found: dict[str, str] = {}
    path = directory / "chat_template.json"
    if path.is_file():
        try:
            value = json.loads(path.read_text(encoding="utf-8"))["chat_template"]
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path}: expected a JSON object with a chat_template ({error})") from error
        found |= _named(value, str(path))
    if (value := tokenizer_config.get("chat_template")) is not None:
        found |= _named(value, "tokenizer_config.json")
    path = directory / "chat_template.jinja"
    if path.is_file():
        found["default"] = path.read_text(encoding="utf-8")
    for path in sorted((directory / "additional_chat_templates").glob("*.jinja")):
        found[path.stem] = path.read_text(encoding="utf-8")
    return found


def choose_template(templates: Templates, asked: str | None, directory: Path | None) -> str:
    """The text of the template to use.

    Args:
      asked: the name of one of ``templates``, or a whole template that replaces them; ``None`` takes
        the one called ``default``, or the only one.

    Raises:
      ConfigError: there is none, or several of which none is the default; the message says where it looked.
    """
    if asked:
        if asked not in templates and "{" not in asked:
            raise ConfigError(f"no chat template is named {asked!r}; there are {sorted(templates)}")
        return templates.get(asked, asked)
    if not templates:
        where = directory or "the tokenizer"
        raise ConfigError(
            f"no chat template: looked for chat_template.jinja, chat_template.json and the chat_template key of "
            f"tokenizer_config.json in {where}; set `chat_template`, or give `prompt` text instead of `messages`"
        )
    if "default" in templates:
        return templates["default"]
    if len(templates) == 1:
        return next(iter(templates.values()))
    raise ConfigError(f"chat templates {sorted(templates)}, none called 'default': name one as `chat_template`")


class _GenerationTag(Extension):
    """``{% generation %}`` marks the assistant's words for training; here its body is just rendered."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    # Jinja's own filter escapes <, > and & for HTML; models were trained on the plain characters.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _named(value: Any, place: str) -> dict[str, str]:
    """Templates in the forms they are published in: a text, a list of name and template, a mapping."""
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, Mapping):
        pairs: Iterable[Any] = value.items()
    elif isinstance(value, list) and all(isinstance(item, Mapping) for item in value):
        pairs = [(item.get("name"), item.get("template")) for item in value]
    else:
        pairs = [(None, None)]
    named = dict(pairs)
    if not all(isinstance(name, str) and isinstance(text, str) for name, text in named.items()):
        raise ConfigError(f"{place}: chat_template must be a text or a list of {{name, template}} objects")
    return named


def _listed(messages: Any) -> Sequence[Any]:
    if not isinstance(messages, list | tuple) or not messages:
        raise RequestError("`messages` must be a non-empty list of {role, content} objects")
    return messages


def _message(index: int, message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError(f"messages[{index}] must be an object with a `role` and a `content`")
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(_text_of(index, part) for part in content)
    if not isinstance(content, str) and not (content is None and "tool_calls" in message):
        raise RequestError(f"messages[{index}].content must be text, not {type(content).__name__}")
    return {**message, "content": content}


def _text_of(index: int, part: Any) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return part["text"]
    raise RequestError(f"messages[{index}].content holds a part that is not text; only text is supported")
