"""A request's tokens, handed out one at a time.

For:        callers of ``generate_paged``, who see each token once although steps may run ahead of them.
Not for:    running anything.
May import: kv_control.
"""

from __future__ import annotations

from dataclasses import dataclass

from kv_control.request import FinishReason, Request


@dataclass(frozen=True, slots=True)
class PagedToken:
    """The next token of a request, as ``generate_paged`` hands it out.

    Attributes:
      request: whose it is.
      token: None where the request ended without one (an error).
      logprob: of the token, under the unmodified model distribution.
      finish_reason: set on the last one: "stop", "length", "cancelled" or "error". error: why, for the last.
    """

    request: Request
    token: int | None
    logprob: float
    finish_reason: FinishReason | None = None
    error: str | None = None


@dataclass(slots=True)
class TokenStream:
    """A request between prefill and release, and how many of its tokens its caller has seen.

    Attributes:
      ended: the caller has seen the last one.
    """

    request: Request
    num_reported: int = 0
    ended: bool = False

    @property
    def unreported(self) -> bool:
        """Whether a token waits to be handed out."""
        return self.num_reported < self.request.num_generated

    @property
    def starved(self) -> bool:
        """Whether only another step can bring its next token."""
        return not self.unreported and not self.request.finished

    def next(self) -> PagedToken | None:
        """The next token to hand out, or the end of a request that has none left; None where nothing is new."""
        request = self.request
        if self.ended or self.starved:
            return None
        token, logprob = None, float("nan")
        if self.unreported:
            position = request.num_prompt_tokens + self.num_reported
            token, logprob = request.token_at(position), request.logprob_at(position)
            self.num_reported += 1
        self.ended = request.finished and not self.unreported
        if not self.ended:
            return PagedToken(request, token, logprob)
        return PagedToken(request, token, logprob, request.finish_reason, request.error)
