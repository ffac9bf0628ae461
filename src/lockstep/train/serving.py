"""The rollout role in this process: one engine, in a thread of its own, behind the rollout service."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh

from lockstep.config import RolloutConfig
from lockstep.rollout.engine import Engine
from lockstep.service.service import RolloutService
from lockstep.service.worker import EngineWorker
from lockstep.sync.publish import Offer, StageReport
from lockstep.sync.replica import LocalReplica
from lockstep.sync.transport import Deadline
from lockstep.types import PolicyVersion


def queue_bound(rollout: RolloutConfig, row_shards: int) -> int:
    """Samples that the engine holds, started or not; further ones wait in the service."""
    return row_shards * (rollout.slots + rollout.max_waiting)


class _BetweenPasses(LocalReplica):
    """Stages in the engine's thread: programs that span several devices, started by two threads, can be queued in one
    order on one device and in another on the next, and then wait for each other for ever."""

    def __init__(self, worker: EngineWorker, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._worker = worker

    def stage(self, offer: Offer, deadline: Deadline, digested: Mapping[str, jax.Array] | None = None) -> StageReport:
        stage = super().stage
        return self._worker.call(lambda engine: stage(offer, deadline, digested))


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

    def replica(self, mesh: Mesh, *args: Any, **named: Any) -> LocalReplica:
        """Of the weights, as `LocalReplica` takes the arguments. mesh: the sampler's."""
        if mesh.size == 1:
            return LocalReplica(*args, **named)
        return _BetweenPasses(self.worker, *args, **named)

    def close(self) -> None:
        self.service.close()
