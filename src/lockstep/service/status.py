"""What the service says about itself."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from lockstep.service.protocol import Protocol
from lockstep.service.requests import Outcome, ReplicaStatus, Retired, ServiceStatus, Worker
from lockstep.service.state import End
from lockstep.types import PolicyVersion

RETIRED_KEPT = 64
REASONS_KEPT = 64
OTHER = "other reasons"


@dataclass(frozen=True)
class Totals:
    """Since the start. ended: requests by outcome. reasons: of those that did not finish, how often; clients have words
    of their own, so only the first REASONS_KEPT different ones are told apart. retired: the last versions let go, and
    what all of them freed."""

    ended: Counter[Outcome] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    retired: deque[Retired] = field(default_factory=lambda: deque(maxlen=RETIRED_KEPT))
    freed: Counter[str] = field(default_factory=lambda: Counter(versions=0, weight_bytes=0, pages=0))

    def count(self, end: End) -> None:
        self.ended[end.outcome] += 1
        if end.reason:
            reason = end.reason.split(":")[0][:80]
            known = reason in self.reasons or len(self.reasons) < REASONS_KEPT
            self.reasons[reason if known else OTHER] += 1

    def retire(self, event: Retired) -> None:
        self.retired.append(event)
        self.freed.update(versions=1, weight_bytes=event.weight_bytes, pages=event.pages)


@dataclass(frozen=True)
class SyncAt:
    """Where a trainer's weight sync reaches a replica, and by which way its weights come (`sync.choice.Way`)."""

    address: str = ""
    transport: str = ""
    folder: str = ""


def describe(
    protocol: Protocol, syncs: Mapping[str, SyncAt], totals: Totals, lost: PolicyVersion | None
) -> ServiceStatus:
    """The protocol's state now, without the engines'. lost: as `ServiceStatus.lost`. Under the service's lock."""
    waiting = protocol.waiting
    replicas = tuple(
        ReplicaStatus(
            name=r.name,
            alive=r.alive,
            active=r.active,
            staged=None if r.staged is None else r.staged.policy,
            draining=r.older or (r.active if r.flipping is not None and r.running else None),
            accepting=r.accepting,
            requests=len(r.running),
            engine=None,
            sync_address=at.address,
            sync_transport=at.transport,
            sync_folder=at.folder,
        )
        for r in protocol.replicas.values()
        for at in [syncs.get(r.name, SyncAt())]
    )
    serving = [r.active for r in replicas if r.active is not None]
    return ServiceStatus(
        published=max(serving, key=lambda policy: policy.number, default=None),
        paused=protocol.paused is not None,
        closing=protocol.closing,
        waiting=len(waiting),
        running=len(protocol.requests) - len(waiting),
        ended=dict(totals.ended),
        reasons=dict(totals.reasons),
        redispatched=protocol.redispatched,
        waiting_for=protocol.why_waiting(waiting[0]) if waiting else "",
        replicas=replicas,
        retired=tuple(totals.retired),
        freed=dict(totals.freed),
        lost=lost,
    )


def with_engines(status: ServiceStatus, workers: Mapping[str, Worker]) -> ServiceStatus:
    """The same with what the engines say; asked without the service's lock."""
    replicas = [replace(r, engine=workers[r.name].status()) if r.name in workers else r for r in status.replicas]
    return replace(status, replicas=tuple(replicas))
