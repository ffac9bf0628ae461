"""What every verb needs: the service, what is served, limits, figures."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from lockstep.service.controls import Controls, Replay
from lockstep.service.http.choices import TokenTexts
from lockstep.service.http.errors import HttpError
from lockstep.service.http.guard import Guard
from lockstep.service.http.jobs import Workers
from lockstep.service.http.metrics import Metrics
from lockstep.service.http.replay import MemoryReplay
from lockstep.service.http.settings import AccessTokens, Limits, Served
from lockstep.service.requests import Rollouts
from lockstep.text import did_you_mean


@dataclass
class Surface:
    """host: what the server listens on. closing: nothing new is admitted. active: calls under way that sample or
    score."""

    service: Rollouts
    controls: Controls
    served: Served
    limits: Limits = field(default_factory=Limits)
    tokens: AccessTokens = field(default_factory=AccessTokens)
    host: str = "127.0.0.1"
    replay: Replay = field(default_factory=MemoryReplay)

    def __post_init__(self) -> None:
        self.metrics = Metrics()
        self.texts = TokenTexts(self.served.tokenizer)
        self.guard = Guard(self.host, self.tokens)
        self.closing = False
        self.active = 0
        self._workers: Workers | None = None

    @property
    def workers(self) -> Workers:
        assert self._workers is not None, "the application was not started"
        return self._workers

    def start(self) -> None:
        """In the event loop that serves."""
        self._workers = Workers(self.service, asyncio.get_running_loop())

    async def stop(self) -> None:
        await self.workers.settle()
        self.workers.close()

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.served.name:
            near = did_you_mean(name[:200], [self.served.name], show=repr)
            raise HttpError(
                404, "model_not_found", f"there is no model {name[:200]!r} here, only {self.served.name!r}{near}",
                "model",
            )  # fmt: skip
