"""Where a job stands: the one value that progress, summary, metrics file and report read.

For:        every count and every ratio of a job, each computed in one place.
Not for:    gathering them (recorder.py, generate.py), distributions and courses over time.
May import: the standard library.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(slots=True)
class JobCounts:
    """Where a job stands.

    Attributes:
      total: rows of the input. ok, failed: rows written with and without an answer.
      earlier: rows that had their record before this run. earlier_failed: those of them without an answer.
      failures: error code to rows of this run that failed with it.
      prompt_tokens, generated_tokens: of this run's rows that have an answer.
      seconds: since the first row was drawn.
      sampled_tokens: generated so far, rows still running included.
      running, waiting: requests. pages_held, num_pages: of the pool.
      steps, preemptions, peak_pages, scrubbed_pages: as the driver and the runtime count them.
      window_pages, window_pages_held, window_peak_pages: window to pages, of layers with pools of their own beside it.
      shares: whether the prefix cache is on. cached_tokens: prompt tokens that it had. attainable_tokens: that sharing
        within the windows in which rows were ordered can avoid at best; None where they were not ordered.
      evictions, hit_rate: of its pages.
      backends: attention backend to steps. decodes: how decode rows ran, fused or gather, to launches, one for each
        step and attention window. decode_causes: (kind, cause) to the same launches. native_products: matrix products
        that our kernel computed, warm-up not counted. programs: jitted function to programs obtained.
      replicas: processes that run rows. replica_deaths: which of them died, and how. replica_restarts: times that one
        was started again. returned_rows: unfinished rows of those that went back.
    """

    total: int = 0
    earlier: int = 0
    earlier_failed: int = 0
    ok: int = 0
    failed: int = 0
    failures: dict[str, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    generated_tokens: int = 0
    seconds: float = 0.0
    sampled_tokens: int = 0
    running: int = 0
    waiting: int = 0
    pages_held: int = 0
    num_pages: int = 0
    steps: int = 0
    preemptions: int = 0
    peak_pages: int = 0
    scrubbed_pages: int = 0
    window_pages: Mapping[str, int] = field(default_factory=dict)
    window_pages_held: Mapping[str, int] = field(default_factory=dict)
    window_peak_pages: Mapping[str, int] = field(default_factory=dict)
    shares: bool = False
    cached_tokens: int = 0
    attainable_tokens: int | None = None
    evictions: int = 0
    hit_rate: float = float("nan")
    backends: Mapping[str, int] = field(default_factory=dict)
    decodes: Mapping[str, int] = field(default_factory=dict)
    decode_causes: Mapping[tuple[str, str], int] = field(default_factory=dict)
    native_products: int = 0
    programs: Mapping[str, int] = field(default_factory=dict)
    replicas: int = 1
    replica_deaths: list[str] = field(default_factory=list)
    replica_restarts: int = 0
    returned_rows: int = 0

    @property
    def done(self) -> int:
        """Rows that have their record."""
        return self.earlier + self.ok + self.failed

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens of answered rows over the run's seconds."""
        return self.generated_tokens / self.seconds if self.seconds else 0.0

    @property
    def sampled_tokens_per_second(self) -> float:
        """Tokens sampled so far over the run's seconds."""
        return self.sampled_tokens / self.seconds if self.seconds else 0.0

    @property
    def eta_seconds(self) -> float | None:
        """What the rows without a record take at this run's rows a second; None before one of them was answered."""
        ended, left = self.ok + self.failed, self.total - self.done
        if left <= 0:
            return 0.0 if self.total else None
        return left * self.seconds / ended if self.ok and self.seconds else None

    def state(self) -> str:
        """The running counts in one line, without the rows."""
        hits = "" if math.isnan(self.hit_rate) else f"{self.hit_rate:.0%} prefix hits, "
        eta = "" if not self.eta_seconds else f", ETA {clock_text(self.eta_seconds)}"
        return (
            f"{self.failed} failed, {self.sampled_tokens_per_second:.1f} tokens/s, {self.running} running, "
            f"{self.waiting} waiting, {self.pages_held}/{self.num_pages} pages, {hits}{self.preemptions} preemptions"
            f"{eta}"
        )

    def summary(self) -> list[str]:
        """What a finished job has to say for itself."""
        backends = ", ".join(f"{name} {steps} steps" for name, steps in self.backends.items()) or "nothing ran"
        left = f", {self.total - self.done} not answered" if self.done < self.total else ""
        before = f", {self.earlier} before ({self.earlier_failed} failed)" if self.earlier else ""
        decodes = ", ".join(f"{count} {kind}" for kind, count in self.decodes.items()) or "none"
        products = f"{self.native_products} native" if self.native_products else "XLA's"
        programs = ", ".join(f"{name} {count}" for name, count in sorted(self.programs.items())) or "none"
        windows = ", ".join(
            f"window {window}: {self.window_peak_pages.get(window, 0)} of {pages}"
            for window, pages in self.window_pages.items()
        )
        beside = f" ({windows})" if windows else ""
        return [
            f"{self.total} rows: {self.ok} ok, {self.failed} failed{before}{left}; {self.prompt_tokens} prompt and "
            f"{self.generated_tokens} generated tokens in {self.seconds:.1f} s, {self.tokens_per_second:.1f} tokens/s",
            f"{self.steps} steps, {self.preemptions} preemptions, at most {self.peak_pages} of {self.num_pages} pages "
            f"held{beside}, {self.scrubbed_pages} scrubbed; attention: {backends}; decodes: {decodes}; products: "
            f"{products}; programs: {programs}",
            *self._sharing(),
            *self._replicas(),
        ]

    def _replicas(self) -> list[str]:
        if self.replicas == 1:
            return []
        if not self.replica_deaths:
            return [f"{self.replicas} replicas, none died"]
        return [
            f"{self.replicas} replicas, {len(self.replica_deaths)} deaths: {'; '.join(self.replica_deaths)}; "
            f"{self.replica_restarts} started again, {self.returned_rows} unfinished rows went back"
        ]

    def _sharing(self) -> list[str]:
        if not self.shares:
            return []
        best = "" if self.attainable_tokens is None else f" of {self.attainable_tokens} attainable within its windows"
        rate = "no page looked up" if math.isnan(self.hit_rate) else f"{self.hit_rate:.1%} of pages found"
        return [f"prefix cache: {self.cached_tokens} prompt tokens not run{best}, {rate}, {self.evictions} evictions"]


def clock_text(seconds: float) -> str:
    """A duration as hours, minutes and seconds.

    >>> clock_text(59.6), clock_text(3661), clock_text(400_000)
    ('0:01:00', '1:01:01', '111:06:40')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
