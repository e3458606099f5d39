"""A group of replicas as one engine: what a job takes for its worker and its session.

For:        rows drawn, dealt, handed out and taken back; results as they come; the figures of all.
Not for:    processes (group.py), queues (deal.py), writing records (cli/generate.py).
May import: the standard library, maxtext_paged without MaxText.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

from maxtext_paged.replicas.deal import Deal
from maxtext_paged.replicas.figures import ReplicaRecorder
from maxtext_paged.replicas.group import Replica, ReplicaGroup
from maxtext_paged.replicas.wire import Message, result_of
from maxtext_paged.report.counts import JobCounts
from maxtext_paged.report.recorder import StepView
from maxtext_paged.row_order import FIRST_WINDOW_PER_SEQ, PrefixOrderedRows
from maxtext_paged.rows import Row, RowResult

SENT_PER_SEQ = 2
"""Rows sent to a replica per one that it can run: the next is always there, and few are out of others' reach."""


class ReplicasFailed(Exception):
    """No replica is left."""


class ReplicaWorker:
    """What a job takes for its worker; see ``PagedInferenceWorker``."""

    def __init__(self, group: ReplicaGroup, ready: Message) -> None:
        self._group, self._ready = group, ready
        self._deal = Deal(len(group.replicas), ready["tokens_per_page"] if ready["shares"] else 0)
        self._ordered: PrefixOrderedRows | None = None
        self._drawing = True
        self._recorder: ReplicaRecorder | None = None

    def recorder(self, counts: JobCounts) -> ReplicaRecorder:
        """One that takes what replicas report."""
        self._recorder = ReplicaRecorder(counts, self._group.merged)
        counts.replicas = len(self._group.replicas)
        return self._recorder

    @property
    def attainable_tokens(self) -> int | None:
        """As the engine's worker has it, over all replicas together."""
        return None if self._ordered is None else self._ordered.attainable_tokens

    def in_file_order(self, rows: Iterable[Row]) -> Iterable[Row]:
        """As the engine's worker does it."""
        choice = self._ready["file_order"]
        if choice == "input" or (choice == "auto" and not self._ready["shares"]):
            return rows
        first = FIRST_WINDOW_PER_SEQ * self._ready["max_num_seqs"] * len(self._group.replicas)
        self._ordered = PrefixOrderedRows(rows, self._ready["tokens_per_page"], first_window=first)
        return self._ordered

    def stop_drawing(self) -> None:
        """Hand out no more rows, and let every replica end after its step."""
        if not self._drawing:
            return
        self._drawing = False
        if self._ordered is not None:
            self._ordered.close()
        self._deal.clear()
        self._group.stop()

    def settle(self) -> None:
        """Every replica does it."""

    def complete(
        self, rows: Iterable[Row], on_step: Callable[[Any], None] | None = None, watch: Any = None
    ) -> Generator[RowResult, None, None]:
        """As the engine's worker does it; ``on_step`` is called after every wait for results."""
        group, source = self._group, iter(rows)
        more = True
        try:
            while True:
                if more and self._drawing:
                    more = self._draw(source)
                    self._hand_out()
                live = [replica for replica in group.replicas if replica.state != "gone"]
                if self._drawing and not more and not self._deal and not any(replica.sent for replica in live):
                    self._drawing = False
                    group.stop()  # every row has its result: the last figures come
                if not self._drawing and all(replica.state in ("stopped", "gone") for replica in live):
                    break
                if not live:
                    raise ReplicasFailed(f"no replica is left: {'; '.join(group.deaths)}")
                for replica, message in group.arrivals():
                    yield from self._answer(replica, message)
                if self._drawing:
                    self._hand_out()
                if on_step is not None:
                    on_step(self)
        finally:
            group.close()

    def _answer(self, replica: Replica, message: Message | None) -> Iterator[RowResult]:
        if message is None:
            if replica.state == "stopped":
                return
            if not self._drawing:
                replica.state, replica.sent = "stopped", {}
                return
            self._deal.put_back(replica.number, self._group.died(replica))
        elif message["what"] == "result":
            row = replica.sent.pop(message["result"]["index"])
            if self._recorder is not None:
                self._recorder.clocks.report(row.index, message["times"])
            yield result_of(message["result"], row)

    def _draw(self, source: Iterator[Row]) -> bool:
        """Fill the queues; whether there may be more rows."""
        if self._ordered is not None:
            self._ordered.read_ahead()
        window = FIRST_WINDOW_PER_SEQ * self._ready["max_num_seqs"] * len(self._group.replicas)
        while len(self._deal) < window:
            row = next(source, None)
            if row is None:
                return False
            self._deal.add(row, [len(replica.sent) for replica in self._group.replicas])
        return True

    def _hand_out(self) -> None:
        most = SENT_PER_SEQ * self._ready["max_num_seqs"]
        for replica in self._group.replicas:
            if replica.state == "running" and (room := most - len(replica.sent)) > 0:
                rows = self._deal.take(replica.number, room)
                if rows:
                    self._group.send(replica, rows)


class ReplicaSession:
    """What a job takes for its session: figures, and nothing that runs here."""

    def __init__(self, group: ReplicaGroup) -> None:
        self._group = group
        nobody: tuple[Any, ...] = ()
        self.driver = SimpleNamespace(scheduler=SimpleNamespace(running=nobody, waiting=nobody))

    def step_view(self) -> StepView:
        """Of all of them."""
        return self._group.merged.step_view()

    def gather(self, counts: JobCounts) -> None:
        """Of all of them."""
        self._group.merged.gather(counts)
        counts.replica_deaths = list(self._group.deaths)
        counts.replica_restarts, counts.returned_rows = self._group.num_restarts, self._group.num_returned

    def num_native_products(self) -> int:
        """Of all of them."""
        return self._group.merged.total("native_products")
