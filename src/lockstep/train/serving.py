"""The rollout role in this process: one engine, in a thread of its own, behind the rollout service."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import jax

from lockstep.config import RolloutConfig
from lockstep.rollout.engine import Engine
from lockstep.service.service import RolloutService
from lockstep.service.worker import EngineWorker
from lockstep.types import PolicyVersion


def queue_bound(rollout: RolloutConfig, row_shards: int) -> int:
    """Samples that the engine holds, started or not; further ones wait in the service."""
    return row_shards * (rollout.slots + rollout.max_waiting)


@dataclass(frozen=True)
class Local:
    """engine: belongs to the worker's thread while requests are under way; else anybody may use it."""

    engine: Engine
    worker: EngineWorker
    service: RolloutService

    @classmethod
    def start(cls, rollout: RolloutConfig, engine: Engine, name: str = "rollout") -> Local:
        """Threads go on until `close`."""
        worker = EngineWorker(name, engine)
        # The engine, not the service, decides what runs next: it knows which pages are free, and what is cached.
        worker.capacity = queue_bound(rollout, engine.programs.row_shards)
        service = RolloutService(update=rollout.update, max_waiting=rollout.max_waiting)
        service.join(worker)
        return cls(engine, worker, service)

    def install(self, policy: PolicyVersion, params: Mapping[str, jax.Array]) -> None:
        """Serve `params` as `policy` for what is submitted from now on."""
        self.worker.install(policy, params)

    def close(self) -> None:
        self.service.close()
