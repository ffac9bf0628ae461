"""Charts: a line is where its numbers are, inside its frame, whatever the numbers."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lockstep.report.charts import MAX_POINTS, Series, line_chart, rolling_mean, stacked_bars, tick_label, y_scale


def points(svg: str, kind: str = "line") -> list[tuple[float, float]]:
    path = re.search(rf'<path class="{kind} [^"]*" d="([^"]*)"', svg)
    return [(float(x), float(y)) for x, y in re.findall(r"[ML]([\d.-]+) ([\d.-]+)", path[1])] if path else []


def test_a_line_is_where_its_numbers_are() -> None:
    svg = line_chart("T", [1, 2, 3], [Series("a", [0.0, 5.0, 10.0])], size=(200, 100))
    assert points(svg) == [(54.0, 74.0), (120.0, 43.0), (186.0, 12.0)]
    assert 'aria-label="T. Steps 1 to 3. a: 0 to 10."' in svg


def test_stacked_bars_stand_on_each_other() -> None:
    svg = stacked_bars("T", [1, 2], [Series("a", [1.0, None]), Series("b", [3.0, 4.0])], size=(200, 100))
    first, second = re.findall(r'd="([^"]*)"', svg)
    assert first.count("M") == 1 and second.count("M") == 2
    feet = [float(y) for y in re.findall(r"M[\d.]+ ([\d.]+)", second)]
    assert feet == [pytest.approx(58.5, abs=0.1), 74.0], "b stands on a in step 1, on the axis in step 2"


NUMBERS = st.none() | st.floats()


@given(st.lists(NUMBERS, max_size=30), st.integers(1, 1000))
def test_any_numbers_make_a_well_formed_chart_inside_its_frame(values: list[float | None], first: int) -> None:
    steps = list(range(first, first + len(values)))
    svg = str(line_chart("T", steps, [Series("<a>&\"'", values), Series("p", values, "s2", "points")]))
    ElementTree.fromstring(svg)
    for x, y in points(svg):
        assert 54 <= x <= 546 and 11 <= y <= 165
    assert "nan" not in svg.replace("finite", "") and "inf" not in svg.replace("finite", "")


@given(st.lists(st.floats(-1e12, 1e12), min_size=1, max_size=9))
@example([-5e-324])
def test_axes_cover_the_values_with_few_distinct_ticks(values: list[float]) -> None:
    scale = y_scale(values, 190)
    slack = 1e-9 * max(map(abs, values))
    assert scale.low - slack <= min(0.0, *values) and max(0.0, *values) <= scale.high + slack
    assert 1 <= len(scale.ticks) <= 8
    tick = scale.ticks[1] - scale.ticks[0] if len(scale.ticks) > 1 else 1.0
    labels = [tick_label(t, tick) for t in scale.ticks]
    assert len(set(labels)) == len(labels)


def test_rolling_mean() -> None:
    assert rolling_mean([1.0, 2.0, 3.0, None, math.nan, math.nan, math.nan, math.nan], 3) == [
        1,
        1.5,
        2,
        2.5,
        3,
        None,
        None,
        None,
    ]


def test_thinned_charts_keep_the_ends() -> None:
    steps = list(range(1, 2 * MAX_POINTS))
    svg = line_chart("T", steps, [Series("a", [1.0] * len(steps))])
    assert len(points(svg)) == MAX_POINTS and f"Steps 2 to {steps[-1]}, means of 2 steps" in svg
