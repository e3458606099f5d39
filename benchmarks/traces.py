"""Traces of requests, and when each of their tokens came.

For:        reading and generating traces, and latencies from a side table keyed by request.
Not for:    running anything.
May import: the standard library, benchmarks.records (also as a plain module, from peers' environments).
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

try:
    from benchmarks.records import percentile
except ImportError:  # a peer's process, which has only these files
    from records import percentile

DEFAULT_TRACE = Path(__file__).parent / "data" / "trace-smollm2.json"
"""32 requests, prompts of 16 to 507 tokens cut from one English text, 16 to 128 output tokens, all at once."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One request of a trace: greedy, end tokens ignored."""

    prompt: list[int]
    max_tokens: int


def read_trace(path: Path, limit: int | None = None) -> list[Asked]:
    """A trace file: ``{"requests": [{"prompt": [ids], "max_tokens": n}, ...]}``."""
    requests = json.loads(path.read_text(encoding="utf-8"))["requests"]
    return [Asked(list(entry["prompt"]), int(entry["max_tokens"])) for entry in requests[:limit]]


def generate_trace(
    num_requests: int, seed: int, vocab_size: int, *, prompts: tuple[int, int], outputs: tuple[int, int]
) -> list[Asked]:
    """Random ids; prompt lengths log-uniform, output lengths uniform, both ends included.

    >>> one, other = (generate_trace(3, seed, 50, prompts=(2, 9), outputs=(1, 4)) for seed in (0, 0))
    >>> one == other, all(2 <= len(asked.prompt) <= 9 and 1 <= asked.max_tokens <= 4 for asked in one)
    (True, True)
    """
    rng = random.Random(seed)
    made = []
    for _ in range(num_requests):
        length = round(math.exp(rng.uniform(math.log(prompts[0]), math.log(prompts[1]))))
        made.append(Asked([rng.randrange(3, vocab_size) for _ in range(length)], rng.randint(*outputs)))
    return made


@dataclass(frozen=True, slots=True)
class Latencies:
    """Of one pass, in seconds from the start, when all requests had been submitted.

    Attributes:
      ttft_p50, ttft_p99: to a request's first token. itl_p50, itl_p99: between consecutive tokens of a request.
      last: to the last token of all. num_tokens: generated.
    """

    ttft_p50: float
    ttft_p99: float
    itl_p50: float
    itl_p99: float
    last: float
    num_tokens: int


def latencies(times: Sequence[Sequence[float]]) -> Latencies:
    """From each request's token times.

    >>> latencies([[1.0, 1.5, 2.5], [3.0]])
    Latencies(ttft_p50=1.0, ttft_p99=3.0, itl_p50=0.5, itl_p99=1.0, last=3.0, num_tokens=4)
    """
    first = [own[0] for own in times if own]
    gaps = [after - before for own in times for before, after in pairwise(own)]
    return Latencies(
        percentile(first, 50),
        percentile(first, 99),
        percentile(gaps, 50),
        percentile(gaps, 99),
        max((own[-1] for own in times if own), default=math.nan),
        sum(map(len, times)),
    )


def decode_rate(times: Sequence[Sequence[float]]) -> float:
    """Tokens a second after the last request's first token: pure decoding."""
    start, end = max(own[0] for own in times), max(own[-1] for own in times)
    return sum(time > start for own in times for time in own) / (end - start)


def probe_prompts(trace: Sequence[Asked], batch: int, length: int) -> list[list[int]]:
    """``batch`` different prompts of exactly ``length`` ids, cut from the trace's own."""
    ids: list[Any] = [token for asked in trace for token in asked.prompt]
    while len(ids) < 37 * batch + length:
        ids += ids
    return [ids[i * 37 : i * 37 + length] for i in range(batch)]
