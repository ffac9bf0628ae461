"""Where a step's time goes: seconds per phase of the loop, and what each role did when."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lockstep.progress import Progress

PHASES = ("generate", "score", "train", "sync")
ROLE_OF = {"score": "reward", "train": "actor", "sync": "actor"}  # generate is the rollout's, whose own events say when


@dataclass(frozen=True)
class Interval:
    """Somebody at work. what: phase, or `generate STEP`. start, end: seconds of `time.perf_counter`."""

    role: str
    what: str
    start: float
    end: float


@dataclass
class Clock:
    """Seconds per phase of the step under way. begun: the run's start, which the time line counts from."""

    progress: Progress
    started: float
    begun: float
    seconds: dict[str, float] = field(default_factory=dict)
    intervals: list[Interval] = field(default_factory=list)
    phase: str | None = None
    since: float = 0.0

    def enter(self, phase: str | None) -> None:
        """The phase before ends, this one begins; None ends the last."""
        now = time.perf_counter()
        if self.phase is not None:
            self.seconds[self.phase] = self.seconds.get(self.phase, 0.0) + now - self.since
            if self.phase in ROLE_OF:
                self.intervals.append(Interval(ROLE_OF[self.phase], self.phase, self.since, now))
        self.phase, self.since = phase, now
        if phase is not None:
            self.progress.phase(phase)

    def waited(self, seconds: float) -> None:
        """Of the last interval, the end was spent waiting for others: its role was idle then."""
        last = self.intervals.pop()
        middle = max(last.start, last.end - seconds)
        self.intervals += [
            Interval(last.role, last.what, last.start, middle),
            Interval(last.role, "wait", middle, last.end),
        ]

    def generated(self, busy: Mapping[int, tuple[float, float]]) -> None:
        """busy: step -> from when to when the rollout worked on its batch."""
        self.intervals += [Interval("rollout", f"generate {n}", *span) for n, span in sorted(busy.items())]

    def record(self) -> tuple[dict[str, float], dict[str, Any]]:
        """(for the step's metrics, for the time lines) at the end of the step.

        time/<phase>_s, time/step_s, time/wait_s for what no phase accounts for, idle/<role>: the fraction of the step
        in which a role did nothing. The time line: `start` and `seconds` of the step, since the run's start; intervals
        as {role, what, from, to} in seconds since the step's start, cut to the step.
        """
        end = time.perf_counter()
        total = end - self.started
        spent = {f"time/{p}_s": self.seconds.get(p, 0.0) for p in PHASES}
        cut = [
            Interval(i.role, i.what, max(i.start, self.started) - self.started, min(i.end, end) - self.started)
            for i in self.intervals
            if i.end > self.started
        ]
        idle = {
            f"idle/{role}": 1 - covered([(i.start, i.end) for i in cut if i.role == role and i.what != "wait"]) / total
            for role in ("actor", "rollout", "reward")
        }
        record = {
            **spent,
            "time/wait_s": max(0.0, total - sum(spent.values())),
            "time/step_s": total,
            **{name: min(1.0, max(0.0, value)) for name, value in idle.items()},
        }
        line = {
            "start": self.started - self.begun,
            "seconds": total,
            "intervals": [{"role": i.role, "what": i.what, "from": i.start, "to": i.end} for i in cut],
        }
        return record, line


def covered(intervals: list[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
