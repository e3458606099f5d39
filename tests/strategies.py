"""Hypothesis strategies for pools and workloads, and a host-only engine to run them on.

For:        driving kv_control without jax: the engine's K/V of a token is the token itself, so whoever reads
            a wrong, stale or unwritten slot samples another token.
Not for:    numerics, or fakes of kv_execution (those are in fakes.py).
May import: kv_common, kv_control, numpy, hypothesis.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from kv_common.dtypes import ELEMENT_BITS
from kv_common.errors import RequestTooLarge
from kv_common.layout import KvStorageLayoutV1
from kv_common.page_table import KvPageTableV1
from kv_common.window_group import WindowGroup
from kv_control.bucketing import token_ladder
from kv_control.control_plane import ControlPlane
from kv_control.invariants import check_invariants
from kv_control.plan import RequestHandle, RequestId, RequestSlice, StepPlan
from kv_control.request import Request
from kv_control.scheduler import Scheduler

VOCAB_SIZE = 50
UNWRITTEN = -7  # what a slot holds before anyone wrote it
NAMESPACE = b"a namespace's digest"
POISON = -9  # what a slot holds once its page was freed


def next_token(tokens: Sequence[int]) -> int:
    """The engine's "model": what follows a sequence, a pure function of all of it."""
    return zlib.crc32(np.asarray(tokens, np.int64).tobytes()) % VOCAB_SIZE


def logprob_of(tokens: Sequence[int], token: int) -> float:
    """The engine's logprob of `token` after `tokens`."""
    return -float(zlib.crc32(np.asarray([*tokens, token], np.int64).tobytes()) % 1000) / 64


