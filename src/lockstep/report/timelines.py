"""What each role did when, in the last steps: one strip per step and role."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from lockstep.report.charts import tick_label, tick_size
from lockstep.report.data import RunData
from lockstep.report.figures import Figure
from lockstep.text import duration, sanitize

STEPS = 6  # drawn, the newest
LEFT, WIDTH, ROW, GAP, FOOT = 110, 1140, 15, 9, 24
PHASES = ("generate", "score", "train", "sync", "wait")


def timeline_figure(run: RunData) -> Figure | None:
    """None where no time lines are recorded."""
    lines = [line for line in run.timeline if _seconds(line.get("seconds"))][-STEPS:]
    if not lines:
        return None
    legend = tuple((f"bar p-{phase}", phase) for phase in PHASES if any(p == phase for _, p in _whats(lines)))
    note = "generate: from the first request sent to a replica until the last has ended, for whichever step."
    last = duration(lines[-1]["seconds"])
    return Figure("Who did what when", f"seconds, the last {len(lines)} steps", last, gantt(lines), legend, note)


def gantt(lines: Sequence[Mapping[str, Any]]) -> Markup:
    """The strips of some steps, one below the other on one scale. lines: records of `timeline.jsonl`."""
    longest = max(_seconds(line["seconds"]) for line in lines)
    scale = (WIDTH - LEFT - 10) / longest
    roles = list(dict.fromkeys(i["role"] for line in lines for i in _intervals(line)))
    body, y = Markup(), 4
    for line in lines:
        body += Markup('<text class="tick" x="4" y="{}">step {}</text>').format(y + ROW - 4, line.get("step", "?"))
        for role in roles:
            body += Markup('<text class="tick" x="{}" y="{}" text-anchor="end">{}</text>').format(
                LEFT - 7, y + ROW - 4, sanitize(role)
            )
            end = LEFT + scale * _seconds(line["seconds"])
            body += Markup('<line class="rule" x1="{}" x2="{:.1f}" y1="{y}" y2="{y}"/>').format(
                LEFT, end, y=y + ROW / 2
            )
            for i in _intervals(line):
                if i["role"] == role:
                    body += _bar(i, LEFT, scale, y)
            y += ROW
        y += GAP
    tick = tick_size(longest, 8)
    for n in range(math.floor(longest / tick) + 1):
        body += Markup('<text class="tick" x="{:.1f}" y="{}" text-anchor="middle">{}</text>').format(
            LEFT + scale * n * tick, y + 10, tick_label(n * tick, tick)
        )
    what = f"What {', '.join(roles) or 'nobody'} did in steps {lines[0].get('step')} to {lines[-1].get('step')}"
    return Markup('<svg class="strips" viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>').format(
        WIDTH, y + FOOT - 8, sanitize(what), body
    )


def _bar(i: Mapping[str, Any], left: float, scale: float, y: int) -> Markup:
    x, width = left + scale * i["from"], max(0.7, scale * (i["to"] - i["from"]))
    return Markup('<path class="bar p-{}" d="M{:.1f} {}h{:.1f}v{}h-{:.1f}z"><title>{}</title></path>').format(
        _phase(i), x, y + 1, width, ROW - 2, width, sanitize(f"{i['what']}: {duration(i['to'] - i['from'])}")
    )


def _intervals(line: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Those that can be drawn: somebody may have edited the file."""
    found = line.get("intervals")
    return [
        i
        for i in (found if isinstance(found, list) else [])
        if isinstance(i, Mapping)
        and isinstance(i.get("role"), str)
        and isinstance(i.get("what"), str)
        and all(isinstance(i.get(k), int | float) and math.isfinite(i[k]) for k in ("from", "to"))
        and 0 <= i["from"] <= i["to"] <= _seconds(line.get("seconds")) * (1 + 1e-6)
    ]


def _phase(interval: Mapping[str, Any]) -> str:
    word = str(interval["what"]).split(" ")[0]
    return word if word in PHASES else "other"


def _whats(lines: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    return [(i["role"], _phase(i)) for line in lines for i in _intervals(line)]


def _seconds(value: Any) -> float:
    right = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0
    return float(value) if right else 0.0
