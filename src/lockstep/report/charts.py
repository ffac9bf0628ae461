"""Charts as inline SVG, from numbers. Colours come from the page's style sheet by class, so light and dark both work.

Every chart has a title and a one-sentence description for screen readers, and carries its numbers as data attributes,
from which the page's script makes crosshair and tooltip; without the script the chart is complete all the same.
A value that is missing, not finite or absurdly large is a gap, and said in the description.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeGuard

from markupsafe import Markup

from lockstep.text import sanitize

LEFT, RIGHT, TOP, BOTTOM = 54, 14, 12, 26
MAX_POINTS = 600
LARGEST = 1e300  # what is larger than this, or smaller than its inverse, is beyond an axis in doubles
Values = Sequence[float | None]


@dataclass(frozen=True)
class Series:
    """One line of a chart. style: its class in the style sheet. kind: how it is drawn."""

    label: str
    values: Values
    style: str = "s1"
    kind: Literal["line", "points"] = "line"


@dataclass(frozen=True)
class Scale:
    """A linear axis: data low..high onto pixels start..stop, with the values that get a tick."""

    low: float
    high: float
    start: float
    stop: float
    ticks: tuple[float, ...]

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.stop - self.start)


def line_chart(
    title: str,
    steps: Sequence[int],
    series: Sequence[Series],
    *,
    size: tuple[int, int] = (560, 190),
    limit: tuple[str, float] | None = None,
) -> Markup:
    """Lines or points over training steps. size: width, height. limit: (label, value) of a dashed line across.

    The y axis starts at zero unless values are negative. More than `MAX_POINTS` steps are drawn as means of neighbours.
    """
    steps, series, stride = _thinned(steps, series)
    known = [v for s in series for v in s.values if _is_number(v)]
    if limit is not None:
        known.append(limit[1])
    x = _step_scale(steps, size[0])
    y = y_scale(known, size[1])
    body = _axes(x, y, size)
    for one in series:
        body += _points(one, steps, x, y) if one.kind == "points" else _line(one, steps, x, y)
    if limit is not None:
        at = y(limit[1])
        body += Markup('<line class="limit" x1="{}" x2="{}" y1="{:.1f}" y2="{:.1f}"/>').format(
            LEFT, size[0] - RIGHT, at, at
        )
        body += Markup('<text class="limit" x="{}" y="{:.1f}" text-anchor="end">{}</text>').format(
            size[0] - RIGHT, at - 4, limit[0]
        )
    return _svg(title, _describe(steps, series, stride), body, steps, series, [x(s) for s in steps], size)


def stacked_bars(
    title: str, steps: Sequence[int], parts: Sequence[Series], *, size: tuple[int, int] = (1140, 240)
) -> Markup:
    """One bar per step, its parts on top of each other, in the order given."""
    steps, parts, stride = _thinned(steps, parts)
    totals = [sum(v for p in parts if _is_number(v := p.values[i])) for i in range(len(steps))]
    x = _step_scale(steps, size[0], bars=True)
    y = y_scale(totals, size[1])
    body = _axes(x, y, size)
    width = max(1.0, min(36.0, 0.78 * (x.stop - x.start) / max(1, len(steps))))
    foot = [0.0] * len(steps)
    for part in parts:
        path = ""
        for i, step in enumerate(steps):
            value = part.values[i]
            if _is_number(value) and value > 0:
                top, bottom = y(foot[i] + value), y(foot[i])
                path += f"M{x(step) - width / 2:.1f} {bottom:.1f}V{top:.1f}h{width:.1f}V{bottom:.1f}z"
                foot[i] += value
        body += Markup('<path class="bar {}" d="{}"/>').format(part.style, path)
    return _svg(title, _describe(steps, parts, stride), body, steps, parts, [x(s) for s in steps], size)


def y_scale(values: Sequence[float], height: int) -> Scale:
    """A y axis for the values: from zero (or below, when some are negative) to a round number above the largest."""
    low, high = min([0.0, *values]), max([0.0, *values])
    if high - low < 1 / LARGEST:
        # All zero, or next to it: a line at the foot of an axis with that one number, not an invented scale.
        return Scale(low, 1.0, height - BOTTOM, TOP, (0.0,))
    tick = tick_size(high - low, 4)
    low, high = math.floor(low / tick + 1e-9) * tick, math.ceil(high / tick - 1e-9) * tick
    count = round((high - low) / tick)
    return Scale(low, high, height - BOTTOM, TOP, tuple(low + i * tick for i in range(count + 1)))


def tick_label(value: float, tick: float) -> str:
    """A tick's number with as many digits as its axis needs."""
    if abs(value) < tick * 1e-9:
        return "0"
    if tick >= 1e5 or tick < 1e-4:
        return f"{value:.2g}".replace("e-0", "e-").replace("e+0", "e")
    return f"{value:.{max(0, -math.floor(math.log10(tick) + 1e-9))}f}"


def rolling_mean(values: Values, window: int) -> list[float | None]:
    """Mean of the last `window` values (fewer at the start) at each position; None where none of them is a number."""
    out: list[float | None] = []
    for end in range(1, len(values) + 1):
        known = [v for v in values[max(0, end - window) : end] if _is_number(v)]
        out.append(sum(known) / len(known) if known else None)
    return out


def _is_number(value: float | None) -> TypeGuard[float]:
    return value is not None and abs(value) < LARGEST