def completion_alone(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """What the model generates after `prompt` with nobody else around."""
    tokens = [int(token) for token in prompt]
    for _ in range(num_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def prompt_logprobs_alone(prompt: Sequence[int]) -> list[float]:
    """Logprobs of prompt positions 1.. as float32 holds them."""
    return [float(np.float32(logprob_of(prompt[:i], prompt[i]))) for i in range(1, len(prompt))]


def layout_of(num_pages: int, tokens_per_page: int) -> KvStorageLayoutV1:
    """The geometry of a pool of which only the pages matter."""
    return KvStorageLayoutV1(1, num_pages, tokens_per_page, num_kv_heads=1, head_dim=1, dtype="float32")


def control_of(
    num_pages: int,
    tokens_per_page: int = 4,
    *,
    max_num_seqs: int = 4,
    max_model_len: int = 64,
    max_tokens: int = 64,
    prefix_cache: bool = False,
    windows: Sequence[tuple[int, int]] = (),
) -> ControlPlane:
    """A small control plane; `max_tokens` is the largest step, `windows` are (window, pages) of each group."""
    return ControlPlane(
        layout_of(num_pages, tokens_per_page),
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        token_ladder=token_ladder(max_tokens),
        prefix_namespace=NAMESPACE if prefix_cache else None,
        window_groups=[WindowGroup(window, layout_of(pages, tokens_per_page)) for window, pages in windows],
    )


class HostEngine:
    """A pool of slots and the steps over it. Reads what the page table says, and only that.

    Window groups have slots of their own: what a row's queries see there must be what the other slots hold.
    """

    def __init__(self, control: ControlPlane) -> None:
        self.control = control
        size = control.layout.tokens_per_page
        self.slots = np.full((control.num_pages, size), UNWRITTEN, np.int64)
        self.window_slots = [np.full((one.allocator.num_pages, size), UNWRITTEN, np.int64) for one in control.windows]
        self.plans: list[StepPlan] = []
        self.positions: dict[RequestHandle, list[int]] = {}  # every position fed, by handle

    def release(self, handle: RequestHandle) -> np.ndarray:
        """Release and poison what was freed."""
        freed = self.control.release(handle)
        self.slots[freed] = POISON
        self.poison_windows()
        return freed

    def poison_windows(self) -> None:
        """Poison what became free in the window groups."""
        for slots, freed in zip(self.window_slots, self.control.windows.take_freed(), strict=True):
            slots[freed] = POISON

    def run(self, slices: tuple[RequestSlice, ...]) -> StepPlan | None:
        """Reserve, scrub, confirm, plan, append; None when there is no room."""
        reservation = self.control.reserve(slices)
        if reservation is None:
            return None
        self.slots[reservation.dirty_pages] = UNWRITTEN
        self.slots[reservation.copies[1]] = self.slots[reservation.copies[0]]
        self.poison_windows()
        for slots, chores in zip(self.window_slots, reservation.windows, strict=True):
            slots[chores.dirty_pages] = UNWRITTEN
            slots[chores.copies[1]] = slots[chores.copies[0]]
        plan = self.control.plan(self.control.confirm_scrubbed(reservation))
        table = plan.table
        fed = np.concatenate([np.zeros(0, np.int32), *(piece.tokens for piece in slices)])
        written = table.slot_mapping[: table.num_tokens]
        assert len(fed) == table.num_tokens and (table.slot_mapping[table.num_tokens :] == self.slots.size).all()
        self.slots.reshape(-1)[written] = fed
        for slots, window in zip(self.window_slots, plan.window_tables, strict=True):
            slots.reshape(-1)[window.slot_mapping[: window.num_tokens]] = fed
        for i, piece in enumerate(slices):
            begin, end = table.query_start_loc[i : i + 2]
            self.positions.setdefault(piece.handle, []).extend(table.positions[begin:end].tolist())
        for i in range(len(slices)):
            self.check_windows(plan, i)
        self.control.commit(plan)
        self.plans.append(plan)
        return plan

    def context(self, plan: StepPlan, i: int) -> list[int]:
        """What row `i` of the step can read: all slots of all its pages, up to the last page's length."""
        return self.read(self.slots, plan.table, i)

    def read(self, slots: np.ndarray, table: KvPageTableV1, i: int) -> list[int]:
        """What row `i` finds in one pool."""
        pages = table.kv_indices[table.kv_indptr[i] : table.kv_indptr[i + 1]]
        read = slots[pages].reshape(-1)
        unread = self.control.layout.tokens_per_page - table.kv_last_page_len[i]
        return read[: len(read) - unread].tolist()

    def check_windows(self, plan: StepPlan, i: int) -> None:
        """What the first and all later queries of row `i` see of each window is what the other pool holds there."""
        context, start = self.context(plan, i), plan.slices[i].start
        for pages, slots, table in zip(self.control.windows, self.window_slots, plan.window_tables, strict=True):
            oldest = max(0, start - pages.group.window + 1)
            offset = int(table.kv_first_page_offset[i])
            assert offset <= oldest, "the table begins behind the oldest key that is seen"
            assert oldest - offset < self.control.layout.tokens_per_page, "the table lists a page that nobody sees"
            assert self.read(slots, table, i)[oldest - offset :] == context[oldest:]

    def results(self, plan: StepPlan, i: int) -> dict[str, object]:
        """What the device returns for slice `i`, as `Scheduler.record` takes it."""
        piece, context = plan.slices[i], self.context(plan, i)
        found: dict[str, object] = {}
        if piece.targets is not None:
            found["target_logprobs"] = np.array(
                [
                    logprob_of(context[: piece.start + j + 1], target) if target >= 0 else np.nan
                    for j, target in enumerate(piece.targets.tolist())
                ],
                np.float32,
            )
        if piece.sample is not None:
            found["token"] = next_token(context)
            found["logprob"] = logprob_of(context, next_token(context))
        return found


@dataclass
class Loop:
    """The driver's loop over a `HostEngine`, with every law checked after every step."""

    scheduler: Scheduler
    engine: HostEngine
    num_steps: int = 0

    def step(self) -> StepPlan | None:
        """Run one step; None when nothing was chosen or a request was sent back instead."""
        slices = self.scheduler.slices(self.scheduler.schedule())
        plan = self.engine.run(slices) if slices else None
        if plan is None:
            if slices and self.scheduler.preempt_newest() is None:
                self.scheduler.finish(self.scheduler.running[0], "error", "no room although it runs alone")
            check_invariants(self.engine.control, self.scheduler)
            return None
        self.num_steps += 1
        self.scheduler.advance(plan.slices)
        check_invariants(self.engine.control, self.scheduler, plan=plan)
        for i, piece in enumerate(plan.slices):
            self.scheduler.record(piece, **self.engine.results(plan, i))
        check_invariants(self.engine.control, self.scheduler)
        return plan

    def step_until(self, condition: Callable[[], bool], *, at_most: int = 200) -> None:
        """Step until the condition holds."""
        for _ in range(at_most):
            if condition():
                return
            self.step()
        raise AssertionError(f"not reached after {at_most} turns")

    def drain(self, *, at_most: int = 10_000, every_step: Callable[[], object] = lambda: None) -> int:
        """Step until there is no work; returns the steps it took."""
        before, turns = self.num_steps, 0
        while self.scheduler.has_work:
            turns += 1
            assert turns <= at_most, f"no end after {at_most} turns"
            self.step()
            every_step()
        return self.num_steps - before


def loop_of(control: ControlPlane, **options: int | None) -> Loop:
    """A scheduler and an engine over `control`; the budget is the ladder's top unless given."""
    engine = HostEngine(control)
    settings: dict[str, int | None] = {
        "max_num_batched_tokens": control.token_ladder.top,
        "max_num_seqs": control.limits.max_num_seqs,
        "max_model_len": control.limits.max_model_len,
        **options,
    }
    return Loop(Scheduler(control, release=engine.release, **settings), engine)


def request_of(request_id: int, prompt: int | Sequence[int], **options: object) -> Request:
    """A request; a number as `prompt` makes that many tokens which differ between ids."""
    tokens = [(7 * request_id + 3 * i) % VOCAB_SIZE for i in range(prompt)] if isinstance(prompt, int) else prompt
    return Request(RequestId(request_id), np.array(tokens, np.int64), **options)


def submit_all(scheduler: Scheduler, requests: Iterable[Request]) -> list[Request]:
    """Submit those that can be served; returns them."""
    served = []
    for request in requests:
        try:
            scheduler.submit(request)
        except RequestTooLarge:
            continue
        served.append(request)
    return served


# --- strategies ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Workload:
    """A pool, a scheduler's options and the requests to run."""

    num_pages: int
    tokens_per_page: int
    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int
    prefill_chunk_tokens: int | None
    requests: tuple[tuple[int, int, bool], ...]  # prompt tokens, max_tokens, prompt logprobs wanted

    def loop(self) -> Loop:
        """A fresh loop."""
        control = control_of(
            self.num_pages,
            self.tokens_per_page,
            max_num_seqs=self.max_num_seqs,
            max_model_len=self.max_model_len,
            max_tokens=self.max_num_batched_tokens,
        )
        return loop_of(control, prefill_chunk_tokens=self.prefill_chunk_tokens)

    def make_requests(self) -> list[Request]:
        """Fresh requests."""
        return [
            request_of(i, prompt, max_tokens=max_tokens, want_prompt_logprobs=wanted)
            for i, (prompt, max_tokens, wanted) in enumerate(self.requests)
        ]


CROWDED = Workload(
    num_pages=9,
    tokens_per_page=2,
    max_num_seqs=4,
    max_model_len=18,
    max_num_batched_tokens=8,
    prefill_chunk_tokens=3,
    requests=((3, 14, True), (4, 13, False), (2, 15, True), (6, 9, True), (1, 17, False), (5, 0, True)),
)
"""A workload that cannot do without preemption: an explicit example beside the random ones."""


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    """Tiny pools under more work than they hold."""
    max_num_seqs = draw(st.integers(1, 5))
    budget = draw(st.integers(max_num_seqs, 16))
    return Workload(
        num_pages=draw(st.integers(1, 12)),
        tokens_per_page=draw(st.integers(1, 4)),
        max_num_seqs=max_num_seqs,
        max_model_len=draw(st.integers(2, 48)),
        max_num_batched_tokens=budget,
        prefill_chunk_tokens=draw(st.none() | st.integers(1, budget)),
        requests=tuple(
            draw(st.lists(st.tuples(st.integers(1, 14), st.integers(0, 30), st.booleans()), min_size=1, max_size=8))
        ),
    )


@st.composite
def layouts(draw: st.DrawFn) -> KvStorageLayoutV1:
    """Pool geometries of all three sharding regimes and all dtypes."""
    heads = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    shards = draw(st.sampled_from([n for n in (1, 2, 3, 4, 6, 8, 12, 16) if heads % n == 0 or n % heads == 0]))
    return KvStorageLayoutV1(
        num_layers=draw(st.integers(1, 5)),
        num_pages=draw(st.integers(1, 9)),
        tokens_per_page=draw(st.integers(1, 33)),
        num_kv_heads=heads,
        head_dim=draw(st.integers(1, 65)),
        dtype=draw(st.sampled_from(sorted(ELEMENT_BITS))),
        head_shards=shards,
        pool_replicas=draw(st.integers(1, 4)),
    )
