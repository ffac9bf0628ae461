"""Where a step's time goes."""

from __future__ import annotations

import time
from dataclasses import dataclass

from lockstep.progress import Progress

PHASES = ("generate", "score", "train", "sync")


@dataclass
class Clock:
    """Seconds per phase of the step under way."""

    progress: Progress
    seconds: dict[str, float]
    started: float
    phase: str | None = None
    since: float = 0.0

    def enter(self, phase: str | None) -> None:
        """The phase before ends, this one begins; None ends the last."""
        now = time.perf_counter()
        if self.phase is not None:
            self.seconds[self.phase] = self.seconds.get(self.phase, 0.0) + now - self.since
        self.phase, self.since = phase, now
        if phase is not None:
            self.progress.phase(phase)

    def record(self) -> dict[str, float]:
        """time/<phase>_s, time/step_s, and time/wait_s for what no phase accounts for."""
        total = time.perf_counter() - self.started
        spent = {f"time/{p}_s": self.seconds.get(p, 0.0) for p in PHASES}
        return {**spent, "time/wait_s": max(0.0, total - sum(spent.values())), "time/step_s": total}
