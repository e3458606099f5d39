"""A stand-in for model, loop and pools, in plain Python: what is left is the command and its files.

For:        tests of formats, resuming and memory over many rows, in processes that import neither jax nor MaxText.
Not for:    anything about tokens, pages or steps (tests/fakes.py has a model under the real loop).
May import: the standard library, numpy, maxtext_paged without MaxText.

A row's completion is a function of its prompt and seed alone, and rows end out of order.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from kv_control.plan import GREEDY
from maxtext_paged.cli.model import Engine, Model
from maxtext_paged.intake import Intake
from maxtext_paged.rows import Row, RowResult, Usage

if TYPE_CHECKING:
    from maxtext_paged.worker import RowWatch

MAX_NUM_SEQS = 4
MAX_TOKENS = 16


class ByteTokenizer:
    """One id per byte; a chat is its roles and contents."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_chat(self, messages: Sequence[Any]) -> list[int]:
        return self.encode("".join(f"<{message['role']}>{message['content']}" for message in messages))

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(ids).decode("latin-1")


def completion(tokens: Sequence[int], seed: int, num_tokens: int) -> list[int]:
    """What a row is answered with."""
    state = sum((place + 1) * token for place, token in enumerate(tokens)) + 7 * seed
    return [32 + (state + 13 * place) % 90 for place in range(num_tokens)]


@dataclass
class _Running:
    row: Row
    steps: int
    steps_left: int
    cancelled: bool = False
    id: int = 0

    @property
    def wanted(self) -> int:
        return MAX_TOKENS if self.row.max_tokens is None else min(self.row.max_tokens, MAX_TOKENS)

    @property
    def num_generated(self) -> int:
        """Tokens so far: they come in equal parts, one part a step."""
        return 0 if self.cancelled else self.wanted * (self.steps - self.steps_left) // self.steps


@dataclass
class _Scheduler:
    running: list[_Running] = field(default_factory=list)
    waiting: tuple[_Running, ...] = ()

    @property
    def num_running(self) -> int:
        return len(self.running)

    num_waiting = 0

    @property
    def table(self) -> Any:
        """What is read of a ``RequestTable``; every row in it is held."""
        return SimpleNamespace(
            ids=np.array([one.id for one in self.running], np.int64),
            num_tokens=np.array([one.num_generated for one in self.running], np.int64),
            num_prompt=np.zeros(len(self.running), np.int64),
        )


class FakeWorker:
    """Takes a few rows at a time, and a step of ``step_s`` seconds each time round."""

    attainable_tokens = None

    def __init__(self, step_s: float) -> None:
        self.step_s = step_s
        self.scheduler = _Scheduler()
        self.num_steps = self.num_tokens = 0

    def in_file_order(self, rows: Iterable[Row]) -> Iterable[Row]:
        return rows

    def stop_drawing(self) -> None:
        pass

    def settle(self) -> None:
        pass

    def cancel(self, request_id: int) -> None:
        for running in self.scheduler.running:
            running.cancelled |= running.id == request_id

    def complete(
        self, rows: Iterable[Row], on_step: Callable[[Any], None] | None = None, watch: RowWatch | None = None
    ) -> Iterator[RowResult]:
        waiting, running = iter(rows), self.scheduler.running
        drawn = 0
        while True:
            while len(running) < MAX_NUM_SEQS and (row := next(waiting, None)) is not None:
                drawn += 1
                running.append(_Running(row, 1 + row.index % 3, 1 + row.index % 3, id=drawn))
                if watch is not None:
                    watch.submitted(row.index, [drawn])
            if not running:
                return
            if watch is not None:
                watch.step_begins()
            if self.step_s:
                time.sleep(self.step_s)
            self.num_steps += 1
            for one in running:
                before, one.steps_left = one.num_generated, one.steps_left - 1
                self.num_tokens += one.num_generated - before
            ended = deque(one for one in running if not one.steps_left)
            running[:] = [one for one in running if one.steps_left]
            if on_step is not None:
                on_step(self)
            ended.extend(one for one in running if one.cancelled)
            running[:] = [one for one in running if not one.cancelled]
            while ended:
                one = ended.popleft()
                if watch is not None:
                    watch.ended(one.id, one.num_generated, ran=True)
                yield self._result(one)

    def _result(self, running: _Running) -> RowResult:
        row = running.row
        new = [] if running.cancelled else completion(row.tokens.tolist(), row.sampling.seed, running.wanted)
        ids = np.array([*row.tokens.tolist(), *new], np.int32)
        reason = "cancelled" if running.cancelled else "length"
        usage = Usage(len(row.tokens), len(new))
        return RowResult(row, ids, np.zeros(len(ids), np.float32), reason, usage)


def fake_model(*, step_s: float = 0.0, temperature: float = 0.0, weights: str = "w1") -> Model:
    """A model as ``open_model`` returns it."""

    def start(first_step_tokens: int) -> Engine:
        worker: Any = FakeWorker(step_s)

        class Control:
            num_pages, prefix_index = 8, None

            @property
            def num_free_pages(self) -> int:
                return 8 - 2 * len(worker.scheduler.running)

            num_available_pages = num_free_pages

            @property
            def counters(self) -> Any:
                return SimpleNamespace(
                    num_generated_tokens=worker.num_tokens,
                    num_prefill_tokens=0,
                    num_recomputed_tokens=0,
                    num_steps=worker.num_steps,
                    num_preemptions=0,
                )

        metrics = SimpleNamespace(
            num_scrubbed_pages=0,
            steps_by_backend={},
            decodes_by_kind={},
            decodes_by_cause={},
            compiled={},
            control=SimpleNamespace(num_evictions=0, windows=(), page_hit_rate=float("nan")),
        )

        class Driver:
            scheduler, cancel = worker.scheduler, worker.cancel

            @property
            def metrics(self) -> Any:
                return SimpleNamespace(
                    num_generated_tokens=worker.num_tokens,
                    num_steps=worker.num_steps,
                    num_preemptions=0,
                    peak_pages_held=0,
                )

        session: Any = SimpleNamespace(
            control=Control(),
            driver=Driver(),
            runtime=SimpleNamespace(metrics=lambda: metrics),
            max_num_seqs=MAX_NUM_SEQS,
            num_native_products=lambda: 0,
        )
        return Engine(session, worker, weights)

    tokenizer = ByteTokenizer()
    return Model(
        tokenizer,
        Intake(tokenizer, GREEDY, vocab_size=256, max_model_len=512),
        {"configuration": {"dtype": "float32"}, "sampling": {"temperature": temperature}},
        start,
        64,
    )
