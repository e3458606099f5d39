"""What each key of an input row may hold.

For:        the table of a row's options with their checks, and the keys of other tools that are refused by name.
Not for:    reading lines (formats) or limits that depend on a model (intake.py).
May import: the standard library, kv_control, maxtext_paged.rows and stop_strings.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

from kv_control.logit_options import MAX_ABS_BIAS, MAX_LOGIT_BIAS, MAX_TOP_LOGPROBS
from maxtext_paged.rows import MAX_SAMPLES
from maxtext_paged.stop_strings import MAX_STOP_CHARACTERS, MAX_STOP_STRINGS

PROMPTS = ("prompt", "messages", "tokens")
MAX_ID_CHARACTERS = 512
_MAX_TOKEN_ID = 2**31 - 1

Check = Callable[[Any], str | None]
"""Says what was wanted, or None where the value fits."""


def _at_least(low: int) -> Check:
    return lambda value: None if type(value) is int and value >= low else f"a whole number of at least {low}"


def _number(wanted: str, fits: Callable[[float], bool]) -> Check:
    def check(value: Any) -> str | None:
        if type(value) not in (int, float):
            return wanted
        try:
            number = float(value)
        except OverflowError:
            return wanted
        return None if math.isfinite(number) and fits(number) else wanted

    return check


def _is(kind: type, wanted: str) -> Check:
    return lambda value: None if type(value) is kind else wanted


def token_ids(value: Any) -> str | None:
    """The check of a list of token ids."""
    is_list = isinstance(value, list)
    fits = is_list and all(type(token) is int and 0 <= token <= _MAX_TOKEN_ID for token in value)
    return None if fits else f"a list of token ids in 0..{_MAX_TOKEN_ID}"


def stop_strings(value: Any) -> str | None:
    """The check of stop strings."""
    listed = [value] if isinstance(value, str) else value
    fits = isinstance(listed, list) and len(listed) <= MAX_STOP_STRINGS and all(map(_is_stop, listed))
    return None if fits else f"a string or at most {MAX_STOP_STRINGS} of them, of 1 to {MAX_STOP_CHARACTERS} characters"


def _is_stop(value: Any) -> bool:
    return (
        isinstance(value, str)
        and 1 <= len(value) <= MAX_STOP_CHARACTERS
        and not any("\ud800" <= letter <= "\udfff" for letter in value)
    )


def logit_bias(value: Any) -> str | None:
    """The check of a bias for some tokens, whose ids are written as JSON's keys are: as strings."""
    fits = isinstance(value, dict) and len(value) <= MAX_LOGIT_BIAS
    fits = fits and all(re.fullmatch(r"0|[1-9][0-9]{0,9}", str(key)) and int(key) <= _MAX_TOKEN_ID for key in value)
    fits = fits and all(_bias(number) is None for number in value.values())
    bound = f"{MAX_ABS_BIAS:g}"
    return None if fits else f"an object of at most {MAX_LOGIT_BIAS} token ids with numbers from -{bound} to {bound}"


_bias = _number("", lambda value: abs(value) <= MAX_ABS_BIAS)
_FROM_MINUS_2_TO_2 = _number("a number from -2 to 2", lambda value: -2 <= value <= 2)
_TRUE_OR_FALSE = _is(bool, "true or false")


def top_logprobs(value: Any) -> str | None:
    """The check of a number of alternatives."""
    fits = type(value) is int and 0 <= value <= MAX_TOP_LOGPROBS
    return None if fits else f"a whole number in 0..{MAX_TOP_LOGPROBS}"


OPTIONS: dict[str, Check] = {
    "max_tokens": _at_least(0),
    "temperature": _number("a finite number of at least 0", lambda value: value >= 0),
    "top_k": _at_least(0),
    "top_p": _number("a number above 0 and at most 1", lambda value: 0 < value <= 1),
    "min_p": _number("a number from 0 to 1", lambda value: 0 <= value <= 1),
    "seed": _is(int, "a whole number"),
    "stop_token_ids": token_ids,
    "ignore_eos": _is(bool, "true or false"),
    "min_tokens": _at_least(0),
    "n": lambda value: (
        None if type(value) is int and 1 <= value <= MAX_SAMPLES else f"a whole number in 1..{MAX_SAMPLES}"
    ),
    "stop": stop_strings,
    "include_stop_str_in_output": _TRUE_OR_FALSE,
    "repetition_penalty": _number("a number above 0, where 1 is off", lambda value: value > 0),
    "presence_penalty": _FROM_MINUS_2_TO_2,
    "frequency_penalty": _FROM_MINUS_2_TO_2,
    "logit_bias": logit_bias,
    "logprobs": _TRUE_OR_FALSE,
    "top_logprobs": top_logprobs,
    "prompt_logprobs": _TRUE_OR_FALSE,
    "echo": _TRUE_OR_FALSE,
}

