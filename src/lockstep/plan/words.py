"""Numbers, layouts and tables in words, for the text and the page."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lockstep.sync.layout import Layout
from lockstep.text import format_bytes

if TYPE_CHECKING:
    from lockstep.sync.certificate import Certificate

WIDTH = 100


def seconds(value: float) -> str:
    """`0 s`, `80.3 ms`, `1.25 s`, `95 s`: three digits."""
    for limit, factor, unit in ((1e-6, 1e9, "ns"), (1e-3, 1e6, "us"), (1.0, 1e3, "ms")):
        if 0 < value < limit:
            return f"{value * factor:.3g} {unit}"
    return f"{value:.3g} s" if value < 1000 else f"{value:,.0f} s"


def cuts(layout: Layout) -> str:
    """One entry per dim, the axes that cut it and into how many parts: `(-,fsdp/8)`, `(fsdp+tensor/32,-,-)`; `whole`
    when none is cut."""
    entries = [
        f"{'+'.join(axes)}/{parts}" if parts > 1 else "-"
        for axes, parts in zip(layout.spec, layout.parts(), strict=True)
    ]
    place = "" if layout.memory == "device" else f" in {layout.memory} memory"
    return (f"({','.join(entries)})" if set(entries) - {"-"} else "whole") + place


def counted(count: int, name: str) -> str:
    """`1 device`, `8 devices`."""
    return f"{count:,} {name}{'' if count == 1 else 's'}"


def span(values: tuple[int, int]) -> str:
    """`1.87 GiB`, or `1.2 to 1.9 GiB` when least and most differ."""
    least, most = (format_bytes(v) for v in values)
    return most if least == most else f"{least} to {most}"


def link_words(link_gbps: float, bisection_gbps: float | None, latency_s: float) -> str:
    """The link model in one line."""
    bisection = "no bisection limit" if bisection_gbps is None else f"bisection {bisection_gbps / 8:g} GB/s"
    return (
        f"{link_gbps / 8:g} GB/s into and out of every device ({link_gbps:g} Gbit/s each way); {bisection}; "
        f"{seconds(latency_s)} a round"
    )


def shortened(text: str, width: int) -> str:
    """At most `width` characters; what is left out is the beginning, which leaves share."""
    return text if len(text) <= width else f"...{text[len(text) - width + 3 :]}"


def ranges(numbers: Sequence[int]) -> str:
    """`0-7`, `0-3, 8-11`, `5`: runs of consecutive numbers, in the order given."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def device_words(numbers: Sequence[int]) -> str:
    """`device 3`, `devices 0-7`; of many that do not follow each other only how many."""
    text = ranges(numbers)
    return f"{len(numbers)} devices" if text.count(",") > 7 else f"device{'' if len(numbers) == 1 else 's'} {text}"


def table(rows: Sequence[Sequence[str]], align: str) -> list[str]:
    """Columns two spaces apart. align: `l` or `r` per column."""
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    return [
        "  ".join(
            cell.rjust(width) if side == "r" else cell.ljust(width)
            for cell, width, side in zip(row, widths, align, strict=True)
        ).rstrip()
        for row in rows
    ]


def wrapped(rows: Sequence[tuple[str, str]]) -> list[str]:
    """A name and a text that may need several lines of `WIDTH`."""
    margin = max(len(name) for name, _ in rows) + 2
    return [
        line
        for name, text in rows
        for line in textwrap.wrap(
            text, WIDTH, initial_indent=name.ljust(margin), subsequent_indent=" " * margin, break_on_hyphens=False
        )
    ]


def certificate_words(certificate: Certificate) -> str:
    """`ok: coverage, provenance, ...`, or the checks that failed and why."""
    failed = [f"{check.name}: {check.detail}" for check in certificate.checks if not check.ok]
    if failed:
        return f"NOT ok: {'; '.join(failed)}"
    return f"ok: {', '.join(check.name for check in certificate.checks)}"
