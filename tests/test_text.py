"""What errors suggest for a name that nothing has; sizes for people."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.text import closest, did_you_mean, format_bytes

NAMES = ["temperature", "samples", "prompts"]


def test_a_near_name_is_suggested_and_a_far_one_is_not() -> None:
    assert did_you_mean("temprature", NAMES) == "; did you mean temperature?"
    assert did_you_mean("temprature", iter(NAMES), show=repr) == "; did you mean 'temperature'?"
    assert did_you_mean("zzz", NAMES) == "" == did_you_mean("temprature", [])
    assert did_you_mean("temp", NAMES) == "" != did_you_mean("temp", NAMES, cutoff=0.5)
    assert closest("prompt", ["prompt_a", "prompts", "x"], count=3) == ["prompts", "prompt_a"]


@given(st.text(max_size=20), st.lists(st.text(max_size=20), max_size=5), st.integers(1, 5))
def test_suggestions_are_known_names(word: str, known: list[str], count: int) -> None:
    found = closest(word, known, count=count)
    assert len(found) <= count and set(found) <= set(known)
    assert word not in known or not word or found[0] == word


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (16_060_522_496, "14.96 GiB")]
)
def test_format_bytes(count: int, text: str) -> None:
    assert format_bytes(count) == text
