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


@dataclass(frozen=True)
class Local:
    """engine: belongs to the worker's thread while requests are under way; else anybody may use it."""

    engine: Engine
    worker: EngineWorker
    service: RolloutService

    @classmethod
    def start(cls, rollout: RolloutConfig, engine: Engine, name: str = "rollout") -> Local:
        """Threads go on until `close`."""
        worker = EngineWorker(engine, name)
        # All that a run asks for is handed over at once: the engine alone decides what runs next, as for itself.
        under_way = rollout.prompts * rollout.samples * (rollout.staleness + 1)
        worker.capacity = max(worker.capacity, under_way)
        service = RolloutService(update=rollout.update, max_waiting=max(rollout.max_waiting, under_way))
        service.join(worker)
        return cls(engine, worker, service)

    def install(self, policy: PolicyVersion, params: Mapping[str, jax.Array]) -> None:
        """Serve `params` as `policy` for what is submitted from now on."""
        self.worker.install(policy, params)

    def close(self) -> None:
        self.service.close()
