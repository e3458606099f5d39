"""One replica: a process that opens the model and runs the rows it is sent.

For:        ``python -m maxtext_paged.replicas.child``, started by group.py.
Not for:    files, text of results or progress: those are the job's.
May import: the standard library, maxtext_paged; MaxText and jax when the model is opened.

It ends when the job's end of the socket does, whatever it is doing then.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from maxtext_paged.cli import CommandError, ExitCode, one_line
from maxtext_paged.replicas.figures import reported
from maxtext_paged.replicas.wire import Channel, Message, packed_result, row_of
from maxtext_paged.report.counts import JobCounts
from maxtext_paged.report.looks import step_view
from maxtext_paged.report.recorder import Recorder
from maxtext_paged.rows import Row, RowResult

if TYPE_CHECKING:
    from maxtext_paged.cli.model import Engine, Model

REPORT_INTERVAL_S = 0.25
OpenModel = Callable[[str, list[str], int], "Model"]


class Feed(Iterator["Row | None"]):
    """The rows as they arrive, for ``PagedInferenceWorker.complete``: None where there are none now and some run.

    Attributes:
      stopping: the job asked for the end.
    """

    def __init__(self, inbox: SimpleQueue[Message]) -> None:
        self.stopping = False
        self._inbox = inbox
        self._rows: deque[Row] = deque()
        self._under_way = 0

    def __next__(self) -> Row | None:
        while not self.stopping:
            self.look()
            if self.stopping:
                break
            if self._rows:
                self._under_way += 1
                return self._rows.popleft()
            if self._under_way:
                return None
            self._take(self._inbox.get())  # nothing runs: wait
        raise StopIteration

    def look(self) -> None:
        """Take what has arrived."""
        while not self._inbox.empty():
            self._take(self._inbox.get())

    def ended(self) -> None:
        """A row that was handed out has its result."""
        self._under_way -= 1

    def _take(self, message: Message) -> None:
        if message["what"] == "rows":
            self._rows.extend(map(row_of, message["rows"]))
        elif message["what"] == "stop":
            self.stopping = True


class Replica:
    """The loop of one replica."""

    def __init__(self, channel: Channel, engine: Engine, inbox: SimpleQueue[Message]) -> None:
        self._channel, self._engine = channel, engine
        self._feed = Feed(inbox)
        self._recorder = Recorder(JobCounts())
        self._reported = 0.0

    def run(self) -> None:
        """Run rows until the job asks for the end."""
        self._recorder.start()
        for result in self._engine.worker.complete(self._feed, on_step=self._after_step, watch=self._recorder):
            self._feed.ended()
            self._send(result)
        self._report()
        self._channel.send("stopped")

    def _send(self, result: RowResult) -> None:
        clock = self._recorder.clocks.pop(result.row.index)
        moments = (None, None, None) if clock is None else (clock.first_run, clock.first_token, clock.ended)
        times = [None if clock is None else clock.since(moment) for moment in moments]
        self._channel.send("result", result=packed_result(result), times=times)

    def _after_step(self, worker: Any) -> None:
        self._feed.look()
        driver = self._engine.session.driver
        if self._feed.stopping:
            worker.settle()
            for request in (*driver.scheduler.running, *driver.scheduler.waiting):
                driver.cancel(request.id)
        self._recorder.step_ended(step_view(self._engine.session))
        if time.monotonic() - self._reported >= REPORT_INTERVAL_S:
            self._report()

    def _report(self) -> None:
        self._reported = time.monotonic()
        self._channel.send("figures", figures=reported(self._engine.session, self._recorder))


def serve(plan: Message, open_model: OpenModel) -> None:
    """Open the model, say what it is, start it when the job asks for that, and run rows."""
    channel = Channel(socket.socket(fileno=plan["socket"]))
    inbox: SimpleQueue[Message] = SimpleQueue()
    threading.Thread(target=_read, args=(channel, inbox), daemon=True).start()
    quiet = io.StringIO()
    try:
        with contextlib.redirect_stderr(quiet) if plan["number"] else contextlib.nullcontext():
            model = open_model(plan["config"], plan["overrides"], plan["share"])
            intake = model.intake
            channel.send(
                "opened",
                identity=model.identity,
                tokenizer=dict(model.tokenizer_options),
                vocab_size=intake.vocab_size,
                max_model_len=intake.max_model_len,
                defaults=_plain(intake.defaults),
            )
            asked = inbox.get()
            engine = model.start(0)
            if asked.get("warmup"):
                engine.session.runtime.warm_up()
        channel.send("ready", weights=engine.weights, facts=_facts(model), **_shape(engine))
        Replica(channel, engine, inbox).run()
    except CommandError as error:
        channel.send("failed", message=one_line(error), code=int(error.code), said=quiet.getvalue())
    except Exception as error:
        traceback.print_exc()
        code = ExitCode.USAGE if isinstance(error, ValueError) else ExitCode.ENGINE
        message = f"{type(error).__name__}: {one_line(error)}"
        channel.send("failed", message=message, code=int(code), said=quiet.getvalue())
    with contextlib.suppress(Exception):
        while True:
            inbox.get()  # until the job is gone: ``_read`` ends the process


def _read(channel: Channel, inbox: SimpleQueue[Message]) -> None:
    for message in channel.messages():
        inbox.put(message)
    os._exit(0)  # also in the middle of a step: nobody waits for it


def _plain(defaults: Any) -> dict[str, Any]:
    return {name: getattr(defaults, name) for name in ("temperature", "top_k", "top_p", "min_p")}


def _facts(model: Model) -> dict[str, dict[str, str]]:
    return {heading: dict(values) for heading, values in model.facts().items()}


def _shape(engine: Engine) -> dict[str, Any]:
    """What the job has to know to hand out rows."""
    session = engine.session
    options = getattr(session, "options", None)
    layout = getattr(session.control, "layout", None)
    return {
        "max_num_seqs": int(session.max_num_seqs),
        "shares": session.control.prefix_index is not None,
        "tokens_per_page": 0 if layout is None else int(layout.tokens_per_page),
        "file_order": "auto" if options is None else options.paged_file_order,
        "num_pages": int(session.control.num_pages),
    }


def prepare(plan: Message) -> None:
    """Take the cores of this replica, before anything starts threads for those it finds."""
    if plan["cores"]:
        os.sched_setaffinity(0, plan["cores"])
    for name in ("PJRT_NPROC", "NPROC"):
        if name in os.environ:
            os.environ[name] = str(max(1, len(plan["cores"])))


def _open(path: str, overrides: list[str], share: int) -> Model:
    from maxtext_paged.cli.model import open_model

    return open_model(path, overrides, memory_share=share)


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    prepare(given)
    serve(given, _open)
