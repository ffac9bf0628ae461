"""Who is told of a request: its client, and the ledger."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol as Interface

from lockstep.service.requests import Ended, OnEvent, RolloutRequest


class Ledger(Interface):
    """What was admitted and how it ended, kept beyond this process (`journal.Journal`)."""

    def admitted(self, request: RolloutRequest) -> None: ...

    def ended(self, request_id: str, end: Ended) -> None: ...


@dataclass
class Client:
    """Who asked for a request. shown: the tokens that it was shown, by sample. came: how many of them the replica that
    runs it now has drawn again. since, started: when it was admitted and sent (seconds of the monotonic clock)."""

    request: RolloutRequest
    on_event: OnEvent
    since: float
    started: float | None = None
    shown: dict[int, list[int]] = field(default_factory=dict)
    came: dict[int, int] = field(default_factory=dict)
