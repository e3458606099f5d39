"""Chat messages to prompt text: finding a model's template and rendering it.

For:        the templates models publish, in any of the places they publish them, in a sandbox with limits.
Not for:    token ids, or the sandbox itself (template_process.py).
May import: the standard library, kv_common, template_process.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from kv_common.errors import ConfigError, RequestError
from maxtext_paged.template_process import TemplateRenderer, shared_renderer

Templates = Mapping[str, str]
"""Template texts by name; a model's only template is called ``default``."""

MAX_SOURCE_CHARACTERS = 2**20
"""Of a template. Published ones have some thousands."""


class ChatTemplate:
    """One template. Rendering it has no side effects, reaches no files or modules, and ends within limits."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        *,
        now: Callable[[], datetime] = datetime.now,
        renderer: TemplateRenderer | None = None,
    ) -> None:
        """Compile ``source``.

        Args:
          special_tokens: texts the template may name, such as ``{"bos_token": "<s>"}``.
          now: the clock behind ``strftime_now``, with which some templates write today's date.
          renderer: where it runs, and what it may take; None is this process's.

        Raises:
          ConfigError: the template is not valid Jinja, or takes too much to compile.
        """
        if len(source) > MAX_SOURCE_CHARACTERS:
            raise ConfigError(
                f"the chat template has {len(source)} characters; at most {MAX_SOURCE_CHARACTERS} are read"
            )
        self._source, self._special_tokens, self._now = source, dict(special_tokens), now
        self._renderer = renderer or shared_renderer()
        try:
            self._renderer.check(source)
        except RequestError as error:
            raise ConfigError(f"the chat template cannot be compiled: {error}") from None

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
        variables |= {"messages": checked, "add_generation_prompt": add_generation_prompt}
        try:
            return self._renderer.render(self._source, variables, self._now())
        except RequestError as error:  # a stranger's program: whatever it does fails this row only
            raise RequestError(f"the chat template refuses these messages: {error}") from None


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
