"""The sampler's side of `remote`: answers for one replica in this process.

The weights come over the transport, everything else over the channel. Whether a version may be served is decided by the
replica (`replica.LocalReplica`) alone; the server sees to it that requests are the trainer's, in order and one at a
time.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import jax

from lockstep.errors import SyncError
from lockstep.sync.channel import MAX_MESSAGE_BYTES, Channel, Listener, Message
from lockstep.sync.ends import renumbered
from lockstep.sync.plan import Placed, SyncPlan
from lockstep.sync.publish import Replica
from lockstep.sync.remote import PLANS_KEPT, RemoteTransport
from lockstep.sync.transport import Deadline
from lockstep.sync.wire import (
    offer_from_json,
    places_to_json,
    plan_from_json,
    policy_from_json,
    policy_to_json,
    report_to_json,
)
from lockstep.types import PolicyVersion

_ANSWER_S = 30.0  # until an answer is taken off our hands
_FOREVER_S = 10 * 365 * 86400.0  # between two requests a sampler waits for as long as it takes


class Served(Replica, Protocol):
    """A replica that says where its leaves are."""

    def placed(self) -> dict[str, Placed]: ...


class ReplicaServer:
    """Answers for one replica, from `start` (or `with`) to `close`. address: where it listens. last_failure: what the
    last request that failed was answered, None if none did; the trainer that asked may be dead."""

    def __init__(
        self,
        replica: Served,
        transport: RemoteTransport,
        numbers: Mapping[int, jax.Device] | None,
        address: str,
        token: str,
        *,
        allow_remote: bool = False,
        max_bytes: int = MAX_MESSAGE_BYTES,
        on_trainer: Callable[[], None] | None = None,
    ) -> None:
        """transport, numbers: those that the replica was given; numbers None: what it says of places is in the plan's
        numbers already. allow_remote: as `Listener`. on_trainer: called when another trainer takes over, whose versions
        need not be higher."""
        self._replica, self._transport, self._numbers = replica, transport, numbers
        self.last_failure: str | None = None
        self._on_trainer = on_trainer
        self._listener = Listener(address, token, here=replica.name, allow_remote=allow_remote, max_bytes=max_bytes)
        self.address = self._listener.address
        self._plans: dict[str, SyncPlan] = {}
        self._busy = threading.Lock()
        self._working_on = "nothing"
        self._swap = threading.Lock()
        self._open: set[Channel] = set()
        self._current: Channel | None = None
        self._sessions: list[str] = []  # of trainers, the last one's last
        self._started: PolicyVersion | None = None  # what was served when the last one came
        self._acceptor = threading.Thread(target=self._accept, name=f"{replica.name} accepts", daemon=True)

    def start(self) -> ReplicaServer:
        """Answer, in threads of its own."""
        self._acceptor.start()
        return self

    def __enter__(self) -> ReplicaServer:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop answering; the replica keeps what it serves."""
        self._listener.close()
        for channel in list(self._open):
            channel.close()

    def _accept(self) -> None:
        while (sock := self._listener.accept()) is not None:
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: Any) -> None:
        """One connection, from its greeting to its end. Whatever goes wrong with it is its end, and nobody else's."""
        with contextlib.suppress(SyncError):
            channel = self._listener.authenticate(sock)
            self._open.add(channel)
            try:
                self._converse(channel)
            finally:
                channel.close()
                self._open.discard(channel)

    def _converse(self, channel: Channel) -> None:
        """Requests and answers by number, until the connection ends."""
        last, answer = 0, Message()
        while True:
            request = channel.receive("its next request", -1, Deadline.after(_FOREVER_S))
            number = request.get("number")
            if type(number) is not int or number < last or number > last + 1 or number < 1:
                channel.send({"number": number, "error": f"{number!r} is out of order; expected {last + 1}"}, _soon())
                continue
            if number == last + 1:
                last, answer = number, {"number": number, **self._answer(channel, request)}
            channel.send(answer, _soon())

    def _answer(self, channel: Channel, request: Message) -> Message:
        """Carry out one request; every failure becomes the answer."""
        seconds, session, what = request.get("seconds"), request.get("session"), request.get("do")
        if not isinstance(seconds, int | float) or not 0 < seconds < _FOREVER_S or not isinstance(session, str):
            return {"error": f"a request needs a deadline and a session; got {seconds!r} seconds, session {session!r}"}
        if self._superseded(session, channel):
            return {"error": "another trainer has taken over; this one must not publish any more"}
        deadline = Deadline.after(seconds)
        calls: dict[str, Callable[[Channel, Message, Deadline], Message]] = {
            "active": self._do_active,
            "placed": self._do_placed,
            "plan": self._do_plan,
            "stage": self._do_stage,
            "flip": self._do_flip,
            "discard": self._do_discard,
        }
        if not isinstance(what, str) or what not in calls:
            return {"error": f"{what!r} is no request; expected one of {', '.join(calls)}"}
        try:
            return calls[what](channel, request, deadline)
        except SyncError as error:
            self.last_failure = str(error).removeprefix("sync: ")
        except Exception as error:  # of an engine, say: the trainer must hear of it, and this process goes on
            self.last_failure = f"{type(error).__name__}: {error}"
        return {"error": self.last_failure}

    def _do_active(self, channel: Channel, request: Message, deadline: Deadline) -> Message:
        return {"active": policy_to_json(self._replica.active)}

    def _do_placed(self, channel: Channel, request: Message, deadline: Deadline) -> Message:
        places = self._replica.placed()
        if self._numbers is not None:
            places = renumbered(places, self._numbers)
        return {"placed": places_to_json(places), "transport": self._transport.name}

    def _do_plan(self, channel: Channel, request: Message, deadline: Deadline) -> Message:
        plan = plan_from_json(request.get("plan"))
        with self._swap:
            self._plans.pop(plan.hash, None)
            while len(self._plans) >= PLANS_KEPT:
                self._plans.pop(next(iter(self._plans)))
            self._plans[plan.hash] = plan
        return {"hash": plan.hash}

    def _do_stage(self, channel: Channel, request: Message, deadline: Deadline) -> Message:
        offer = offer_from_json(request.get("offer"), self._plan_of)
        ticket, number, version = request.get("ticket"), request["number"], offer.policy.number
        if not isinstance(ticket, dict):
            raise SyncError(
                f"sync: version {version} is offered without a ticket of transport {self._transport.name!r}"
            )
        self._check_order(offer.policy)

        def tell(of: int, round_number: int) -> None:
            channel.send({"number": number, "version": of, "round": round_number}, deadline, of)

        with self._alone(deadline, f"staging version {version} since {time.strftime('%H:%M:%S')}", version):
            self._transport.redeem(version, ticket)
            self._transport.on_round = tell
            try:
                report = self._replica.stage(offer, deadline)
            finally:
                self._transport.on_round = None
        return {"report": report_to_json(report)}

    def _do_flip(self, channel: Channel, request: Message, deadline: Deadline) -> Message:
        policy = policy_from_json(request.get("policy"))
        if policy is None:
            raise SyncError("sync: a flip names no version")
        if self._replica.active != policy:  # a repeated flip has happened already
            with self._alone(deadline, f"flipping to version {policy.number}", policy.number):
                self._replica.flip(policy, deadline)
        return {"active": policy_to_json(policy)}

    def _do_discard(self, channel: Channel, request: Message, deadline: Deadline) -> Message:
        version = request.get("version")
        if type(version) is not int:
            raise SyncError(f"sync: {version!r} is no version to discard")
        self._replica.discard(version)
        return {}

    def _plan_of(self, digest: str) -> SyncPlan:
        with self._swap:
            if digest not in self._plans:
                raise SyncError(f"sync: no plan {digest} is known here; send its description first")
            return self._plans[digest]

    def _superseded(self, session: str, channel: Channel) -> bool:
        """Whether another trainer came after this one. A session that is new is the trainer's from now on, and its last
        connection the only one."""
        with self._swap:
            if session not in self._sessions:
                self._sessions.append(session)
                self._started = self._replica.active
                if self._on_trainer is not None:
                    self._on_trainer()
            if session != self._sessions[-1]:
                return True
            if self._current is not channel:
                if self._current is not None:
                    self._current.close()
                self._current = channel
            return False

    def _check_order(self, policy: PolicyVersion) -> None:
        """A late offer is refused: versions only go up, and one number names one content; but not across trainers."""
        active = self._replica.active
        if (
            active is not None
            and active != self._started
            and (policy.number < active.number or (policy.number == active.number and policy != active))
        ):
            raise SyncError(f"sync: {policy} is offered late; {self._replica.name} serves {active}")

    @contextlib.contextmanager
    def _alone(self, deadline: Deadline, what: str, version: int) -> Iterator[None]:
        """One thing at a time, also when it was a connection of before that asked for it."""
        if not self._busy.acquire(timeout=deadline.remaining()):
            raise deadline.missed("a new request", self._replica.name, f"it is {self._working_on}", version)
        try:
            self._working_on = what
            yield
        finally:
            self._working_on = "nothing"
            self._busy.release()


def _soon() -> Deadline:
    return Deadline.after(_ANSWER_S)
