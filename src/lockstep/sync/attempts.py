"""Calls that may hang: each in a thread of its own, waited for until a deadline. Imports no jax.

Whatever a call does - returns, raises anything at all, never returns - is an outcome here and nothing more. A thread
that was given up goes on by itself; what it comes back with is nobody's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from lockstep.errors import SyncError
from lockstep.sync.transport import Deadline

T = TypeVar("T")
GRACE_S = 0.25  # waited longer than the callee does: its own error says more than ours


@dataclass
class _Attempt:
    done: threading.Event = field(default_factory=threading.Event)
    result: Any = None
    error: BaseException | None = None

    def start(self, call: Callable[[], Any], name: str) -> _Attempt:
        def body() -> None:
            try:
                self.result = call()
            except BaseException as error:  # handed to whoever waits, whatever it is
                self.error = error
            finally:
                self.done.set()

        threading.Thread(target=body, name=name, daemon=True).start()
        return self


def attempt_all(
    calls: Mapping[str, Callable[[], T]], what: str, version: int, deadline: Deadline, source: str
) -> tuple[dict[str, T], dict[str, BaseException]]:
    """(results, errors) by replica; all calls run at the same time. source: who waits, for errors."""
    under_way = {name: _Attempt().start(call, f"{what} {name}") for name, call in calls.items()}
    results: dict[str, T] = {}
    errors: dict[str, BaseException] = {}
    for name, attempt in under_way.items():
        if not attempt.done.wait(deadline.remaining() + GRACE_S):
            errors[name] = deadline.missed(source, f"replica {name!r}", what, version)
        elif attempt.error is not None:
            errors[name] = attempt.error
        else:
            results[name] = attempt.result
    return results, errors


def say(error: BaseException) -> str:
    """An error as part of a sentence."""
    return str(error).removeprefix("sync: ") if isinstance(error, SyncError) else f"{type(error).__name__}: {error}"
