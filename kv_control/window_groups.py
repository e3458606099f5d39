"""All window groups of a control plane as one: what every step and every request asks of each of them.

For:        holding, sliding, sharing and packing window pages beside those of layers that see everything.
Not for:    one group's books (window_pages), or the order of a step (control_plane).
May import: the standard library, numpy, kv_common.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from kv_common.errors import ConfigError, PageStateError
from kv_common.page_table import KvPageTableV1
from kv_common.pages import full_pages, pages_for_tokens
from kv_common.window_group import WindowGroup
from kv_control.plan import PageChores, StepBatch
from kv_control.prefix_index import PageNode
from kv_control.sharing import PageSharing
from kv_control.window_pages import WindowPages

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
_NO_LIMIT = np.iinfo(np.int64).max
_NO_FORKS = -1


class WindowGroups:
    """Window groups in order. Empty for a model without windows: then nothing here costs or changes anything.

    Args:
      groups: windows and pools. sharing: of the control plane's other pages, whose prefix index names these too.
      max_num_seqs, max_pages_per_request, num_pages: of the control plane. step_tokens: of its largest step.

    Raises:
      ConfigError: a group's pool is too small for a request that the other pool holds.
    """

    def __init__(
        self,
        groups: Sequence[WindowGroup],
        sharing: PageSharing,
        *,
        max_num_seqs: int,
        max_pages_per_request: int,
        num_pages: int,
        step_tokens: int,
    ) -> None:
        self._sharing = sharing
        self._step_tokens = step_tokens
        self._fork_at: Int64 = np.full(max_num_seqs, _NO_FORKS, np.int64)
        self.groups = tuple(
            WindowPages(group, max_num_seqs=max_num_seqs, max_pages_per_request=max_pages_per_request)
            for group in groups
        )
        for group in groups:
            alone = group.step_pages(num_rows=1, num_tokens=step_tokens)
            if group.layout.num_pages < min(num_pages, max_pages_per_request, alone):
                raise ConfigError(
                    f"{group.layout.num_pages} pages for layers with a window of {group.window} tokens do not hold one "
                    f"request in steps of {step_tokens} tokens, which needs {alone}: raise `paged_num_pages`, or lower "
                    "`paged_max_num_batched_tokens`"
                )
        if groups and sharing.index is not None:
            sharing.index.on_forget = self._forget

    def __bool__(self) -> bool:
        return bool(self.groups)

    def __iter__(self) -> Iterator[WindowPages]:
        return iter(self.groups)

    # --- one step ----------------------------------------------------------------------------------------

    def missing(self, rows: Int64, length: Int64) -> tuple[Int64, ...]:
        """Per group, int64 ``[n]``: pages that rows lack for so many tokens."""
        return tuple(pages.missing(rows, length) for pages in self.groups)

    def have_room(self, added: tuple[Int64, ...]) -> bool:
        """Whether every group can give so many pages."""
        return all(int(n.sum()) <= pages.num_available for pages, n in zip(self.groups, added, strict=True))

    def extend(self, rows: Int64, added: tuple[Int64, ...]) -> None:
        """Give rows pages, which ``have_room`` has found to be there."""
        for pages, n in zip(self.groups, added, strict=True):
            pages.extend(rows, n)

    def shorten(self, row: int, i: int, added: tuple[Int64, ...]) -> None:
        """Take back what entry ``i`` of ``added`` gave a row."""
        for pages, n in zip(self.groups, added, strict=True):
            pages.shorten(row, int(n[i]))

    def chores(self) -> tuple[PageChores, ...]:
        """What is to be done to each group's pools before the next step."""
        return tuple(PageChores(pages.dirty_held, pages.copies.pending) for pages in self.groups)

    def done(self, chores: tuple[PageChores, ...]) -> None:
        """Record that these were dispatched."""
        for pages, chore in zip(self.groups, chores, strict=True):
            pages.allocator.confirm_scrubbed(chore.dirty_pages)
            pages.copies.made(chore.copies)

    def pack(self, batch: StepBatch, *, token_rung: int, row_rung: int) -> tuple[KvPageTableV1, ...]:
        """Each group's table of a step.

        Raises:
          PageStateError: a page of the step is dirty.
        """
        tables = []
        for pages in self.groups:
            table, named = pages.pack(
                batch.rows, batch.start, batch.num_tokens, token_rung=token_rung, row_rung=row_rung
            )
            dirty = pages.allocator.dirty_among(named) if len(pages.dirty_held) else ()
            if len(dirty):
                raise PageStateError(
                    f"pages {list(dirty)} of window {pages.group.window} still carry another request's K/V: scrub them "
                    "first"
                )
            tables.append(table)
        return tuple(tables)

    def slide(self, rows: Int64, positions: Int64, *, wait: bool = True) -> None:
        """Give back what no query of each row from its position on sees.

        Args:
          wait: pages stay that the row is still to offer to the prefix index, or that others are about to fork from.
        """
        if not self.groups:
            return
        kept = None
        if wait:
            positions = self.held_back(rows, positions)
            if self._sharing.index is not None:
                offered = [self._sharing.num_offered(row) for row in rows.tolist()]
                kept = np.array([_NO_LIMIT if n is None else n for n in offered], np.int64)
        for pages in self.groups:
            pages.slide(rows, positions, kept)

    def held_back(self, rows: Int64, positions: Int64) -> Int64:
        """Each row's position; for a page's worth of tokens behind its fork point, no later than that."""
        fork_at, size = self._fork_at[rows], self.groups[0].group.layout.tokens_per_page
        near = (fork_at >= 0) & (positions <= fork_at + size)
        back: Int64 = np.where(near, np.minimum(positions, fork_at), positions)
        return back

    def expect_forks(self, row: int, num_tokens: int) -> None:
        """Others are about to begin behind this many tokens of a row: it keeps the window before them for a while."""
        self._fork_at[row] = num_tokens

    def take_freed(self) -> tuple[Int32, ...]:
        """Per group, int32: pages that became free since the last call."""
        return tuple(pages.take_freed() for pages in self.groups)

    # --- one request's life ------------------------------------------------------------------------------

    def release(self, row: int) -> None:
        """A row ends."""
        self._fork_at[row] = _NO_FORKS
        for pages in self.groups:
            pages.release(row)

    def num_usable(self, nodes: Sequence[PageNode]) -> int:
        """The most leading nodes of a chain behind which every group still has a whole window."""
        usable, before = len(nodes), -1
        while usable != before:
            before = usable
            for pages in self.groups:
                usable = pages.cache.num_usable(nodes[:usable])
        return usable

    def adopt(self, row: int, nodes: Sequence[PageNode]) -> None:
        """Begin a row without pages behind a chain, as long as ``num_usable`` allows."""
        for pages in self.groups:
            pages.adopt(row, nodes)

    def can_fork(self, source: int, num_tokens: int) -> bool:
        """Whether a row still has every window before this many tokens."""
        return all(pages.can_fork(source, num_tokens) for pages in self.groups)

    def can_copy(self, num_tokens: int) -> bool:
        """Whether every group has a page for the copy of a partial last one, if there is one."""
        return all(
            pages.num_available or full_pages(num_tokens, size) == pages_for_tokens(num_tokens, size)
            for pages in self.groups
            for size in (pages.group.layout.tokens_per_page,)
        )

    def fork(self, source: int, target: int, num_tokens: int) -> None:
        """Begin row ``target`` behind tokens of ``source``; see ``WindowPages.fork``."""
        for pages in self.groups:
            pages.fork(source, target, num_tokens)

    def offer(self, row: int, node: PageNode) -> None:
        """Let the last node of a row's chain name the row's window pages, where it still has them."""
        for pages in self.groups:
            pages.offer(row, len(self._sharing.path(row)) - 1, node)

    def _forget(self, node: PageNode) -> None:
        for pages in self.groups:
            pages.forget(node)

    # --- admission ---------------------------------------------------------------------------------------

    def fit(
        self,
        running: Int64,
        kv_tokens: Int64,
        left: Int64,
        *,
        nodes: Sequence[PageNode] = (),
        num_shared_tokens: int = 0,
    ) -> bool:
        """Whether every group can give a request what it needs beside what it shares, once all that run have theirs.

        Each is charged its window; and all prompts under way, together, what one step can add to their windows.

        Args:
          running: int64 ``[n]``, rows. kv_tokens, left: int64 ``[n + 1]``, of each row and last of the request: tokens
            that it is to hold soon, and tokens that it has not computed.
          nodes: cached pages that the request begins with. num_shared_tokens: tokens that it need not run.
        """
        return all(self._fits(pages, running, kv_tokens, left, nodes, num_shared_tokens) for pages in self.groups)

    def _fits(
        self,
        pages: WindowPages,
        running: Int64,
        kv_tokens: Int64,
        left: Int64,
        nodes: Sequence[PageNode],
        num_shared_tokens: int,
    ) -> bool:
        size = pages.group.layout.tokens_per_page
        whole = pages_for_tokens(kv_tokens, size)
        window = np.minimum(whole, pages.group.row_pages)
        step = min(pages_for_tokens(self._step_tokens, size), int((whole - window)[left > 1].sum()))
        begun = full_pages(num_shared_tokens, size) - pages.group.first_page(num_shared_tokens)
        held = np.append(pages.end[running] - pages.first[running], begun)
        adopted = nodes[len(nodes) - begun :] if nodes else ()
        pinned = sum(pages.allocator.references[pages.cache.page_of(node)] == 1 for node in adopted)
        wanted = int(np.maximum(window - held, 0).sum()) + step
        return bool(wanted <= pages.num_available - pinned)
