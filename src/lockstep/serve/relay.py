"""A trainer's weight sync through the front: when a version is taken over is the front's to say, the weights never pass
through it.

The trainer talks to a `ReplicaServer` in the front, whose replica is the one in the other process, its flips made to
wait as the update policy says. The ticket by which the weights are found is handed on as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import Sharding

from lockstep.service.served import ServedReplica
from lockstep.sync.plan import Placed, SyncPlan
from lockstep.sync.remote import RemoteReplica, RemoteTransport
from lockstep.sync.transport import Deadline, Sent, Staged


class RelayTransport:
    """Sends the front's own versions over `own`, and hands on the tickets of others."""

    def __init__(self, own: RemoteTransport) -> None:
        self.own, self.name = own, own.name
        self.on_round: Callable[[int, int], None] | None = None
        self._handed: dict[int, Mapping[str, Any]] = {}
        self._sent: set[int] = set()  # the front's own versions

    def redeem(self, version: int, ticket: Mapping[str, Any]) -> None:
        """Keep it for the replica that is to redeem it."""
        self._handed = {version: ticket}

    def ticket(self, version: int) -> Mapping[str, Any]:
        handed = self._handed.pop(version, None)
        return self.own.ticket(version) if handed is None else handed

    def arrived(self, version: int, round_number: int) -> None:
        if version in self._sent:
            self.own.arrived(version, round_number)
        elif (tell := self.on_round) is not None:  # of a version that the trainer sends
            tell(version, round_number)

    def send(
        self,
        version: int,
        plan: SyncPlan,
        source: Mapping[str, jax.Array],
        numbers: Mapping[int, jax.Device],
        deadline: Deadline,
        digest: str = "",
    ) -> Sent:
        self._sent.add(version)
        return self.own.send(version, plan, source, numbers, deadline, digest)

    def receive(
        self,
        version: int,
        plan: SyncPlan,
        destination: Mapping[str, Sharding],
        numbers: Mapping[int, jax.Device],
        deadline: Deadline,
    ) -> Staged:
        raise AssertionError("the front holds no replica: nothing is received here")

    def forget(self) -> None:
        self.own.forget()

    def release(self, version: int, published: bool) -> None:
        self._sent.discard(version)
        self.own.release(version, published)


class RelayedReplica(ServedReplica):
    """What the front's `ReplicaServer` answers for. inner: changes when the process is started again."""

    inner: RemoteReplica

    def placed(self) -> dict[str, Placed]:
        return self.inner.placed()
