"""What the protocol keeps of replicas, groups and requests, and what it asks to be done. Imports no jax."""

from __future__ import annotations

from dataclasses import dataclass, field

from lockstep.service.requests import Outcome, RolloutRequest, UpdatePolicy
from lockstep.types import PolicyVersion


@dataclass(frozen=True)
class Send:
    """Give the request to the replica."""

    replica: str
    request: RolloutRequest
    version: PolicyVersion


@dataclass(frozen=True)
class Stop:
    """Cancel the request at the replica."""

    replica: str
    request_id: str


@dataclass(frozen=True)
class End:
    """Tell the client that this is the end. version: under which it ran until now, if it ran."""

    request_id: str
    outcome: Outcome
    reason: str = ""
    version: PolicyVersion | None = None


Effect = Send | Stop | End


@dataclass
class Staged:
    """attempt: number of this staging; words of another one do not count for it."""

    policy: PolicyVersion
    attempt: int
    verified: set[int] = field(default_factory=set)


@dataclass
class ReplicaState:
    """capacity: samples that it is given at a time. shards: how many parts of a version it verifies. flipping: the
    version that a flip waits for or, when `installing`, carries out, by `update`. out: why it is given nothing, though
    alive: nobody knows what it serves, or it was left behind by a publish. running: ids of what it was sent and has not
    answered."""

    name: str
    capacity: int
    shards: int
    active: PolicyVersion | None = None
    staged: Staged | None = None
    flipping: PolicyVersion | None = None
    installing: bool = False
    update: UpdatePolicy = "drain"
    out: str | None = None
    older: PolicyVersion | None = None
    alive: bool = True
    running: dict[str, PolicyVersion] = field(default_factory=dict)

    def ready_for(self, policy: PolicyVersion) -> bool:
        """Whether it may be told to flip to this version: every shard of it is verified."""
        staged = self.staged
        return self.alive and staged is not None and staged.policy == policy and len(staged.verified) == self.shards

    @property
    def accepting(self) -> bool:
        if not self.alive or self.active is None or self.out is not None or self.installing:
            return False
        return self.flipping is None or self.update == "dual"


@dataclass
class Pin:
    """One group. settled: a sample of it has ended, or tokens were shown, under this version: it cannot change."""

    policy: PolicyVersion | None = None
    open: set[str] = field(default_factory=set)
    settled: bool = False


@dataclass
class RequestState:
    """replica, version: where it runs. stopping: how it ends
    once its cancellation is answered. again: it is cancelled in order to start anew."""

    request: RolloutRequest
    order: int
    replica: str | None = None
    version: PolicyVersion | None = None
    stopping: tuple[Outcome, str] | None = None
    again: bool = False
    losses: int = 0

    @property
    def samples(self) -> int:
        return len(self.request.seeds)
