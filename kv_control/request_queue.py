"""Who waits, who runs, and what each holds: a request from its arrival to its end.

For:        the order of those that wait and of those that run, and every change between the two.
Not for:    deciding who enters, what runs next or who is sent back when (scheduler).
May import: the standard library, numpy, kv_common.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import numpy as np

from kv_common.errors import RequestError
from kv_control.admission import Admission, Shared
from kv_control.control_plane import ControlPlane
from kv_control.plan import Int64, RequestHandle, RequestId
from kv_control.request import FinishReason, Request, RequestStatus
from kv_control.request_table import RequestTable


class RequestQueue:
    """Requests by state. A waiting one holds nothing; a running one holds a row and the pages behind it.

    Args:
      control: rows and pages. table: one line for each row. admission: is told who entered and left.
      release: gives a handle's pages back.

    Attributes:
      waiting: oldest first. running: in the order in which they were let in. by_row: the running ones.
      when_running_changes: called after a request entered or left.
    """

    def __init__(
        self,
        control: ControlPlane,
        table: RequestTable,
        admission: Admission,
        *,
        release: Callable[[RequestHandle], object],
    ) -> None:
        self.waiting: OrderedDict[RequestId, Request] = OrderedDict()
        self.running: OrderedDict[RequestId, Request] = OrderedDict()
        self.by_row: list[Request | None] = [None] * control.limits.max_num_seqs
        self.when_running_changes: Callable[[], None] = lambda: None
        self._control = control
        self._table = table
        self._admission = admission
        self._release = release
        self._rows: Int64 | None = None  # of the running ones, until one enters or leaves
        self._shared_by_row: list[Shared | None] = [None] * control.limits.max_num_seqs
        self._finished: list[Request] = []
        self._num_arrivals = 0

    def find(self, request_id: RequestId) -> Request | None:
        """The unfinished request of this id."""
        return self.waiting.get(request_id) or self.running.get(request_id)

    def arrive(self, request: Request) -> None:
        """Queue a new request behind all others."""
        request.arrival = self._num_arrivals
        self._num_arrivals += 1
        self.waiting[request.id] = request

    def running_rows(self) -> Int64:
        """int64, rows of the running requests, in the order in which they were let in."""
        if self._rows is None:
            handles = [request.handle for request in self.running.values()]
            self._rows = np.array([handle.row for handle in handles if handle is not None], np.int64)
        return self._rows

    def enter(self, request: Request, shared: Shared) -> bool:
        """Give a request a row and the pages it shares; False when there is none, and then nothing has changed."""
        handle = self._control.open()
        if handle is None:
            return False
        if shared.source is not None:
            assert shared.source.handle is not None
            if not self._control.fork(shared.source.handle, handle, shared.num_tokens):
                self._control.release(handle)
                return False
            request.take_prompt_logprobs(shared.source.prompt_logprobs[: shared.source.num_known_prompt_logprobs])
        else:
            self._control.adopt(handle, shared.nodes)
        if shared.logprobs is not None:
            request.take_prompt_logprobs(shared.logprobs)
        del self.waiting[request.id]
        request.enter(self._table, handle, shared.num_tokens)
        self._shared_by_row[handle.row] = shared
        self._count_shared(request, shared, 1)
        path = len(self._control.sharing.path(handle.row))
        self._table.num_published[handle.row] = path
        self.running[request.id] = request
        self._rows = None
        self.when_running_changes()
        self.by_row[handle.row] = request
        self._admission.entered(request, shared)
        return True

    def send_back_newest(self) -> Request:
        """Return the request that was let in last to its place among those that wait; its generated tokens stay."""
        request = self.running.popitem()[1]
        self._give_back(request)
        request.status = RequestStatus.WAITING
        request.num_preemptions += 1
        self._control.counters.num_preemptions += 1
        self._control.counters.num_preempted_requests += request.num_preemptions == 1
        older = []
        for waiting in self.waiting.values():
            if waiting.arrival > request.arrival:
                break
            older.append(waiting.id)  # only those that were overtaken while they waited for a prefix
        self.waiting[request.id] = request
        for request_id in reversed([*older, request.id]):
            self.waiting.move_to_end(request_id, last=False)
        return request

    def end(self, request: Request, reason: FinishReason, error: str | None) -> None:
        """End a request in whatever state it is; its row and pages go back at once."""
        if self.waiting.pop(request.id, None) is None and self.running.pop(request.id, None) is None:
            raise RequestError(f"request {request.id} is not one of this scheduler's")
        self._give_back(request)
        request.status = RequestStatus.FINISHED
        request.finish_reason, request.error = reason, error
        self._finished.append(request)

    def pop_finished(self) -> list[Request]:
        """Requests that ended since the last call, in the order in which they did."""
        finished, self._finished = self._finished, []
        return finished

    def _count_shared(self, request: Request, shared: Shared, sign: int) -> None:
        """Count what a running request was let in with (``sign`` 1), or take that back (-1)."""
        counters, num_tokens = self._control.counters, sign * shared.num_tokens
        assert request.handle is not None
        if self._table.num_seen[request.handle.row]:  # it ran before
            counters.num_recovered_tokens += num_tokens
        elif shared.source is not None:
            request.num_shared_tokens += num_tokens
            counters.num_shared_tokens += num_tokens
        else:
            request.num_cached_tokens += num_tokens
            counters.num_cached_tokens += num_tokens
            counters.num_prefix_pages_wanted += sign * shared.num_pages_wanted
            counters.num_prefix_pages_hit += sign * shared.num_whole_pages

    def _give_back(self, request: Request) -> None:
        """Return a request's row and pages, if it has any; what was computed there is lost."""
        if request.handle is not None:
            shared = self._shared_by_row[request.handle.row]
            self._shared_by_row[request.handle.row] = None
            if shared is not None and request.num_computed == shared.num_tokens:
                self._count_shared(request, shared, -1)  # it ran nothing behind them: they saved nothing
        handle = request.leave()
        if handle is not None:
            self.by_row[handle.row] = None
            self._rows = None
            self.when_running_changes()
            self._admission.left(request)
            self._release(handle)
