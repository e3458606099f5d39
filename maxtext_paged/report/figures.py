"""Every figure of a job that is shown, once: its name, kind, unit and meaning.

For:        the metrics file in both its formats, the report's tables and docs/watching.md, which all read this list.
Not for:    computing figures: each is read off ``JobCounts`` or a distribution of the recorder.
May import: the standard library, maxtext_paged.report.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from maxtext_paged.report.counts import JobCounts
from maxtext_paged.report.histogram import QUANTILES, DurationHistogram
from maxtext_paged.report.recorder import Recorder

Value = int | float | Mapping[str, int] | Mapping[tuple[str, str], int] | None


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure.

    Attributes:
      part: ``run`` (this process, from zero) or ``file`` (all rows of the input, earlier runs included).
      name: in the JSON file. metric: in Prometheus text, ``maxtext_paged_`` before it.
      kind: counters only go up during a run. unit: of the number.
      meaning: one sentence.
      read: where it comes from.
      labels: of the metric; then the value is a mapping from their values.
    """

    part: Literal["run", "file"]
    name: str
    metric: str
    kind: Literal["counter", "gauge"]
    unit: str
    meaning: str
    read: Callable[[JobCounts], Value]
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Distribution:
    """One distribution of seconds; fields as in ``Figure``."""

    name: str
    metric: str
    meaning: str
    read: Callable[[Recorder], DurationHistogram]


def _run(
    kind: Literal["counter", "gauge"],
    name: str,
    metric: str,
    unit: str,
    meaning: str,
    read: Callable[[JobCounts], Value],
    *labels: str,
) -> Figure:
    return Figure("run", name, metric, kind, unit, meaning, read, labels)


def _file(name: str, metric: str, meaning: str, read: Callable[[JobCounts], Value], *labels: str) -> Figure:
    return Figure("file", name, metric, "gauge", "rows", meaning, read, labels)


