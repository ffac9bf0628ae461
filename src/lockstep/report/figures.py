"""What a chart comes with on the page."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from lockstep.text import number


@dataclass(frozen=True)
class Figure:
    """A chart with its heading. last: the newest value, as text. note: what the reader should know about it."""

    title: str
    unit: str
    last: str
    chart: Markup
    legend: tuple[tuple[str, str], ...] = ()
    note: str = ""


def last(values: Any) -> str:
    """The newest of the values, for a heading."""
    return number(values[-1]) if values else "-"
