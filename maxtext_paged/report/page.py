"""The report: one HTML page that needs nothing but itself.

For:        putting a recorder's figures, charts and rows into the template.
Not for:    drawing (charts.py), writing the file (files.py) or gathering facts (cli).
May import: the standard library, numpy, jinja2, markupsafe, maxtext_paged.report.

No script is in it and its content security policy allows none: ids, messages and paths come from users. They reach the
template as text, which it escapes.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup

from maxtext_paged.report.charts import Line, duration_chart, share_chart, time_chart
from maxtext_paged.report.figures import DISTRIBUTIONS, FIGURES, known
from maxtext_paged.report.histogram import QUANTILES
from maxtext_paged.report.recorder import Recorder
from maxtext_paged.report.rows import MAX_ROWS
from maxtext_paged.report.words import amount, duration, visible

MARK = "<!doctype html>\n<!-- maxtext-paged report -->\n"
"""How every report begins: by it the next run knows that it may replace the file."""

_LOOKS = {"fused": "a", "gather": "b"}


@dataclass(frozen=True, slots=True)
class JobState:
    """How a job stands when it is shown.

    Attributes:
      word: running, complete, interrupted or failed. reason: why it stopped, or what there is to say of it.
      resumable: how to go on; None where there is nothing to go on with.
      facts: heading to what stands below it, name to value: versions, device, configuration, command.
    """

    word: str = "running"
    reason: str = ""
    resumable: str | None = None
    facts: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


def report_page(recorder: Recorder, state: JobState, *, written_at: float) -> bytes:
    """The whole page."""
    counts = recorder.counts
    page = _template().render(
        state=state,
        counts=counts,
        started=_moment(recorder.started_at),
        written=_moment(written_at),
        cards=_cards(recorder),
        courses=_courses(recorder),
        distributions=[
            duration_chart(f"chart-{each.name}", each.meaning.split(":")[0], _UNITS[each.name], each.read(recorder))
            for each in DISTRIBUTIONS
        ],
        quantiles=_quantiles(recorder),
        dispatch=_dispatch(recorder),
        causes=[(kind, cause, count) for (kind, cause), count in counts.decode_causes.items()],
        max_rows=MAX_ROWS,
        slowest=recorder.notable.slowest,
        failed=recorder.notable.failed,
        figures=_figures(recorder),
        summary=counts.summary(),
    )
    return (MARK + page).encode("utf-8", "replace")


_UNITS = {
    "queue_seconds": "rows",
    "ttft_seconds": "rows",
    "itl_seconds": "gaps",
    "latency_seconds": "rows",
    "step_seconds": "steps",
}


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("maxtext_paged", "report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(amount=amount, duration=duration, visible=visible)
    return environment.get_template("template.html")


def _cards(recorder: Recorder) -> list[tuple[str, str, str]]:
    """(name, value, note) of what is looked at first."""
    counts = recorder.counts
    hits = known(counts.hit_rate)
    eta = counts.eta_seconds
    return [
        ("rows answered", amount(counts.ok), f"of {amount(counts.total)} in the file"),
        ("rows failed", amount(counts.failed), f"{amount(counts.total - counts.done)} without a record"),
        ("generated tokens", amount(counts.generated_tokens), f"{amount(counts.tokens_per_second)} a second"),
        ("prompt tokens", amount(counts.prompt_tokens), f"{amount(counts.cached_tokens)} from the prefix cache"),
        ("time", duration(counts.seconds), f"about {duration(eta)} left" if eta else "since the first row was drawn"),
        ("most pages held", amount(counts.peak_pages), f"of {amount(counts.num_pages)}"),
        ("preemptions", amount(counts.preemptions), f"in {amount(counts.steps)} steps"),
        ("prefix hit rate", f"{hits:.1%}" if isinstance(hits, float) else "none", "of pages looked up"),
    ]


def _courses(recorder: Recorder) -> list[Markup]:
    series, counts = recorder.series, recorder.counts
    ends = np.append(series.starts(), series.end)

    def rate(name: str, label: str, look: str = "a", *, filled: bool = True) -> Line:
        return Line(label, series.rates(name), look, filled)

    def level(name: str, label: str, look: str, *, filled: bool = False) -> Line:
        return Line(label, series.means(name), look, filled)

    return [
        time_chart("chart-tokens", "Generated tokens", "tokens/s", ends, [rate("sampled_tokens", "generated")]),
        time_chart("chart-prompt", "Prompt tokens computed", "tokens/s", ends, [rate("prompt_tokens", "computed")]),
        time_chart(
            "chart-rows",
            "Rows finished",
            "rows/s",
            ends,
            [rate("ok", "answered"), rate("failed", "failed", "bad", filled=False)],
        ),
        time_chart(
            "chart-requests",
            "Requests",
            "requests",
            ends,
            [level("running", "running", "a", filled=True), level("waiting", "waiting in the engine", "b")],
        ),
        time_chart(
            "chart-pages",
            f"Pages of the pool ({amount(counts.num_pages)} in all, dashed)",
            "pages",
            ends,
            [level("pages_held", "not free", "b"), level("pages_needed", "held by requests", "a", filled=True)],
            ceiling=float(counts.num_pages) or None,
        ),
        time_chart("chart-preemptions", "Preemptions", "a second", ends, [rate("preemptions", "sent back", "bad")]),
    ]


def _quantiles(recorder: Recorder) -> list[tuple[str, list[str], str]]:
    """(name, cells, meaning) of each distribution."""
    rows = []
    for each in DISTRIBUTIONS:
        histogram = each.read(recorder)
        cells = [amount(histogram.count), duration(histogram.mean), duration(histogram.min)]
        cells += [duration(histogram.quantile(share)) for share in QUANTILES] + [duration(histogram.max)]
        name, meaning = each.meaning.split(": ", 1)
        rows.append((name, cells, meaning[0].upper() + meaning[1:]))
    return rows


def _dispatch(recorder: Recorder) -> Markup:
    shares = [(kind, count, _LOOKS.get(kind, "c")) for kind, count in recorder.counts.decodes.items()]
    return share_chart("chart-dispatch", "Launches of decode rows", shares)


def _figures(recorder: Recorder) -> list[tuple[str, str, str, str]]:
    """(name, value, unit, meaning) of every figure, as the metrics file has them."""
    found = []
    for figure in FIGURES:
        value = known(figure.read(recorder.counts))
        if isinstance(value, Mapping):
            shown = ", ".join(f"{_label(key)} {amount(number)}" for key, number in value.items()) or "none"
        else:
            shown = "not known" if value is None else amount(value)
        found.append((f"{figure.part}.{figure.name}", shown, figure.unit, figure.meaning))
    return found


def _label(key: Any) -> str:
    return key if isinstance(key, str) else " / ".join(key)


def _moment(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(seconds))