FIGURES: tuple[Figure, ...] = (
    _file("total", "file_rows", "Rows of the input.", lambda c: c.total),
    _file(
        "rows",
        "file_rows_by_state",
        "Rows of the input by what stands in the output: ok (answered), failed (an error record), missing (no record).",
        lambda c: {
            "ok": c.done - c.failed - c.earlier_failed,
            "failed": c.failed + c.earlier_failed,
            "missing": c.total - c.done,
        },
        "state",
    ),
    _file(
        "earlier",
        "file_earlier_rows",
        "Rows whose record was there before this run, which --resume did not run again.",
        lambda c: {"ok": c.earlier - c.earlier_failed, "failed": c.earlier_failed},
        "outcome",
    ),
    _run(
        "counter",
        "rows",
        "rows_total",
        "rows",
        "Rows whose record this run wrote: ok (answered) or failed.",
        lambda c: {"ok": c.ok, "failed": c.failed},
        "outcome",
    ),
    _run(
        "counter",
        "failures",
        "row_failures_total",
        "rows",
        "The failed ones of them by the code of their error.",
        lambda c: c.failures,
        "code",
    ),
    _run(
        "gauge",
        "seconds",
        "run_seconds",
        "seconds",
        "Since the first row was drawn; loading the model came before.",
        lambda c: c.seconds,
    ),
    _run(
        "counter",
        "prompt_tokens",
        "prompt_tokens_total",
        "tokens",
        "Prompt tokens of answered rows; with several samples the prompt counts once.",
        lambda c: c.prompt_tokens,
    ),
    _run(
        "counter",
        "generated_tokens",
        "generated_tokens_total",
        "tokens",
        "Completion tokens of answered rows.",
        lambda c: c.generated_tokens,
    ),
    _run(
        "counter",
        "sampled_tokens",
        "sampled_tokens_total",
        "tokens",
        "Tokens sampled and kept so far, those of rows still under way and of failed rows included.",
        lambda c: c.sampled_tokens,
    ),
    _run(
        "gauge",
        "tokens_per_second",
        "generated_tokens_per_second",
        "tokens a second",
        "generated_tokens / seconds: the rate in the summary.",
        lambda c: c.tokens_per_second,
    ),
    _run(
        "gauge",
        "sampled_tokens_per_second",
        "sampled_tokens_per_second",
        "tokens a second",
        "sampled_tokens / seconds: the rate that progress shows.",
        lambda c: c.sampled_tokens_per_second,
    ),
    _run(
        "gauge",
        "eta_seconds",
        "eta_seconds",
        "seconds",
        "What the missing rows take at this run's rows a second; absent until a row was answered.",
        lambda c: c.eta_seconds,
    ),
    _run(
        "gauge",
        "running",
        "running_requests",
        "requests",
        "Requests that hold pages and take part in steps.",
        lambda c: c.running,
    ),
    _run(
        "gauge",
        "waiting",
        "waiting_requests",
        "requests",
        "Requests in the engine's queue, new or preempted; the rest of the file is not in it.",
        lambda c: c.waiting,
    ),
    _run("gauge", "pages", "pool_pages", "pages", "Pages of the pool.", lambda c: c.num_pages),
    _run(
        "gauge",
        "pages_held",
        "pool_pages_held",
        "pages",
        "Pages that are not free; those that only the prefix cache keeps are among them.",
        lambda c: c.pages_held,
    ),
    _run(
        "gauge",
        "peak_pages",
        "pool_pages_held_peak",
        "pages",
        "Most pages that were not free after a step.",
        lambda c: c.peak_pages,
    ),
    _run(
        "gauge",
        "window_pages",
        "window_pool_pages",
        "pages",
        "Pages of the pools of layers with this window; absent where no layers have pools of their own.",
        lambda c: c.window_pages,
        "window",
    ),
    _run(
        "gauge",
        "window_pages_held",
        "window_pool_pages_held",
        "pages",
        "Of those, the pages that are not free.",
        lambda c: c.window_pages_held,
        "window",
    ),
    _run(
        "gauge",
        "window_peak_pages",
        "window_pool_pages_held_peak",
        "pages",
        "Of those, the most that were not free.",
        lambda c: c.window_peak_pages,
        "window",
    ),
    _run(
        "counter",
        "scrubbed_pages",
        "scrubbed_pages_total",
        "pages",
        "Recycled pages that were overwritten before reuse.",
        lambda c: c.scrubbed_pages,
    ),
    _run("counter", "steps", "steps_total", "steps", "Steps of the model that were run.", lambda c: c.steps),
    _run(
        "counter",
        "preemptions",
        "preemptions_total",
        "preemptions",
        "Times that a request was sent back for want of pages, to be computed again.",
        lambda c: c.preemptions,
    ),
    _run(
        "counter",
        "attention_steps",
        "attention_steps_total",
        "steps",
        "Steps by attention backend.",
        lambda c: c.backends,
        "backend",
    ),
    _run(
        "counter",
        "decodes",
        "decodes_total",
        "launches",
        "Launches of decode rows, one for each step and attention window: fused (split-KV) or gather.",
        lambda c: c.decodes,
        "kind",
    ),
    _run(
        "counter",
        "decode_causes",
        "decode_causes_total",
        "launches",
        "The same launches by what decided how they ran.",
        lambda c: c.decode_causes,
        "kind",
        "cause",
    ),
    _run(
        "counter",
        "native_products",
        "native_products_total",
        "products",
        "Matrix products of few rows that our kernel computed; the others were XLA's.",
        lambda c: c.native_products,
    ),
    _run("gauge", "replicas", "replicas", "processes", "Processes that run rows.", lambda c: c.replicas),
    _run(
        "counter",
        "replica_deaths",
        "replica_deaths_total",
        "processes",
        "Processes of them that died.",
        lambda c: len(c.replica_deaths),
    ),
    _run(
        "counter",
        "replica_restarts",
        "replica_restarts_total",
        "processes",
        "Times that one of them was started again.",
        lambda c: c.replica_restarts,
    ),
    _run(
        "counter",
        "returned_rows",
        "returned_rows_total",
        "rows",
        "Unfinished rows of processes that died, which went back to be run again.",
        lambda c: c.returned_rows,
    ),
    _run(
        "counter",
        "programs",
        "programs_total",
        "programs",
        "Compiled programs obtained, from the compiler or from the cache on disk, by jitted function.",
        lambda c: c.programs,
        "function",
    ),
    _run(
        "counter",
        "cached_tokens",
        "cached_prompt_tokens_total",
        "tokens",
        "Prompt tokens of this run's rows that were not computed: the prefix cache or another sample of the row had "
        "them.",
        lambda c: c.cached_tokens,
    ),
    _run(
        "gauge",
        "attainable_tokens",
        "attainable_prompt_tokens",
        "tokens",
        "Prompt tokens that sharing could avoid at best within the windows in which rows were ordered; absent where "
        "they were not.",
        lambda c: c.attainable_tokens,
    ),
    _run(
        "gauge",
        "hit_rate",
        "prefix_page_hit_ratio",
        "ratio",
        "Pages found in the prefix cache / pages looked up; absent before any was.",
        lambda c: c.hit_rate,
    ),
    _run(
        "counter",
        "evictions",
        "prefix_evictions_total",
        "pages",
        "Cached pages given up for room.",
        lambda c: c.evictions,
    ),
)

