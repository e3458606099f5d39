"""Charts as SVG text: courses over time, and distributions on a logarithmic axis.

For:        drawing numbers. Every text in them is escaped, every chart has a title, a description, axes and units.
Not for:    choosing what is shown (page.py) or colours (template.html).
May import: the standard library, numpy, markupsafe, maxtext_paged.report.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup, escape
from numpy.typing import NDArray

from maxtext_paged.report.histogram import DurationHistogram
from maxtext_paged.report.words import amount, duration

WIDTH, HEIGHT = 640, 220
LEFT, RIGHT, TOP, BOTTOM = 64, 26, 12, 40
_PLOT_WIDTH, _PLOT_HEIGHT = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
_TICK_WIDTH = 42  # a label and some room
_TIME_STEPS = (
    0.1,
    0.2,
    0.5,
    1,
    2,
    5,
    10,
    20,
    30,
    60,
    120,
    300,
    600,
    1200,
    1800,
    3600,
    7200,
    14400,
    21600,
    43200,
    86400,
)


@dataclass(frozen=True, slots=True)
class Line:
    """One course: a value for each span, NaN where there is none.

    Attributes:
      label: in the legend. look: a class of the template's style. filled: whether the area below it is coloured.
    """

    label: str
    values: NDArray[np.float64]
    look: str
    filled: bool = False


def time_chart(
    name: str, title: str, unit: str, ends: NDArray[np.float64], lines: Sequence[Line], *, ceiling: float | None = None
) -> Markup:
    """Courses over the seconds since the start.

    Args:
      name: an id that no other chart of the page has. unit: of the values.
      ends: float64 ``[n + 1]``, where the spans begin, and where the last one ends.
      ceiling: a value that is marked by a line of its own, such as the size of the pool.
    """
    known = [line.values[np.isfinite(line.values)] for line in lines]
    if len(ends) < 2 or not any(len(values) for values in known):
        return _chart(name, title, "Nothing was recorded.", [_empty()], [])
    top = max([float(values.max()) for values in known if len(values)] + [ceiling or 0.0])
    ticks = nice_ticks(top)
    scale_y = _PLOT_HEIGHT / ticks[-1]
    scale_x = _PLOT_WIDTH / float(ends[-1])
    parts = [*_y_axis(ticks, scale_y, unit), *_time_axis(float(ends[-1]), scale_x)]
    xs = LEFT + ends * scale_x
    if ceiling is not None:
        y = TOP + _PLOT_HEIGHT - ceiling * scale_y
        parts.append(f'<line class="ceiling" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
    for line in lines:
        ys = TOP + _PLOT_HEIGHT - line.values * scale_y
        if line.filled:
            parts.append(f'<path class="area {line.look}" d="{_steps(xs, ys, closed=True)}"/>')
        parts.append(f'<path class="line {line.look}" d="{_steps(xs, ys)}"/>')
    parts += _hover(ends, xs, lines, unit)
    described = "; ".join(
        f"{line.label}: mean {amount(float(np.nanmean(line.values)))}, highest {amount(float(np.nanmax(line.values)))}"
        for line, values in zip(lines, known, strict=True)
        if len(values)
    )
    return _chart(name, title, f"{described} {unit}, over {duration(float(ends[-1]))}.", parts, lines)


def duration_chart(name: str, title: str, unit: str, histogram: DurationHistogram) -> Markup:
    """How many values lie in which bucket, on a logarithmic axis, with the median and the 99th percentile marked.

    Args:
      unit: what is counted.
    """
    buckets = [(low or high / 2, high, count) for low, high, count in histogram.filled()]
    if not buckets:
        return _chart(name, title, "Nothing was recorded.", [_empty()], [])
    first, last = math.log10(buckets[0][0]), math.log10(buckets[-1][1])
    pad = max(0.05 * (last - first), (0.6 - (last - first)) / 2)  # one value alone still gets an axis
    first, last = first - pad, last + pad
    scale_x = _PLOT_WIDTH / (last - first)

    def place(seconds: float) -> float:
        return LEFT + (math.log10(seconds) - first) * scale_x

    ticks = nice_ticks(max(count for _, _, count in buckets), whole=True)
    scale_y = _PLOT_HEIGHT / ticks[-1]
    parts = [*_y_axis(ticks, scale_y, unit), *_log_axis(first, last, place)]
    for low, high, count in buckets:
        if count:
            x, height = place(low), count * scale_y
            parts.append(
                f'<rect class="bar" x="{x:.1f}" y="{TOP + _PLOT_HEIGHT - height:.1f}" '
                f'width="{max(place(high) - x - 0.5, 0.5):.1f}" height="{height:.1f}">'
                f"<title>{escape(f'{duration(low)} to {duration(high)}: {count} {unit}')}</title></rect>"
            )
    for share, anchor in ((0.5, "p50"), (0.99, "p99")):
        x = place(max(histogram.quantile(share), 1e-7))
        parts.append(f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{TOP + _PLOT_HEIGHT}"/>')
        side = ("end", -3) if share == 0.5 else ("start", 3)
        parts.append(
            f'<text class="tick" text-anchor="{side[0]}" x="{x + side[1]:.1f}" y="{TOP + 9}">{escape(anchor)}</text>'
        )
    described = (
        f"{histogram.count} {unit}; median {duration(histogram.quantile(0.5))}, 99th percentile "
        f"{duration(histogram.quantile(0.99))}, longest {duration(histogram.max)}."
    )
    return _chart(name, title, described, parts, [])


def share_chart(name: str, title: str, shares: Sequence[tuple[str, int, str]]) -> Markup:
    """One bar, divided.

    Args:
      shares: (label, count, look) of each part.
    """
    total = sum(count for _, count, _ in shares)
    if not total:
        return Markup("")
    parts, x = [], 0.0
    for label, count, look in shares:
        width = WIDTH * count / total
        parts.append(
            f'<rect class="share {look}" x="{x:.1f}" y="0" width="{width:.1f}" height="22">'
            f"<title>{escape(f'{label}: {count} ({count / total:.1%})')}</title></rect>"
        )
        x += width
    described = ", ".join(f"{label} {count} ({count / total:.1%})" for label, count, _ in shares)
    legend = _legend([(label, look) for label, _, look in shares])
    return Markup(
        f'<figure class="chart share"><figcaption>{escape(title)}{legend}</figcaption>'
        f'<svg viewBox="0 0 {WIDTH} 22" role="img" aria-labelledby="{name}-title">'
        f'<title id="{name}-title">{escape(title)}: {escape(described)}</title>{"".join(parts)}</svg></figure>'
    )


# --- axes --------------------------------------------------------------------------------------------------


def nice_ticks(top: float, *, whole: bool = False) -> list[float]:
    """From 0 in equal steps of 1, 2 or 5 times a power of ten, up to at least ``top``.

    >>> nice_ticks(37.0), nice_ticks(0.0), nice_ticks(1, whole=True)
    ([0.0, 10.0, 20.0, 30.0, 40.0], [0.0, 1.0], [0.0, 1.0])
    """
    if not top > 0:
        return [0.0, 1.0]
    rough = top / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * mantissa for mantissa in (1, 2, 5, 10) if power * mantissa >= rough * 0.999)
    step = max(step, 1.0) if whole else step
    return [place * step for place in range(math.ceil(top / step - 1e-9) + 1)]


def _y_axis(ticks: Sequence[float], scale: float, unit: str) -> Iterator[str]:
    for tick in ticks:
        y = TOP + _PLOT_HEIGHT - tick * scale
        yield f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text class="tick" text-anchor="end" x="{LEFT - 6}" y="{y + 3.5:.1f}">{amount(tick)}</text>'
    middle = TOP + _PLOT_HEIGHT / 2
    yield (
        f'<text class="axis" text-anchor="middle" transform="rotate(-90 12 {middle:.0f})" x="12" y="{middle:.0f}">'
        f"{escape(unit)}</text>"
    )


def _time_axis(end: float, scale: float) -> Iterator[str]:
    step = next((step for step in _TIME_STEPS if end / step <= 8), math.ceil(end / 8 / 86400) * 86400)
    for place in range(int(end / step + 1e-9) + 1):
        yield from _x_tick(LEFT + place * step * scale, duration(place * step, short=True))
    yield _x_title("time since the first row was drawn")


def _log_axis(first: float, last: float, place: Callable[[float], float]) -> Iterator[str]:
    shown_at = -math.inf
    for seconds in _log_ticks(last - first):
        if first <= math.log10(seconds) <= last and place(seconds) - shown_at >= _TICK_WIDTH:
            shown_at = place(seconds)
            yield from _x_tick(shown_at, duration(seconds, short=True))
    yield _x_title("duration, logarithmic")


def _log_ticks(decades: float) -> Iterator[float]:
    """Round durations, as many as an axis over so many decades has room for."""
    mantissas = (1, 1.5, 2, 3, 4, 5, 7) if decades < 1.2 else (1, 2, 5) if decades < 3 else (1,)
    short = (mantissa * 10.0**decade for decade in range(-7, 2) for mantissa in mantissas)
    yield from (seconds for seconds in short if seconds < 60)
    minutes = (1, 1.5, 2, 3, 5, 7, 10, 15, 20, 30, 45) if decades < 1.2 else (1, 3, 10, 30) if decades < 3 else (1, 10)
    yield from (60.0 * value for value in minutes)
    hours = (
        (1, 1.5, 2, 3, 5, 7, 10, 20, 50, 100, 200)
        if decades < 1.2
        else (1, 3, 10, 30, 100)
        if decades < 3
        else (1, 10, 100)
    )
    yield from (3600.0 * value for value in hours)


def _x_tick(x: float, label: str) -> Iterator[str]:
    bottom = TOP + _PLOT_HEIGHT
    yield f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{bottom}" y2="{bottom + 4}"/>'
    yield f'<text class="tick" text-anchor="middle" x="{x:.1f}" y="{bottom + 15}">{escape(label)}</text>'


def _x_title(text: str) -> str:
    x = LEFT + _PLOT_WIDTH / 2
    return f'<text class="axis" text-anchor="middle" x="{x:.0f}" y="{HEIGHT - 6}">{escape(text)}</text>'


# --- parts -------------------------------------------------------------------------------------------------


def _steps(xs: NDArray[np.float64], ys: NDArray[np.float64], *, closed: bool = False) -> str:
    """A path that keeps each value over its whole span, and breaks where there is none."""
    bottom, path, begun = TOP + _PLOT_HEIGHT, [], False
    for i, y in enumerate(ys.tolist()):
        if not math.isfinite(y):
            if begun and closed:
                path.append(f"V{bottom}Z")
            begun = False
            continue
        if not begun:
            path.append(f"M{xs[i]:.1f} {bottom}V{y:.1f}" if closed else f"M{xs[i]:.1f} {y:.1f}")
        else:
            path.append(f"V{y:.1f}")
        path.append(f"H{xs[i + 1]:.1f}")
        begun = True
    if begun and closed:
        path.append(f"V{bottom}Z")
    return "".join(path)


def _hover(ends: NDArray[np.float64], xs: NDArray[np.float64], lines: Sequence[Line], unit: str) -> Iterator[str]:
    """What a pointer is told over each span."""
    for i in range(len(ends) - 1):
        told = ", ".join(
            f"{line.label} {amount(float(line.values[i]))}" for line in lines if math.isfinite(line.values[i])
        )
        if told:
            text = f"{duration(float(ends[i]))} to {duration(float(ends[i + 1]))}: {told} {unit}"
            yield (
                f'<rect class="hover" x="{xs[i]:.1f}" y="{TOP}" width="{xs[i + 1] - xs[i]:.1f}" '
                f'height="{_PLOT_HEIGHT}"><title>{escape(text)}</title></rect>'
            )


def _empty() -> str:
    return (
        f'<text class="axis" text-anchor="middle" x="{WIDTH / 2:.0f}" y="{HEIGHT / 2:.0f}">nothing was recorded</text>'
    )


def _legend(entries: Sequence[tuple[str, str]]) -> str:
    return "".join(f' <span class="key"><i class="{look}"></i>{escape(label)}</span>' for label, look in entries)


def _chart(name: str, title: str, described: str, parts: Sequence[str], lines: Sequence[Line]) -> Markup:
    legend = _legend([(line.label, line.look) for line in lines]) if len(lines) > 1 else ""
    return Markup(
        f'<figure class="chart" id="{name}"><figcaption>{escape(title)}{legend}</figcaption>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-labelledby="{name}-title {name}-desc">'
        f'<title id="{name}-title">{escape(title)}</title><desc id="{name}-desc">{escape(described)}</desc>'
        f"{''.join(parts)}</svg></figure>"
    )
