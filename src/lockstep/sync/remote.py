"""A replica in another process: what the trainer talks to. `replica_server` is what answers there.

    # in the sampler
    numbers = numbers_from(1024, shardings.values())
    transport = TransferTransport()
    replica = LocalReplica("rollout", blank, shardings, transport, numbers=numbers)
    server = ReplicaServer(replica, transport, numbers, "127.0.0.1:0", token).start()

    # in the trainer
    remote = RemoteReplica("rollout", address, token, TransferTransport())
    sync = WeightSync(leaves, [remote.route()], base=base)
    sync.push(1, weights)

The weights go over the transport; over the channel go versions, the plan's inputs (the plan is made anew there, and the
hashes must agree), digests, the probe, and what came of it. Everything that decides whether a version may be served is
the `LocalReplica`'s: the server adds nothing to it and takes nothing away.

One request, one answer, numbered. A request that was answered already is answered again and not run again; an older one
is refused. A connection that breaks is made anew by the next call, and whoever connects last is the trainer: an earlier
connection is closed, and a trainer that another one has followed is refused. Versions only go up, except that a new
trainer may start from where its checkpoint was. A sampler that was restarted says that it serves nothing.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from lockstep.errors import SyncError
from lockstep.sync.channel import MAX_MESSAGE_BYTES, Channel, Message, connect
from lockstep.sync.mapping import FormatMap
from lockstep.sync.plan import Placed
from lockstep.sync.publish import Offer, StageReport
from lockstep.sync.route import Route
from lockstep.sync.transport import Deadline, Transport
from lockstep.sync.wire import (
    offer_to_json,
    places_from_json,
    plan_to_json,
    policy_from_json,
    policy_to_json,
    report_from_json,
)
from lockstep.types import PolicyVersion

PLANS_KEPT = 4  # by a sampler


class RemoteTransport(Transport, Protocol):
    """A transport whose sides are in different processes: what the receiver must know crosses as a ticket."""

    on_round: Callable[[int, int], None] | None

    def ticket(self, version: int) -> Mapping[str, Any]:
        """At the sender, after `send`: JSON for `redeem`."""
        ...

    def redeem(self, version: int, ticket: Mapping[str, Any]) -> None:
        """At the receiver, before `receive`."""
        ...

    def arrived(self, version: int, round_number: int) -> None:
        """At the sender: the receiver has a round in place. Repeats are harmless."""
        ...


class RemoteReplica:
    """The trainer's side (a `publish.Replica`). Calls from several threads take turns."""

    def __init__(
        self,
        name: str,
        address: str,
        token: str,
        transport: RemoteTransport,
        *,
        source: str = "trainer",
        patience_s: float = 30.0,
        max_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        """transport: the sending side's; `WeightSync` hands it the weights. source: our name, for errors.
        patience_s: for calls that only ask or tidy up. Connects at the first call."""
        self.name = name
        self.transport = transport
        self._address, self._token, self._source, self._max = address, token, source, max_bytes
        self._channel: Channel | None = None
        self._patience_s = patience_s
        self._plans: list[str] = []  # that the other side has, in the order in which it will let go of them
        self._placed: dict[str, Placed] | None = None
        self._number = 0
        self._session = secrets.token_hex(8)
        self._lock = threading.Lock()

    @property
    def active(self) -> PolicyVersion | None:
        """What the replica serves, asked now. Raises SyncError when it does not answer."""
        return policy_from_json(
            self._ask({"do": "active"}, "what it serves", -1, Deadline.after(self._patience_s))["active"]
        )

    def placed(self) -> dict[str, Placed]:
        """What a plan has to know of the other side, asked once per connection. Raises SyncError when it does not
        answer."""
        known = self._placed
        if known is not None and self._channel is not None and self._channel.alive():
            return known
        answer = self._ask({"do": "placed"}, "what it holds", -1, Deadline.after(self._patience_s))
        if answer.get("transport") != self.transport.name:
            raise SyncError(
                f"sync: {self.name} receives over {answer.get('transport')!r}, {self._source} sends over "
                f"{self.transport.name!r}; give both sides one transport"
            )
        self._placed = places_from_json(answer.get("placed"))
        return self._placed

    def route(self, mapping: FormatMap | None = None) -> Route:
        """For `WeightSync`."""
        return Route(self, self.transport, self.placed, mapping)

    def stage(self, offer: Offer, deadline: Deadline) -> StageReport:
        """As `Replica.stage`; the weights must have been given to the transport."""
        version = offer.policy.number

        def progress(message: Message) -> None:
            if message.get("version") == version and isinstance(message.get("round"), int):
                self.transport.arrived(version, message["round"])

        ticket = self.transport.ticket(version)
        with self._turn("to stage and verify", version, deadline):
            self._connected(deadline)  # a new connection knows no plans
            if offer.plan.hash not in self._plans:
                plan = {"do": "plan", "plan": plan_to_json(offer.plan)}
                self._request(plan, "to make the plan", version, deadline)
                self._plans = [*self._plans, offer.plan.hash][-PLANS_KEPT:]
            message = {"do": "stage", "offer": offer_to_json(offer), "ticket": dict(ticket)}
            answer = self._request(message, "to stage and verify", version, deadline, progress)
        return report_from_json(answer.get("report"))

    def flip(self, policy: PolicyVersion, deadline: Deadline) -> None:
        """As `Replica.flip`."""
        self._ask({"do": "flip", "policy": policy_to_json(policy)}, "to flip", policy.number, deadline)

    def discard(self, version: int) -> None:
        """As `Replica.discard`. Raises SyncError when the replica does not answer; it then serves what it served."""
        self._ask({"do": "discard", "version": version}, "to discard", version, Deadline.after(self._patience_s))

    def close(self) -> None:
        """Hang up; the replica goes on serving. The next call connects anew."""
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()

    def start_anew(self) -> None:
        """From the next call on be another trainer, whose versions need not be higher than those of before."""
        self.close()
        self._session = secrets.token_hex(8)

    def __enter__(self) -> RemoteReplica:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, message: Message, what: str, version: int, deadline: Deadline) -> Message:
        with self._turn(what, version, deadline):
            return self._request(message, what, version, deadline)

    @contextlib.contextmanager
    def _turn(self, what: str, version: int, deadline: Deadline) -> Iterator[None]:
        if not self._lock.acquire(timeout=deadline.remaining()):
            raise deadline.missed(self._source, self.name, f"{what}; another call is under way", version)
        try:
            yield
        finally:
            self._lock.release()

    def _connected(self, deadline: Deadline) -> Channel:
        if self._channel is None or not self._channel.alive():
            self.close()
            self._plans.clear()
            self._placed = None
            self._number = 0
            self._channel = connect(
                self._address, self._token, here=self._source, there=self.name, deadline=deadline, max_bytes=self._max
            )
        return self._channel

    def _request(
        self,
        message: Message,
        what: str,
        version: int,
        deadline: Deadline,
        progress: Callable[[Message], None] | None = None,
    ) -> Message:
        """Send, and wait for the answer with our number; what went wrong there is raised here."""
        channel = self._connected(deadline)
        self._number += 1
        # The other side stops a little earlier: its error says more than our missed deadline.
        left = deadline.remaining()
        message = {
            **message,
            "session": self._session,
            "number": self._number,
            "seconds": max(left - min(0.2, 0.1 * left), 1e-3),
        }
        try:
            channel.send(message, deadline, version)
            while True:
                answer = channel.receive(what, version, deadline)
                if answer.get("number") != self._number:
                    raise SyncError(
                        f"sync: {self.name} answers request {answer.get('number')!r} when {self._number} was asked "
                        f"({what}, version {version})"
                    )
                if "round" not in answer:
                    break
                if progress is not None:
                    progress(answer)
        except BaseException:
            self.close()  # an answer that comes after all must not be taken for the next one's
            raise
        if "error" in answer:
            raise SyncError(f"sync: {self.name}: {answer['error']}")
        return answer
