"""The rollout service in this process: carries out over its workers what the protocol decides.

    service = RolloutService(update="drain")
    replica = LocalReplica("rollout-0", blank, shardings, transport, install=worker.install)
    service.join(worker, shards=1)
    sync = WeightSync(leaves, [service.route(Route.local(replica))], base=base)
    sync.push(0, weights)                     # from now on requests run
    service.submit(request, print)            # Started, Tokens ..., Ended

One lock guards the protocol; workers' events, clients' calls and flips take turns under it, and clients hear of their
requests under it, in order.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Literal

from lockstep.errors import ServiceError
from lockstep.service.blocking import score
from lockstep.service.clients import Client, Ledger
from lockstep.service.latest import Latest, lost_words
from lockstep.service.protocol import Protocol
from lockstep.service.requests import (
    Cancelled,
    Ended,
    Finished,
    Lost,
    OnEvent,
    Outcome,
    Progress,
    Refused,
    Retired,
    RolloutRequest,
    ServiceStatus,
    Started,
    Tokens,
    UpdatePolicy,
    Worker,
    WorkerEvent,
    likeliest,
)
from lockstep.service.served import ServedReplica
from lockstep.service.state import Effect, End, Send
from lockstep.service.status import SyncAt, Totals, describe, with_engines
from lockstep.sync.route import Route
from lockstep.sync.transport import Deadline
from lockstep.types import PolicyVersion, Trajectory

Flips = Literal["rolling", "together"]
LOG = logging.getLogger("lockstep.service")
TICK_S = 0.25  # how late a request that waited too long may be told so


class RolloutService:
    """Implements `requests.Rollouts`.

    update: what happens to requests under way at a flip. flips: rolling, one replica after the other, or together: when
    one prepares, all do. max_waiting: samples that may wait for a replica. ledger: told of every request before it is
    admitted, and when it ends.
    """

    def __init__(
        self,
        *,
        update: UpdatePolicy = "drain",
        flips: Flips = "rolling",
        max_waiting: int = 4096,
        ledger: Ledger | None = None,
    ) -> None:
        self.protocol = Protocol(update=update, max_waiting=max_waiting)
        self._latest = Latest(self.protocol)
        self.flips = flips
        self.workers: dict[str, Worker] = {}
        self.ledger = ledger
        self.syncs: dict[str, SyncAt] = {}  # replica -> where its sync listens, for the status
        self._clients: dict[str, Client] = {}
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._flipping: str | None = None  # the replica whose turn it is
        self._prepared: dict[str, tuple[PolicyVersion, Deadline]] = {}  # together: flips that nobody has come for yet
        self._ends: dict[Outcome, list[str]] | None = None  # while closing
        self._totals = Totals()
        self._on_lost: list[Callable[[str, str], None]] = []
        self._abandoned: set[str] = set()  # lost replicas that nobody starts again
        self._over = threading.Event()
        self._timer = threading.Thread(target=self._expire, name="service timer", daemon=True)
        self._timer.start()

    # -- replicas ------------------------------------------------------------------------------------------------------

    def join(self, worker: Worker, *, shards: int = 1, active: PolicyVersion | None = None) -> None:
        """Take a worker in. shards: parts of a version that its replica verifies. active: what it serves already.
        Raises ServiceError for a name that is in use."""
        with self._lock:
            self.protocol.latest = self.protocol.latest or active
            effects = self.protocol.join(worker.name, worker.capacity, shards, active)
            self.workers[worker.name] = worker
            self._abandoned.discard(worker.name)
            worker.start(partial(self._hear, worker))
            self._apply(effects)

    def on_lost(self, call: Callable[[str, str], None], brings: Callable[[PolicyVersion], bool]) -> None:
        """Have `call(replica, reason)` called, in a thread of the service, when a replica is lost: it is to start it
        again. brings: whether it then brings this version to it; called under the service's lock."""
        self._on_lost.append(call)
        self._latest.brings = brings

    def lose(self, name: str, reason: str) -> None:
        """Give a replica up. What it ran runs again elsewhere."""
        with self._lock:
            worker = self.workers.get(name)
            if worker is not None:
                self._hear(worker, Lost(reason))

    def abandon(self, name: str, reason: str) -> None:
        """A lost replica is not started again. Where none is left, what waits fails."""
        with self._lock:
            self._abandoned.add(name)
            if len(self._abandoned) == len(self.workers):
                for request_id in list(self.protocol.requests):
                    why = f"no replica is left, and none is started again; the last was {name}: {reason}"
                    self._apply(self.protocol.cancel(request_id, why, "failed"))

    def leave_out(self, name: str, why: str) -> None:
        """Send nothing to a replica that a publish left behind, until it serves a new version again."""
        with self._lock:
            self.protocol.leave_out(name, why)
            self._changed.notify_all()

    # -- requests ------------------------------------------------------------------------------------------------------

    def submit(self, request: RolloutRequest, on_event: OnEvent) -> None:
        """As `Rollouts.submit`."""
        with self._lock:
            workers = [w for name, w in self.workers.items() if self.protocol.replicas[name].alive]
            restarted = self._on_lost and len(self._abandoned) < len(self.workers)
            if not workers and not restarted and not self.protocol.closing:
                raise ServiceError(f"request {request.id!r}: no replica is left, and nobody starts one again")
            if workers:
                workers[0].check(request)
            self.protocol.require_admissible(request)
            if (lost := self._latest.lost) is not None:
                raise ServiceError(f"request {request.id!r}: {lost_words(lost)}")
            if self.ledger is not None:
                self.ledger.admitted(request)
            self._clients[request.id] = Client(request, on_event, time.monotonic())
            self._apply(self.protocol.admit(request))

    def cancel(self, request_id: str, reason: str = "cancelled by the client") -> None:
        with self._lock:
            self._apply(self.protocol.cancel(request_id, reason))

    def score(self, sequences: Iterable[Iterable[int]], temperature: float) -> list[tuple[PolicyVersion, list[float]]]:
        """As `Rollouts.score`."""
        return score(self, sequences, temperature)

    def pause(self, reason: str = "by request") -> None:
        """Send nothing to replicas any more; what runs goes on, what comes waits."""
        with self._lock:
            self.protocol.pause(reason)

    def resume(self) -> None:
        with self._lock:
            self._apply(self.protocol.resume())

    def update_by(self, policy: UpdatePolicy) -> None:
        """What happens to requests under way at a flip, from the next one on."""
        with self._lock:
            self.protocol.update = policy

    @property
    def latest(self) -> PolicyVersion | None:
        """What was published last, whether or not a replica still serves it."""
        with self._lock:
            return self.protocol.latest

    def status(self) -> ServiceStatus:
        with self._lock:
            engines = {name: w for name, w in self.workers.items() if self.protocol.replicas[name].alive}
            made = describe(self.protocol, self.syncs, self._totals, self._latest.lost)
        return with_engines(made, engines)

    def wait_idle(self, seconds: float) -> bool:
        """Whether every request has ended, waiting for it for so long."""
        with self._lock:
            return self._changed.wait_for(lambda: not self.protocol.requests, seconds)

    def close(self, deadline_s: float = 0.0) -> dict[Outcome, list[str]]:
        """Admit nothing any more, let what is under way finish for so long, cancel the rest, stop the workers. Returns
        the ids of the requests that were under way, by how they ended."""
        why = "the service was shut down"
        with self._lock:
            self.protocol.closing, self.protocol.paused = True, None
            self._ends = {"finished": [], "aborted": [], "failed": []}
            self._apply(self.protocol.dispatch())
        if not self.wait_idle(deadline_s):
            with self._lock:
                for request_id in list(self.protocol.requests):
                    self._apply(self.protocol.cancel(request_id, why), about=request_id)
        for worker in list(self.workers.values()):
            worker.close()  # and says how what it still ran came to an end
        with self._lock:
            for name in self.workers:
                self._apply(self.protocol.lost(name, why))
            for request_id in list(self.protocol.requests):
                self._apply(self.protocol.cancel(request_id, why), about=request_id)
            ends, self._ends = self._ends, None
        self._over.set()
        return ends

    # -- flips ---------------------------------------------------------------------------------------------------------

    def route(self, route: Route) -> Route:
        """The same way to the same replica, whose flips wait as the update policy says."""
        return replace(route, replica=ServedReplica(route.replica, self))

    def flip(self, name: str, policy: PolicyVersion, install: Callable[[], None], deadline: Deadline) -> None:
        """Prepare, wait, `install`. Raises SyncError if it has to wait for longer than the deadline, or is discarded
        meanwhile; and whatever `install` raises."""
        with self._lock:
            rolling = self.flips == "rolling"
            while rolling and self._flipping is not None:
                self._wait_for_flip(name, policy, deadline, f"the flip of {self._flipping} comes first")
            self._flipping = name
        try:
            with self._lock:
                for each in [name] if rolling else self.protocol.ready_for(policy):
                    if self.protocol.replicas[each].flipping is None:
                        self._prepared[each] = policy, deadline
                    self._apply(self.protocol.flip(each, policy))
                self._prepared.pop(name, None)
                while not self.protocol.may_install(name, policy):
                    self._wait_for_flip(name, policy, deadline, self.protocol.waits_for(name))
                self.protocol.install(name, policy)
            install()
        finally:
            with self._lock:
                self._flipping = None
                self._apply(self.protocol.give_up(name, policy))

    def _wait_for_flip(self, name: str, policy: PolicyVersion, deadline: Deadline, why: str) -> None:
        if not deadline.remaining():
            raise deadline.missed(f"replica {name!r}", "requests under way", why, policy.number)
        self._changed.wait(min(deadline.remaining(), 1.0))

    def serves(self, name: str, active: PolicyVersion | None) -> None:
        """A replica says what it serves."""
        with self._lock:
            self._latest.takes_over(name, active)
            self._apply(self.protocol.serves(name, active))

    def staging(self, name: str, policy: PolicyVersion) -> int:
        """Returns the attempt's number, which `staged` is to be told."""
        with self._lock:
            return self.protocol.stage(name, policy)

    def staged(self, name: str, attempt: int) -> None:
        """All parts of a version are verified there."""
        with self._lock:
            for shard in range(self.protocol.replicas[name].shards):
                self.protocol.verified(name, attempt, shard)

    def discard(self, name: str, number: int) -> None:
        with self._lock:
            self._apply(self.protocol.discard(name, number))

    # -- what workers say ----------------------------------------------------------------------------------------------

    def _hear(self, worker: Worker, event: WorkerEvent) -> None:
        with self._lock:
            if self.workers.get(worker.name) is not worker:
                return  # a replica of before, of the same name
            protocol, name = self.protocol, worker.name
            match event:
                case Progress(request_id, tokens):
                    if protocol.shown(name, request_id):
                        self._show(request_id, tokens)
                case Finished(request_id, trajectories):
                    self._finished(name, request_id, trajectories)
                case Cancelled(request_id, trajectories):
                    self._apply(protocol.cancelled(name, request_id), trajectories, request_id)
                case Refused(request_id, reason):
                    self._apply(protocol.refused(name, request_id, reason))
                case Retired():
                    self._totals.retire(event)
                case Lost(reason):
                    if protocol.replicas[name].alive:
                        LOG.warning("replica %s is lost: %s", name, reason)
                        self._apply(protocol.lost(name, reason))
                        for call in self._on_lost:
                            threading.Thread(target=call, args=(name, reason), daemon=True).start()
            self._changed.notify_all()

    def _finished(self, name: str, request_id: str, trajectories: tuple[Trajectory, ...]) -> None:
        state = self.protocol.requests.get(request_id)
        if state is None or state.replica != name or state.version is None:
            return
        number = state.version.number
        if wrong := {int(v) for t in trajectories for v in t.versions} - {number}:
            # I2. The worker knows what it computed with; that it is not what was agreed must not go unsaid.
            reason = f"replica {name} computed it under version {wrong.pop()}, it was sent there for {state.version}"
            self._apply(self.protocol.refused(name, request_id, reason))
            return
        client = self._clients[request_id]
        if client.request.stream:
            for t in trajectories:
                came = client.came.get(t.index, 0)
                ids, logprobs = t.completion_ids[came:].tolist(), t.logprobs[came:].tolist()
                rest = Tokens(t.index, tuple(ids), tuple(logprobs), likeliest(t, came))
                if rest.ids and not self._show(request_id, rest):
                    return
        self._apply(self.protocol.finished(name, request_id), trajectories, request_id)

    def _show(self, request_id: str, tokens: Tokens) -> bool:
        """Hand on tokens that the client has not seen. One that another replica draws again must be the one that was
        shown; returns False, with the request failed, if it is not."""
        client = self._clients[request_id]
        shown = client.shown.setdefault(tokens.index, [])
        came = client.came.get(tokens.index, 0)
        known = shown[came : came + len(tokens.ids)]
        if tuple(known) != tokens.ids[: len(known)]:
            replica = self.protocol.requests[request_id].replica
            assert replica is not None
            reason = (
                f"replica {replica} draws other tokens of sample {tokens.index} than those shown, under one version"
            )
            worker = self.workers[replica]
            self._apply(self.protocol.refused(replica, request_id, reason))
            worker.cancel(request_id)
            return False
        client.came[tokens.index] = came + len(tokens.ids)
        if new := tokens.ids[len(known) :]:
            shown += new
            self._tell(client, Tokens(tokens.index, new, tokens.logprobs[len(known) :], tokens.top[len(known) :]))
        return True

    # -- effects -------------------------------------------------------------------------------------------------------

    def _apply(
        self, effects: list[Effect], trajectories: tuple[Trajectory, ...] = (), about: str | None = None
    ) -> None:
        """Carry out, in order. trajectories: of the request `about`, should this be its end."""
        for effect in [*effects, *self._latest.ends()]:
            if isinstance(effect, Send):
                client = self._clients[effect.request.id]
                client.started, client.came = time.monotonic(), {}
                self._tell(client, Started(effect.version, effect.replica))
                self.workers[effect.replica].submit(effect.request)
            elif isinstance(effect, End):
                self._end(effect, trajectories if effect.request_id == about else ())
            else:
                self.workers[effect.replica].cancel(effect.request_id)
        if __debug__:
            self.protocol.check()
        self._changed.notify_all()

    def _end(self, effect: End, trajectories: tuple[Trajectory, ...]) -> None:
        client = self._clients.pop(effect.request_id)
        self._totals.count(effect)
        if self._ends is not None:
            self._ends[effect.outcome].append(effect.request_id)
        end = Ended(effect.outcome, trajectories, effect.reason, effect.version)
        if self.ledger is not None:
            self.ledger.ended(effect.request_id, end)
        self._tell(client, end)

    def _tell(self, client: Client, event: Started | Tokens | Ended) -> None:
        try:
            client.on_event(event)
        except Exception:
            # One client's fault is not the others'. Its request goes on; it is the one who listens no more.
            LOG.exception("the listener of request %r raised", client.request.id)

    def _expire(self) -> None:
        """Fail requests that have waited for a replica longer than they may; and let replicas go on that prepared for a
        flip which never came: who published may be gone."""
        while not self._over.wait(TICK_S):
            now = time.monotonic()
            with self._lock:
                for name, (policy, deadline) in list(self._prepared.items()):
                    if not deadline.remaining():
                        del self._prepared[name]
                        self._apply(self.protocol.give_up(name, policy))
                for state in self.protocol.waiting:
                    client = self._clients[state.request.id]
                    if now - client.since > state.request.queue_s:
                        why = self.protocol.why_waiting(state)
                        reason = f"waited longer than {state.request.queue_s:g} s for {why}"
                        self._apply(self.protocol.cancel(state.request.id, reason, "failed"))