DISTRIBUTIONS: tuple[Distribution, ...] = (
    Distribution(
        "queue_seconds",
        "queue_seconds",
        "Queue time: from a row's submission to the engine until the first step that runs it begins. Rows are "
        "submitted as there is room, so this is not the wait since the start of the job.",
        lambda r: r.clocks.queue,
    ),
    Distribution(
        "ttft_seconds",
        "time_to_first_token_seconds",
        "TTFT: from a row's submission until the step that brought its first token ended; queue time is part of it. "
        "Rows without a token have none.",
        lambda r: r.clocks.ttft,
    ),
    Distribution(
        "itl_seconds",
        "inter_token_latency_seconds",
        "ITL: between the ends of the steps that brought two consecutive tokens of one sample, preemptions included.",
        lambda r: r.clocks.itl,
    ),
    Distribution(
        "latency_seconds",
        "row_latency_seconds",
        "Latency: from a row's submission until the step that brought its last token ended; of answered rows.",
        lambda r: r.latency,
    ),
    Distribution(
        "step_seconds",
        "step_seconds",
        "Step time: one turn of the loop that dispatches a step and reads results: its own, or with look-ahead those "
        "of the step before.",
        lambda r: r.step,
    ),
)


def known(value: Value) -> Value:
    """None for what is not a number (yet)."""
    return None if isinstance(value, float) and math.isnan(value) else value


def snapshot(recorder: Recorder) -> dict[str, Any]:
    """All figures and distributions as JSON has them."""
    found: dict[str, Any] = {"file": {}, "run": {}, "distributions": {}}
    for figure in FIGURES:
        found[figure.part][figure.name] = _plain(figure, known(figure.read(recorder.counts)))
    for distribution in DISTRIBUTIONS:
        histogram = distribution.read(recorder)
        found["distributions"][distribution.name] = {
            "count": histogram.count,
            "sum": histogram.sum,
            **{name: known(getattr(histogram, name)) for name in ("mean", "min", "max")},
            **{f"p{share * 100:g}": known(histogram.quantile(share)) for share in QUANTILES},
            "buckets": {bound_label(end): count for end, count in histogram.cumulative()},
        }
    return found


def bound_label(end: float) -> str:
    """A bucket's upper end as Prometheus writes it."""
    return "+Inf" if math.isinf(end) else f"{end:.10g}"


def _plain(figure: Figure, value: Value) -> Any:
    if isinstance(value, Mapping) and len(figure.labels) > 1:
        return [{**dict(zip(figure.labels, key, strict=True)), "count": count} for key, count in value.items()]
    return dict(value) if isinstance(value, Mapping) else value
