"""Says what a run waits for while it waits, so that a hang is never a riddle.

with watchdog.watching(lambda: "step 3 waits for its rollouts: 2 of 3 groups are here"):
    ...  # may take long
"""

from __future__ import annotations

import faulthandler
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from lockstep.text import duration

STACKS = "stacks.txt"


class Watchdog:
    """say: told a line after every `patience_s` seconds of waiting, from a thread of the watchdog."""

    def __init__(self, say: Callable[[str], None], patience_s: float) -> None:
        self._say, self._patience_s = say, patience_s

    @contextmanager
    def watching(self, what: Callable[[], str]) -> Iterator[None]:
        """what: says, at the moment that it is called, who is waited for; must not block."""
        over, started = threading.Event(), time.monotonic()

        def watch() -> None:
            while not over.wait(self._patience_s):
                self._say(f"{what()} (for {duration(time.monotonic() - started)})")

        thread = threading.Thread(target=watch, name="watchdog", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


def dump_stacks(run_dir: Path) -> Path:
    """Write where every thread of this process is into `stacks.txt`; returns its path."""
    path = run_dir / STACKS
    with path.open("w", encoding="utf-8") as file:
        faulthandler.dump_traceback(file=file, all_threads=True)
    return path