def tick_size(span: float, count: int) -> float:
    """1, 2 or 5 times a power of ten, for at most about `count` intervals."""
    raw = span / count
    power = 10.0 ** math.floor(math.log10(raw))
    return next(m * power for m in (1, 2, 5, 10) if m * power >= raw * (1 - 1e-9))


def _step_scale(steps: Sequence[int], width: int, bars: bool = False) -> Scale:
    first, last = (steps[0], steps[-1]) if steps else (0, 1)
    pad = (last - first) / max(1, len(steps) - 1) * 0.6 if bars and last > first else 0.0
    low, high = (first - pad, last + pad) if last > first else (first - 1.0, first + 1.0)
    tick = max(1, round(tick_size(last - first, 10))) if last > first else 1
    ticks = tuple(float(t) for t in range(math.ceil(first / tick) * tick, last + 1, tick))
    return Scale(low, high, LEFT, width - RIGHT, ticks)


def _axes(x: Scale, y: Scale, size: tuple[int, int]) -> Markup:
    width, height = size
    body = Markup()
    tick = y.ticks[1] - y.ticks[0] if len(y.ticks) > 1 else 1.0
    for value in y.ticks:
        at = y(value)
        kind = "zero" if abs(value) < tick * 1e-9 else "rule"
        body += Markup('<line class="{}" x1="{}" x2="{}" y1="{:.1f}" y2="{:.1f}"/>').format(
            kind, LEFT, width - RIGHT, at, at
        )
        body += Markup('<text class="tick" x="{}" y="{:.1f}" text-anchor="end">{}</text>').format(
            LEFT - 7, at + 4, tick_label(value, tick)
        )
    for value in x.ticks:
        body += Markup('<text class="tick" x="{:.1f}" y="{}" text-anchor="middle">{:.0f}</text>').format(
            x(value), height - 8, value
        )
    return body


def _line(series: Series, steps: Sequence[int], x: Scale, y: Scale) -> Markup:
    """A polyline with gaps; a value between two gaps would be invisible as a line, so it is a dot."""
    runs: list[list[str]] = [[]]
    for step, value in zip(steps, series.values, strict=True):
        if _is_number(value):
            runs[-1].append(f"{x(step):.1f} {y(value):.1f}")
        elif runs[-1]:
            runs.append([])
    path = "".join("M" + "L".join(run) for run in runs if len(run) > 1)
    body = Markup('<path class="line {}" d="{}"/>').format(series.style, path) if path else Markup()
    for run in runs:
        if len(run) == 1:
            cx, cy = run[0].split()
            body += Markup('<circle class="dot {}" cx="{}" cy="{}" r="3"/>').format(series.style, cx, cy)
    return body


def _points(series: Series, steps: Sequence[int], x: Scale, y: Scale) -> Markup:
    return Markup("").join(
        Markup('<circle class="dot {}" cx="{:.1f}" cy="{:.1f}" r="3"/>').format(series.style, x(step), y(value))
        for step, value in zip(steps, series.values, strict=True)
        if _is_number(value)
    )


def _thinned(steps: Sequence[int], series: Sequence[Series]) -> tuple[Sequence[int], Sequence[Series], int]:
    """At most MAX_POINTS steps, each the mean of `stride` neighbours, placed at their last step."""
    stride = -(-len(steps) // MAX_POINTS)
    if stride <= 1:
        return steps, series, 1
    cuts = range(0, len(steps), stride)
    ends = [steps[min(c + stride, len(steps)) - 1] for c in cuts]
    thin = [
        Series(s.label, [rolling_mean(s.values[c : c + stride], stride)[-1] for c in cuts], s.style, s.kind)
        for s in series
    ]
    return ends, thin, stride


def _describe(steps: Sequence[int], series: Sequence[Series], stride: int) -> str:
    if not steps:
        return "No steps yet."
    sentences = []
    for one in series:
        known = [v for v in one.values if _is_number(v)]
        gaps = len(one.values) - len(known)
        text = f"{one.label}: {known[0]:.4g} to {known[-1]:.4g}" if known else f"{one.label}: no numbers"
        sentences.append(text + (f", {gaps} missing or not finite" if gaps else ""))
    over = f"Steps {steps[0]} to {steps[-1]}" + (f", means of {stride} steps" if stride > 1 else "")
    return f"{over}. {'; '.join(sentences)}."


def _svg(
    title: str,
    description: str,
    body: Markup,
    steps: Sequence[int],
    series: Sequence[Series],
    pixels: Sequence[float],
    size: tuple[int, int],
) -> Markup:
    numbers = {s.label: [v if _is_number(v) else None for v in s.values] for s in series}
    return Markup(
        '<svg class="chart" viewBox="0 0 {w} {h}" role="img" tabindex="0" aria-label="{title}. {description}"'
        ' data-steps="{steps}" data-x="{x}" data-series="{series}">{body}'
        '<line class="cursor" y1="{top}" y2="{foot}" visibility="hidden"/></svg>'
    ).format(
        w=size[0],
        h=size[1],
        title=sanitize(title),
        description=sanitize(description),
        steps=json.dumps(list(steps)),
        x=json.dumps([round(p, 1) for p in pixels]),
        series=json.dumps(numbers),
        body=body,
        top=TOP,
        foot=size[1] - BOTTOM,
    )
