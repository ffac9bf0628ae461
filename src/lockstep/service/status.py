"""What the service says about itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from lockstep.service.protocol import Protocol
from lockstep.service.requests import Outcome, ReplicaStatus, Retired, ServiceStatus, Worker


def describe(
    protocol: Protocol,
    addresses: Mapping[str, str],
    ended: dict[Outcome, int],
    reasons: dict[str, int],
    retired: tuple[Retired, ...],
) -> ServiceStatus:
    """The protocol's state now, without the engines'. Under the service's lock."""
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
            sync_address=addresses.get(r.name, ""),
        )
        for r in protocol.replicas.values()
    )
    serving = [r.active for r in replicas if r.active is not None]
    return ServiceStatus(
        published=max(serving, key=lambda policy: policy.number, default=None),
        paused=protocol.paused is not None,
        closing=protocol.closing,
        waiting=len(waiting),
        running=len(protocol.requests) - len(waiting),
        ended=ended,
        reasons=reasons,
        redispatched=protocol.redispatched,
        waiting_for=protocol.why_waiting(waiting[0]) if waiting else "",
        replicas=replicas,
        retired=retired,
    )


def with_engines(status: ServiceStatus, workers: Mapping[str, Worker]) -> ServiceStatus:
    """The same with what the engines say; asked without the service's lock."""
    replicas = [replace(r, engine=workers[r.name].status()) if r.name in workers else r for r in status.replicas]
    return replace(status, replicas=tuple(replicas))
