"""Whether a waiting request may start to run now, and with which pages it begins.

For:        finding what a request can share, and weighing what it still needs against what is left.
Not for:    the order of the queue (scheduler), or the pages themselves (control_plane).
May import: the standard library, numpy, kv_common.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

from kv_common.pages import full_pages, pages_for_tokens
from kv_control.control_plane import ControlPlane
from kv_control.plan import Int64
from kv_control.prefix_index import PageNode
from kv_control.request import Request, RequestStatus
from kv_control.request_table import RequestTable

NEVER = np.iinfo(np.int64).max
"""``num_published`` of a request that offers no more pages."""


@dataclass(frozen=True, slots=True)
class Shared:
    """What a request begins with.

    Attributes:
      nodes: cached pages to adopt, in order.
      source: a running request of its group to fork from, instead; None: nobody.
      num_tokens: tokens that it need not run.
      num_whole_pages: pages of those that it shares; a partial one is copied.
      num_pages_wanted: whole pages that could have been found at best.
      logprobs: float32, of the leading prompt tokens, where the cache knows them and they are wanted.
    """

    nodes: tuple[PageNode, ...] = ()
    source: Request | None = None
    num_tokens: int = 0
    num_whole_pages: int = 0
    num_pages_wanted: int = 0
    logprobs: NDArray[np.float32] | None = None


class Admission:
    """Looks up what a request can share, and keeps who is prefilling which page right now.

    Args:
      control: rows and pages. table: the running requests.
    """

    def __init__(self, control: ControlPlane, table: RequestTable) -> None:
        self._control = control
        self._table = table
        self._tokens_per_page = control.layout.tokens_per_page
        self._prefilling: dict[bytes, Request] = {}
        self._groups: dict[int, list[Request]] = {}

    # --- what can be shared --------------------------------------------------------------------------------

    def shared(self, request: Request) -> Shared | None:
        """What ``request`` could begin with now; None when it should wait for pages that another request is just
        computing, rather than compute them again."""
        group = self._groups.get(request.group, []) if request.group is not None else []
        if group and request.num_prompt_tokens > 1:
            ready = [member for member in group if self._can_fork(member, request)]
            if ready:
                num_tokens = request.num_prompt_tokens - 1
                whole = full_pages(num_tokens, self._tokens_per_page)
                return Shared(source=ready[0], num_tokens=num_tokens, num_whole_pages=whole)
            if any(self._will_fork(member, request) for member in group):
                return None
        return Shared() if self._control.prefix_index is None else self._cached(request)

    def _will_fork(self, source: Request, request: Request) -> bool:
        """Whether the prompt is still being computed, or what it brought is on its way."""
        computing = source.num_computed < source.num_prompt_tokens - 1
        return computing or (request.want_prompt_logprobs and source.want_prompt_logprobs)

    def _can_fork(self, source: Request, request: Request) -> bool:
        wants = request.want_prompt_logprobs and request.num_known_prompt_logprobs < request.num_prompt_tokens
        knows = source.num_known_prompt_logprobs >= request.num_prompt_tokens
        ready = source.num_computed >= request.num_prompt_tokens - 1 and (knows or not wants)
        handle = source.handle
        return ready and handle is not None and self._control.can_fork(handle, request.num_prompt_tokens - 1)

    def _cached(self, request: Request) -> Shared | None:
        """The longest chain of cached pages, at least one token short of everything the request has.

        Where prompt logprobs are wanted, the chain ends where they are no longer known: the logprob of a page's first
        token comes from the token before it, so the page behind the last known one is computed again from its start.
        """
        index, page = self._control.prefix_index, self._tokens_per_page
        assert index is not None
        tokens = request.tokens
        keys = self.page_keys(request, tokens)
        nodes = index.match(keys, tokens)
        at_most = (len(tokens) - 1) // page
        scores = request.want_prompt_logprobs and request.num_known_prompt_logprobs < request.num_prompt_tokens
        usable = self._control.windows.num_usable(nodes[:at_most])
        if usable < at_most:
            ahead = self._prefilling.get(keys[usable])
            if ahead is not None and (not scores or ahead.want_prompt_logprobs) and ahead is not request:
                return None
        logprobs = None
        if scores:
            known = [node.token_logprobs for node in takewhile(lambda node: node.token_logprobs is not None, nodes)]
            logprobs = np.concatenate([np.zeros(0, np.float32), *(one for one in known if one is not None)])
            num_known = max(len(logprobs), request.num_known_prompt_logprobs)
            if num_known < request.num_prompt_tokens:
                usable = self._control.windows.num_usable(nodes[: min(usable, (num_known - 1) // page)])
        return Shared(tuple(nodes[:usable]), None, usable * page, usable, at_most, logprobs)

    def page_keys(self, request: Request, tokens: NDArray[np.int32]) -> list[bytes]:
        """The chained keys of all whole pages of ``tokens``, the request's own (or of more, where it had more)."""
        index, namespace = self._control.prefix_index, self._control.prefix_namespace
        assert index is not None and namespace is not None
        if request.keys_namespace != namespace:
            self._computed(request, request.page_keys)
            request.keys_namespace, request.page_keys = namespace, []
        keys = request.page_keys
        if len(tokens) // self._tokens_per_page > len(keys):
            last = keys[-1] if keys else namespace
            keys += index.page_keys(last, tokens[len(keys) * self._tokens_per_page :])
        return keys

    # --- whether it fits -----------------------------------------------------------------------------------

    def fits(self, request: Request, shared: Shared, running: Int64) -> bool:
        """Whether the pages that ``request`` needs beside its shared ones are left, once all that run have theirs.

        Cached pages that it is about to read itself no longer count as room.
        """
        control = self._control
        wanted = self.pages_wanted(request)
        pinned = sum(node.num_locks == 0 for node in shared.nodes)
        held = control.page_map.counts[running]
        promised = self._pages_wanted(self._table.num_to_come(running), self._table.max_kv_tokens[running])
        spoken_for = int(np.maximum(promised - held, 0).sum())
        references = int(np.maximum(promised, held).sum()) + wanted
        room = control.num_available_pages - pinned - spoken_for
        if wanted - shared.num_whole_pages > room or references > control.limits.max_step_references:
            return False
        return not control.windows or self._windows_fit(request, shared, running)

    def _windows_fit(self, request: Request, shared: Shared, running: Int64) -> bool:
        table = self._table
        to_come = np.append(table.num_to_come(running), request.num_tokens)
        most = np.append(table.max_kv_tokens[running], request.max_kv_tokens)
        computed = np.append(table.num_computed[running], shared.num_tokens)
        return self._control.windows.fit(
            running,
            np.minimum(to_come + self._tokens_per_page, most),
            to_come - computed,
            nodes=shared.nodes,
            num_shared_tokens=shared.num_tokens,
        )

    def pages_wanted(self, request: Request) -> int:
        """Pages for all tokens a request has and a page's worth more, as far as it can ever need them.

        Since all that run are counted so when another is let in, it is not sent back for want of room before
        one of them has outgrown a page's worth of new tokens: a resumed request does not bounce.
        """
        layout = self._control.layout
        return layout.pages_for(min(request.num_tokens + layout.tokens_per_page, request.max_kv_tokens))

    def _pages_wanted(self, num_tokens: Int64, max_kv_tokens: Int64) -> Int64:
        page = self._tokens_per_page
        return pages_for_tokens(np.minimum(num_tokens + page, max_kv_tokens), page)

    # --- who runs ------------------------------------------------------------------------------------------

    def entered(self, request: Request, shared: Shared) -> None:
        """Note a request that starts to run, and the pages it is going to compute."""
        if request.group is not None:
            self._groups.setdefault(request.group, []).append(request)
            if request.handle is not None:
                self._control.windows.expect_forks(request.handle.row, request.num_prompt_tokens - 1)
        if self._control.prefix_index is not None:
            tokens = request.tokens
            if len(tokens) // self._tokens_per_page > shared.num_whole_pages:
                for key in self.page_keys(request, tokens)[shared.num_whole_pages :]:
                    self._prefilling.setdefault(key, request)

    def left(self, request: Request) -> None:
        """Forget a request that stops running."""
        if request.group is not None and request in self._groups.get(request.group, ()):
            self._groups[request.group].remove(request)
            if not self._groups[request.group]:
                del self._groups[request.group]
        self._computed(request, request.page_keys)

    def _computed(self, request: Request, keys: Iterable[bytes]) -> None:
        for key in keys:
            if self._prefilling.get(key) is request:
                del self._prefilling[key]

    def publish(self, request: Request, num_computed: int) -> None:
        """Offer the whole pages among a request's first ``num_computed`` tokens that were not offered before."""
        handle, table, page = request.handle, self._table, self._tokens_per_page
        if handle is None or request.status is not RequestStatus.RUNNING:
            return
        first, last = int(table.num_published[handle.row]), full_pages(num_computed, page)
        keys = self.page_keys(request, table.tokens[handle.row, : last * page])
        table.num_published[handle.row] = last
        for i in range(first, last):
            tokens = table.tokens[handle.row, i * page : (i + 1) * page]
            if not self._control.publish(handle, keys[i], tokens, self._page_logprobs(request, i)):
                table.num_published[handle.row] = NEVER  # below an unpublished page nothing can be found
                self._computed(request, request.page_keys)  # so nobody need wait for the rest
                return
        self._computed(request, keys[first:last])

    def _page_logprobs(self, request: Request, i: int) -> NDArray[np.float32] | None:
        """float32 ``[tokens_per_page]``, the logprobs of a page's tokens, where the request knows them all."""
        begin, end, num_prompt = i * self._tokens_per_page, (i + 1) * self._tokens_per_page, request.num_prompt_tokens
        if begin < num_prompt and request.num_known_prompt_logprobs < min(end, num_prompt):
            return None
        row = self._table.logprobs[request.handle.row]  # type: ignore[union-attr]
        if begin >= num_prompt:
            generated: NDArray[np.float32] = row[begin:end]
            return generated
        both: NDArray[np.float32] = np.concatenate([request.prompt_logprobs[begin:end], row[num_prompt:end]])
        return both