_LATER = "is not supported yet"
_OTHER_FORM = "belongs to OpenAI's batch form, and the first row of this file has our own: one form a file"
UNSUPPORTED: dict[str, tuple[str, tuple[Any, ...]]] = {
    "best_of": ("is not supported: ask for `n` samples and choose among them", (1,)),
    "tenant": ("is not read from rows: the engine's owner sets `paged_tenant`", ()),
    "cache_salt": ("is not read from rows: the engine's owner sets `paged_tenant`", ()),
    "use_beam_search": ("is not supported: rows are sampled", (False,)),
    "bad_words": ("is not supported: `logit_bias` of -100 keeps single tokens away", ([],)),
    "allowed_token_ids": ("is not supported: `logit_bias` names single tokens", ([],)),
    "logits_processors": ("is not supported: rows carry no code", ([],)),
    "prompt_embeds": ("is not supported: prompts are text or token ids", ()),
    "multi_modal_data": ("is not supported: text only", ({},)),
    "guided_decoding_backend": ("is not supported: output is not constrained", ()),
    "guided_whitespace_pattern": ("is not supported: output is not constrained", ()),
    "return_tokens_as_token_ids": (_LATER, (False,)),
    "suffix": ("is not supported: text is only continued", ()),
    "stream": ("is not supported: records are written as rows finish", (False,)),
    "stream_options": ("is not supported: records are written as rows finish", ()),
    "response_format": ("is not supported: output is not constrained", ({"type": "text"},)),
    "structured_outputs": ("is not supported: output is not constrained", ()),
    "guided_json": ("is not supported: output is not constrained", ()),
    "guided_regex": ("is not supported: output is not constrained", ()),
    "guided_choice": ("is not supported: output is not constrained", ()),
    "guided_grammar": ("is not supported: output is not constrained", ()),
    "grammar": ("is not supported: output is not constrained", ()),
    "tools": (_LATER, ([],)),
    "tool_choice": (_LATER, ("none",)),
    "functions": (_LATER, ([],)),
    "lora": ("is not supported: the configuration names the weights", ()),
    "lora_request": ("is not supported: the configuration names the weights", ()),
    "adapter": ("is not supported: the configuration names the weights", ()),
    "length_penalty": ("is not supported: rows are sampled", (1,)),
    "truncate_prompt_tokens": ("is not supported: a prompt that is too long is refused, never cut", ()),
    "add_special_tokens": (_LATER, (True,)),
    "skip_special_tokens": (_LATER, (True,)),
    "spaces_between_special_tokens": (_LATER, (True,)),
    "add_generation_prompt": (_LATER, (True,)),
    "continue_final_message": (_LATER, (False,)),
    "chat_template": (f"{_LATER} in rows: the tokenizer's directory has it", ()),
    "chat_template_kwargs": (_LATER, ({},)),
    "priority": ("is not supported: rows run as there is room for them", (0,)),
    "modalities": ("is not supported: text only", (["text"],)),
    "parallel_tool_calls": (_LATER, (True, False)),
    "reasoning_effort": (_LATER, ()),
    "model": ("is not read from rows: the configuration names the model", ()),
    "images": ("is not supported: text only", ([],)),
    "audio": ("is not supported: text only", ()),
    "custom_id": (_OTHER_FORM, ()),
    "body": (_OTHER_FORM, ()),
    "url": (_OTHER_FORM, ()),
    "method": (_OTHER_FORM, ()),
}
"""Keys that are known elsewhere: why not here, and the values that ask for nothing and pass."""

KEYS = ("id", *PROMPTS, *OPTIONS)
"""Every key that is read."""

OTHER_NAMES = {
    "max_completion_tokens": "max_tokens",
    "max_new_tokens": "max_tokens",
    "max_length": "max_tokens",
    "prompt_token_ids": "tokens",
    "token_ids": "tokens",
    "input_ids": "tokens",
    "text": "prompt",
    "input": "prompt",
    "conversation": "messages",
}
"""What other tools call a key of ours; spelling alone would suggest the wrong one."""

# --- OpenAI's batch form -----------------------------------------------------------------------------------

BATCH_PROMPTS = {"/v1/completions": "prompt", "/v1/chat/completions": "messages"}
"""The prompt of a body, by the row's url. Options have their names here as in ``OPTIONS`` ..."""

BATCH_NAMES = {"max_completion_tokens": "max_tokens"}
"""... but for these, and for a completion's ``logprobs`` and ``prompt_logprobs``, which are numbers there."""

BATCH_LABELS = ("model", "user", "metadata", "store", "safety_identifier", "prompt_cache_key", "service_tier")
"""Keys of a body that change nothing here; ``model`` is echoed, the configuration names the one that answers."""

BATCH_DEFAULTS = {"/v1/completions": {"max_tokens": 16}, "/v1/chat/completions": {}}
"""What that interface documents where a body is silent."""
