"""How the weights get to each replica, and the sending side of one push.

Every replica is sent to and staged in a thread of its own, so a send that hangs or breaks is that replica's failure and
holds up nobody else.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import jax

from lockstep.errors import SyncError
from lockstep.sync.arrays import device_numbers
from lockstep.sync.attempts import attempt_all, say
from lockstep.sync.local import LocalTransport
from lockstep.sync.mapping import FormatMap
from lockstep.sync.plan import Placed, SyncPlan
from lockstep.sync.publish import TIDYING_S, Offer, Replica, Stage, StageReport
from lockstep.sync.replica import LocalReplica
from lockstep.sync.transport import Deadline, Stored, Transport


@dataclass
class _Sender:
    """What one push over a route leaves to the next. busy: held by a send. owed: version -> whether it was published;
    of those whose release has not come to its end."""

    busy: threading.Lock = field(default_factory=threading.Lock)
    owed: dict[int, bool] = field(default_factory=dict)


@dataclass(frozen=True)
class Route:
    """How the weights get to one replica. transport: the sending side's. destination: what the replica holds, asked on
    every push. mapping: what becomes what; None where names, shapes and dtypes are equal. serves: False for a replica
    that only keeps versions for others: it is not probed, and what it writes is not counted as moved."""

    replica: Replica
    transport: Transport
    destination: Callable[[], Mapping[str, Placed]]
    mapping: FormatMap | None = None
    serves: bool = True
    sender: _Sender = field(default_factory=_Sender, repr=False, compare=False)

    @classmethod
    def local(cls, replica: LocalReplica, mapping: FormatMap | None = None) -> Route:
        """To a replica in this process, over its own transport."""
        return cls(replica, replica.transport, replica.placed, mapping)


def check_transports(routes: Sequence[Route]) -> None:
    """Raise SyncError where two replicas share what keeps one offer per version."""
    seen: dict[int, str] = {}
    for route in routes:
        name, transport = route.replica.name, route.transport
        if not isinstance(transport, LocalTransport) and (other := seen.setdefault(id(transport), name)) != name:
            raise SyncError(
                f"sync: replicas {other!r} and {name!r} share one transport of kind {transport.name!r}, which holds "
                f"one offer per version; give each replica a transport of its own"
            )


class Sending:
    """The sends of one push. stored: replica -> what its transport left in a store, of those sent so far."""

    def __init__(
        self, routes: Mapping[str, Route], source: Mapping[str, jax.Array], version: int, digest: str, role: str
    ) -> None:
        """role: the sender's name, for errors."""
        self.stored: dict[str, Stored] = {}
        self._routes, self._source, self._version, self._digest, self._role = routes, source, version, digest, role
        self._numbers = device_numbers(leaf.sharding for leaf in source.values())
        self._released = threading.Event()

    @property
    def stages(self) -> dict[str, Stage]:
        """For `Publisher.publish`: send, then stage."""
        return {name: partial(self._stage, route) for name, route in self._routes.items()}

    def release(self, published: Collection[str], deadline: Deadline) -> dict[str, str]:
        """Release what was sent, and what an earlier push failed to release. published: the replicas that have the
        version now. Returns replica -> why, of those whose transport failed at it; raises nothing."""
        self._released.set()
        calls = {name: partial(self._let_go, route, name in published) for name, route in self._routes.items()}
        _, errors = attempt_all(calls, "release", self._version, deadline.at_most(TIDYING_S), self._role)
        return {name: say(error) for name, error in errors.items()}

    def _let_go(self, route: Route, published: bool) -> None:
        owed = route.sender.owed
        owed[self._version] = published
        for version, known in list(owed.items()):
            route.transport.release(version, known)
            owed.pop(version, None)

    def _stage(self, route: Route, offer: Offer, deadline: Deadline) -> StageReport:
        self._send(route, offer.plan, deadline)
        if not deadline.remaining():
            raise deadline.missed(self._role, f"replica {route.replica.name!r}", "send", self._version)
        if isinstance(route.transport, LocalTransport):  # to a `LocalReplica`, or to one that stands in front of it
            local = cast(LocalReplica, route.replica)
            return local.stage(offer, deadline, _untouched(offer.plan, self._source))
        return route.replica.stage(offer, deadline)

    def _send(self, route: Route, plan: SyncPlan, deadline: Deadline) -> None:
        name, transport = route.replica.name, route.transport
        if not route.sender.busy.acquire(timeout=deadline.remaining()):
            raise deadline.missed(self._role, f"replica {name!r}", "an earlier send is under way still", self._version)
        try:
            sent = transport.send(self._version, plan, self._source, self._numbers, deadline, self._digest)
            if sent.stored is not None:
                self.stored[name] = sent.stored
        finally:
            if self._released.is_set():  # nobody waits for it any more
                transport.release(self._version, False)
            route.sender.busy.release()


def _untouched(plan: SyncPlan, source: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Target path -> the source's array, of the leaves that the plan leaves where they are."""
    return {path: source[leaf.sources[0]] for path, leaf in plan.leaves.items() if leaf.in_place}
