"""The replicas of a job: started, fed, started again once where one dies, and stopped.

For:        a ``Model`` whose engine is several processes: what the job sees is one worker and one session.
Not for:    which rows go where (deal.py), what a replica does (child.py), writing records (cli/generate.py).
May import: the standard library, kv_control, maxtext_paged without MaxText.

Records are written by the job, as with one engine: nothing of what makes an output whole or resumable is here.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from kv_control.plan import SamplingSpec
from maxtext_paged.cli import CommandError, ExitCode, say
from maxtext_paged.cli.model import Engine, Model
from maxtext_paged.intake import Intake
from maxtext_paged.replicas.deal import Deal
from maxtext_paged.replicas.devices import Placement
from maxtext_paged.replicas.figures import Merged, ReplicaRecorder
from maxtext_paged.replicas.wire import Channel, Message, packed_row, result_of
from maxtext_paged.report.counts import JobCounts
from maxtext_paged.report.recorder import StepView
from maxtext_paged.row_order import FIRST_WINDOW_PER_SEQ, PrefixOrderedRows
from maxtext_paged.rows import Row, RowResult

COMMAND = (sys.executable, "-m", "maxtext_paged.replicas.child")
SENT_PER_SEQ = 2
"""Rows sent to a replica per one that it can run: the next is always there, and few are out of others' reach."""
MAX_STARTS = 2
_WAIT_S = 0.1


class ReplicasFailed(Exception):
    """No replica is left."""


def tokenizer_of(options: Mapping[str, Any]) -> Any:
    """The tokenizer that the configuration names."""
    from maxtext_paged.tokenizer import load_tokenizer

    return load_tokenizer(SimpleNamespace(**options))


@dataclass(slots=True, eq=False)
class _Replica:
    """One replica.

    Attributes:
      life: how often it was started. state: "opening", "opened", "running", "stopped" or "gone".
      sent: rows without a result, by index. failure: what it said before it ended.
    """

    number: int
    placement: Placement
    process: subprocess.Popen[bytes] | None = None
    channel: Channel | None = None
    life: int = 0
    state: str = "opening"
    opened: Message = field(default_factory=dict)
    ready: Message = field(default_factory=dict)
    sent: dict[int, Row] = field(default_factory=dict)
    failure: Message | None = None


