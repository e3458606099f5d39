"""The replicas of a job: started, fed, started again once where one dies, and stopped.

For:        processes and what arrives from them.
Not for:    which rows go to which (worker.py), what a replica does (child.py), the whole as a model (model.py).
May import: the standard library, maxtext_paged without MaxText.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from maxtext_paged.cli import CommandError, ExitCode, say
from maxtext_paged.replicas.devices import Placement
from maxtext_paged.replicas.figures import Merged
from maxtext_paged.replicas.wire import Channel, Message, packed_row
from maxtext_paged.rows import Row

COMMAND = (sys.executable, "-m", "maxtext_paged.replicas.child")
MAX_STARTS = 2
_WAIT_S = 0.1


@dataclass(slots=True, eq=False)
class Replica:
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
        self.replicas = [Replica(number, placement) for number, placement in enumerate(placements)]
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

    def _spawn(self, replica: Replica) -> None:
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

    def _start(self, replica: Replica) -> None:
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

    def arrivals(self) -> Iterator[tuple[Replica, Message | None]]:
        """What has arrived, after some time at most; None says that a process is gone."""
        for key, _ in self._selector.select(_WAIT_S):
            replica: Replica = key.data
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

    def _note(self, replica: Replica, message: Message) -> None:
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

    def send(self, replica: Replica, rows: Sequence[Row]) -> None:
        """Hand rows to a replica; where it is gone they are its unfinished ones."""
        assert replica.channel is not None
        replica.sent |= {row.index: row for row in rows}
        with suppress(OSError):
            replica.channel.send("rows", rows=[packed_row(row) for row in rows])

    def died(self, replica: Replica) -> list[Row]:
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


def _end(replica: Replica) -> str:
    assert replica.process is not None
    code = replica.process.wait()
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name
