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
from typing import Any

import numpy as np

from kv_control.plan import GREEDY
from maxtext_paged.cli.model import Engine, Model
from maxtext_paged.intake import Intake
from maxtext_paged.rows import Row, RowResult, Usage

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
    steps_left: int
    cancelled: bool = False
    id: int = 0


@dataclass
class _Scheduler:
    running: list[_Running] = field(default_factory=list)
    waiting: tuple[_Running, ...] = ()

    @property
    def num_running(self) -> int:
        return len(self.running)

    num_waiting = 0


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

    def cancel(self, request_id: int) -> None:
        for running in self.scheduler.running:
            running.cancelled |= running.id == request_id

    def complete(self, rows: Iterable[Row], on_step: Callable[[Any], None] | None = None) -> Iterator[RowResult]:
        waiting, running = iter(rows), self.scheduler.running
        drawn = 0
        while True:
            while len(running) < MAX_NUM_SEQS and (row := next(waiting, None)) is not None:
                drawn += 1
                running.append(_Running(row, 1 + row.index % 3, id=drawn))
            if not running:
                return
            if self.step_s:
                time.sleep(self.step_s)
            self.num_steps += 1
            for one in running:
                one.steps_left -= 1
            if on_step is not None:
                on_step(self)
            ended = deque(one for one in running if one.cancelled or not one.steps_left)
            running[:] = [one for one in running if not (one.cancelled or not one.steps_left)]
            while ended:
                yield self._result(ended.popleft())

    def _result(self, running: _Running) -> RowResult:
        row = running.row
        wanted = MAX_TOKENS if row.max_tokens is None else min(row.max_tokens, MAX_TOKENS)
        new = [] if running.cancelled else completion(row.tokens.tolist(), row.sampling.seed, wanted)
        self.num_tokens += len(new)
        ids = np.array([*row.tokens.tolist(), *new], np.int32)
        reason = "cancelled" if running.cancelled else "length"
        usage = Usage(len(row.tokens), len(new))
        return RowResult(row, ids, np.zeros(len(ids), np.float32), reason, usage)


def fake_model(*, step_s: float = 0.0, temperature: float = 0.0, weights: str = "w1") -> Model:
    """A model as ``open_model`` returns it."""

    def start() -> Engine:
        worker: Any = FakeWorker(step_s)
        control = SimpleNamespace(num_pages=8, num_free_pages=8, prefix_index=None)
        metrics = SimpleNamespace(
            num_scrubbed_pages=0,
            steps_by_backend={},
            decodes_by_kind={},
            compiled={},
            control=SimpleNamespace(num_evictions=0, page_hit_rate=float("nan")),
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
            control=control,
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
    )