class ReplicaGroup:
    """Processes, and what arrives from them.

    Args:
      placements: one for each. config, overrides: of the command. warmup: whether to obtain all programs first.
    """

    def __init__(
        self, placements: Sequence[Placement], config: str, overrides: Sequence[str], *, warmup: bool = False
    ) -> None:
        self.replicas = [_Replica(number, placement) for number, placement in enumerate(placements)]
        self.merged = Merged()
        self.deaths: list[str] = []
        self.num_restarts = self.num_returned = 0
        self._config, self._overrides, self._warmup = config, list(overrides), warmup
        self._selector = selectors.DefaultSelector()
        self._starting = False

    # --- starting ------------------------------------------------------------------------------------

    def open(self) -> Message:
        """Start the processes; what the first one says its model is. Nothing large is loaded.

        Raises:
          CommandError: one cannot open it.
        """
        for replica in self.replicas:
            self._spawn(replica)
        self._until("opened")
        return self.replicas[0].opened

    def start(self) -> Message:
        """Let them load weights; what the first one says of itself.

        Raises:
          CommandError: one cannot.
        """
        self._starting = True
        for replica in self.replicas:
            self._start(replica)
        self._until("running")
        weights = {replica.ready["weights"] for replica in self.replicas}
        if len(weights) > 1:
            raise CommandError("the replicas loaded different weights: did somebody write them just now?")
        return self.replicas[0].ready

    def _spawn(self, replica: _Replica) -> None:
        ours, theirs = socket.socketpair()
        plan = {
            "socket": theirs.fileno(),
            "number": replica.number,
            "config": self._config,
            "overrides": self._overrides,
            "cores": replica.placement.cores,
            "share": replica.placement.share,
        }
        # A session of its own: Ctrl-C is the job's to answer.
        replica.process = subprocess.Popen(
            [*COMMAND, json.dumps(plan)],
            pass_fds=[theirs.fileno()],
            env={**os.environ, **replica.placement.environment},
            stdin=subprocess.DEVNULL,
            stdout=2,
            start_new_session=True,
        )
        theirs.close()
        replica.channel, replica.state, replica.failure = Channel(ours), "opening", None
        replica.life += 1
        self._selector.register(ours, selectors.EVENT_READ, replica)

    def _start(self, replica: _Replica) -> None:
        assert replica.channel is not None
        with suppress(OSError):  # its end is read in a moment
            replica.channel.send("start", warmup=self._warmup)

    def _until(self, state: str) -> None:
        order = ("opening", "opened", "running")
        while any(order.index(replica.state) < order.index(state) for replica in self.replicas):
            for replica, message in self.arrivals():
                if message is None:
                    said = replica.failure or {"message": f"it ended ({_end(replica)})", "code": ExitCode.ENGINE}
                    self.close()
                    if said.get("said"):
                        print(said["said"], end="", file=sys.stderr)
                    raise CommandError(f"replica {replica.number}: {said['message']}", ExitCode(said["code"]))

    # --- running -------------------------------------------------------------------------------------

    def arrivals(self) -> Iterator[tuple[_Replica, Message | None]]:
        """What has arrived, after some time at most; None says that a process is gone."""
        for key, _ in self._selector.select(_WAIT_S):
            replica: _Replica = key.data
            assert replica.channel is not None
            messages, gone = replica.channel.arrived()
            for message in messages:
                self._note(replica, message)
                yield replica, message
            if gone:
                self._selector.unregister(replica.channel.socket)
                replica.channel.close()
                assert replica.process is not None
                replica.process.kill()
                replica.process.wait()
                self.merged.ended(replica.number, replica.life)
                yield replica, None

    def _note(self, replica: _Replica, message: Message) -> None:
        what = message["what"]
        if replica.state == "stopped" and what != "figures":
            return  # it was being started when the last row ended
        if what == "opened":
            replica.state, replica.opened = "opened", message
            if self._starting:  # again, while others run
                self._start(replica)
        elif what == "ready":
            replica.state, replica.ready = "running", message
        elif what == "figures":
            self.merged.take(replica.number, replica.life, message["figures"])
        elif what == "stopped":
            replica.state = "stopped"
        elif what == "failed":
            replica.failure = message
            assert replica.channel is not None
            replica.channel.socket.shutdown(socket.SHUT_WR)  # it waits for that

    def send(self, replica: _Replica, rows: Sequence[Row]) -> None:
        """Hand rows to a replica; where it is gone they are its unfinished ones."""
        assert replica.channel is not None
        replica.sent |= {row.index: row for row in rows}
        with suppress(OSError):
            replica.channel.send("rows", rows=[packed_row(row) for row in rows])

    def died(self, replica: _Replica) -> list[Row]:
        """A process is gone that should not be: start another, unless that was done before; its unfinished rows."""
        rows, replica.sent = list(replica.sent.values()), {}
        why = _end(replica) if replica.failure is None else replica.failure["message"]
        self.num_returned += len(rows)
        again = replica.life < MAX_STARTS
        self.deaths.append(f"replica {replica.number} ({why})")
        say(
            f"replica {replica.number} died ({why}): {len(rows)} unfinished rows go back; "
            + ("it is started again" if again else "it died before and is given up")
        )
        if again:
            self.num_restarts += 1
            self._spawn(replica)
        else:
            replica.state = "gone"
        return rows

    def stop(self) -> None:
        """Let every replica end after its step."""
        for replica in self.replicas:
            if replica.state == "running" and replica.channel is not None:
                with suppress(OSError):
                    replica.channel.send("stop")
            elif replica.state in ("opening", "opened"):
                replica.state = "stopped"  # it has no rows

    def close(self) -> None:
        """End every process."""
        for replica in self.replicas:
            if replica.channel is not None and replica.channel.socket.fileno() >= 0:
                self._selector.unregister(replica.channel.socket)
                replica.channel.close()
            if replica.process is not None:
                replica.process.kill()
                replica.process.wait()
        self._selector.close()


def _end(replica: _Replica) -> str:
    assert replica.process is not None
    code = replica.process.wait()
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name


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

    def _answer(self, replica: _Replica, message: Message | None) -> Iterator[RowResult]:
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


def open_replicas(
    placements: Sequence[Placement], config: str, overrides: Sequence[str], *, warmup: bool = False
) -> Model:
    """A model that runs in several processes; this one opens no device.

    Raises:
      CommandError: as ``open_model``.
    """
    group = ReplicaGroup(placements, config, overrides, warmup=warmup)
    try:
        opened = group.open()
        tokenizer = tokenizer_of(opened["tokenizer"])
    except BaseException:
        group.close()
        raise
    ready: Message = {}

    def start(first_step_tokens: int) -> Engine:
        try:
            ready.update(group.start())
        except BaseException:
            group.close()
            raise
        worker: Any = ReplicaWorker(group, ready)
        session: Any = ReplicaSession(group)
        return Engine(session, worker, ready["weights"], worker.recorder)

    def facts() -> dict[str, Mapping[str, str]]:
        shares = {
            f"replica {replica.number}": f"cores {', '.join(map(str, replica.placement.cores))}"
            + "".join(f", {name}={value}" for name, value in replica.placement.environment.items())
            for replica in group.replicas
        }
        return {**ready["facts"], "Replicas": shares}

    defaults = SamplingSpec(**opened["defaults"])
    intake = Intake(tokenizer, defaults, vocab_size=opened["vocab_size"], max_model_len=opened["max_model_len"])
    # Which replica's first step has which rows is open: none obtains a program beside its weights.
    return Model(tokenizer, intake, opened["identity"], start, 0, facts, close=group.close)
