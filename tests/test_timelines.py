"""Time lines: a bar is where its interval is, inside its frame, whatever the file holds."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.report.data import RunData
from lockstep.report.timelines import LEFT, STEPS, WIDTH, timeline_figure
from lockstep.train.clock import Clock, covered


def interval(role: str, what: str, start: float, end: float) -> dict[str, Any]:
    return {"role": role, "what": what, "from": start, "to": end}


def bars(svg: str) -> list[tuple[str, float, float]]:
    return [(p, float(x), float(w)) for p, x, w in re.findall(r'class="bar p-(\w+)" d="M([\d.]+) \d+h([\d.]+)v', svg)]


def test_bars_are_where_their_intervals_are() -> None:
    lines = (
        {"step": 1, "seconds": 2.0, "intervals": [interval("actor", "train", 1.0, 2.0)]},
        {"step": 2, "seconds": 4.0, "intervals": [interval("rollout", "generate 3", 0.0, 4.0)]},
    )
    figure = timeline_figure(RunData(Path("run"), timeline=lines))
    unit = (WIDTH - LEFT - 10) / 4
    assert bars(figure.chart) == [
        ("train", pytest.approx(LEFT + unit, abs=0.1), pytest.approx(unit, abs=0.1)),
        ("generate", pytest.approx(LEFT, abs=0.1), pytest.approx(4 * unit, abs=0.1)),
    ]
    assert figure.legend == (("bar p-generate", "generate"), ("bar p-train", "train"))
    assert 'aria-label="What actor, rollout did in steps 1 to 2"' in figure.chart


ANYTHING = st.none() | st.floats() | st.text(max_size=5) | st.integers()
LINES = st.lists(
    st.fixed_dictionaries(
        {"step": st.integers(), "seconds": ANYTHING},
        optional={
            "intervals": ANYTHING
            | st.lists(
                ANYTHING
                | st.fixed_dictionaries({"role": ANYTHING, "what": ANYTHING, "from": ANYTHING, "to": ANYTHING}),
                max_size=4,
            )
        },
    ),
    max_size=STEPS + 2,
)


@given(LINES)
def test_any_file_makes_a_well_formed_chart_inside_its_frame(lines: list[dict[str, Any]]) -> None:
    figure = timeline_figure(RunData(Path("run"), timeline=tuple(lines)))
    if figure is not None:
        ElementTree.fromstring(str(figure.chart))
        assert all(x >= LEFT and x + w <= WIDTH for _, x, w in bars(figure.chart))


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)).map(lambda ab: (min(ab), max(ab))), max_size=8))
def test_the_covered_length_is_that_of_the_union(intervals: list[tuple[int, int]]) -> None:
    assert covered(intervals) == len({second for a, b in intervals for second in range(a, b)})


class Silent:
    def phase(self, name: str) -> None:
        pass


def test_waiting_for_a_flip_is_not_work() -> None:
    clock = Clock(Silent(), 0.0, 0.0)
    clock.enter("sync")
    clock.enter(None)
    (whole,) = clock.intervals
    clock.waited((whole.end - whole.start) / 2)
    work, wait = clock.intervals
    assert (work.what, wait.what) == ("sync", "wait")
    assert work.start == whole.start and work.end == wait.start and wait.end == whole.end
    clock.waited(0.0)
