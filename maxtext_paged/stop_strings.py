"""Stop strings: text that ends a row, wherever its tokens begin and end.

For:        watching one request's text, and what is left of it when a stop string was found.
Not for:    stop tokens (kv_control.request), or when to look (worker.py looks after every step).
May import: the standard library, kv_control.

The text is cut before the first stop string in it. Token ids and logprobs keep every token that was generated up to the
one that completed it, the same rule as for a token that ends a row: ids say what the model did, text says what is
wanted of it. A stop string counts only if it ends behind the first ``min_tokens`` tokens' text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from kv_control.request import Request

MAX_STOP_STRINGS = 64
MAX_STOP_CHARACTERS = 1000

_SLACK = 16
"""Characters that the beginning of a window may lack (a character in two tokens, a space that is cut there)."""

Decode = Callable[[Sequence[int]], str]


class StopWatch:
    """Looks at one request's text whenever it has a new token.

    Only the end of the text is decoded each time; where that holds a stop string, the whole is looked at once.

    Args:
      stops: none is empty.
      decode: text of token ids.
      include: leave the stop string in the text.
      special: stop strings that are a special token's text, which text does not show, to the token (it ends the request
        as a stop token).

    Attributes:
      text: the row's text once a stop string has ended it; None before.
    """

    def __init__(
        self,
        request: Request,
        stops: Sequence[str],
        decode: Decode,
        *,
        include: bool = False,
        special: Mapping[str, int] | None = None,
    ) -> None:
        self.request = request
        self.text: str | None = None
        self._stops = tuple(stops)
        self._decode = decode
        self._include = include
        self._special = {token: stop for stop, token in (special or {}).items()}
        self._enough = max(map(len, stops)) + _SLACK
        self._ids: list[int] = []
        self._start = 0  # of the window

    def look(self) -> bool:
        """Take the tokens that are new; whether a stop string has ended the row."""
        request, ids = self.request, self._ids
        if self.text is not None:
            return True
        new = range(request.num_prompt_tokens + len(ids), request.num_tokens)
        for position in new:
            ids.append(request.token_at(position))
            if self._ends_by_token(position):
                if self._include and ids[-1] in self._special:
                    self.text = self._decode(ids[:-1]) + self._special[ids[-1]]
                    return True
                continue  # this token is not in the text
            if len(ids) > request.min_tokens and self._window_has_stop():
                self.text = self._cut()
                if self.text is not None:
                    return True
        return False

    def _ends_by_token(self, position: int) -> bool:
        request = self.request
        return request.finish_reason == "stop" and position == request.num_tokens - 1

    def _window_has_stop(self) -> bool:
        text = self._decode(self._ids[self._start :])
        found = any(stop in text for stop in self._stops)
        if len(text) > 4 * self._enough:
            middle = (self._start + len(self._ids)) // 2
            if len(self._decode(self._ids[middle:])) >= self._enough:
                self._start = middle
        return found

    def _cut(self) -> str | None:
        """The text up to the first stop string that counts."""
        text, request = self._decode(self._ids), self.request
        floor = len(self._decode(self._ids[: request.min_tokens])) if request.min_tokens else 0
        places = []
        for stop in self._stops:
            place = text.find(stop, max(0, floor - len(stop) + 1))
            if place >= 0:
                places.append((place, place + len(stop)))
        if not places:
            return None
        start, end = min(places)
        return text[: end if self._include else start]
