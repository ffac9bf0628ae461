"""Who serves what, and which request goes where. Decisions only: no threads, no clocks, no arrays.

Every method takes in one thing that happened, in any order that it can happen in, and returns what is to be done about
it: `Send`, `Stop`, `End`. `docs/protocol.md` has the picture; the invariants are the design's I1 to I8, and the tests
explore them exhaustively against a model that was written apart from this code.

A replica: `active`, at most one `staged` (flips only when every shard of it is verified), and under `dual` at most one
`older` version, until its last request ends. A request: waiting -> running -> ended, and back to waiting when its
replica is lost or aborts it; it ends once. A group has one version as long as one of its requests is open.
"""

from __future__ import annotations

from collections.abc import Iterable

from lockstep.errors import DataError, QueueFullError, ServiceError, SyncError
from lockstep.service.requests import Outcome, RolloutRequest, UpdatePolicy
from lockstep.service.state import Effect, End, Pin, ReplicaState, RequestState, Send, Staged, Stop
from lockstep.types import PolicyVersion

MAX_LOSSES = 4  # of one request: what takes down the replica that runs it must not take down all of them in turn


class Protocol:
    """The service's state. max_waiting: samples that may wait for a replica."""

    def __init__(self, *, update: UpdatePolicy = "drain", max_waiting: int = 4096) -> None:
        self.update, self.max_waiting = update, max_waiting
        self.replicas: dict[str, ReplicaState] = {}
        self.requests: dict[str, RequestState] = {}  # those that have not ended, in order of admission
        self.pins: dict[str, Pin] = {}
        self.paused: str | None = None
        self.closing = False
        self.latest: PolicyVersion | None = None  # published last: while no replica serves it, nothing is sent
        self.redispatched = 0
        self.attempts = 0  # at staging
        self._order = 0

    # -- requests ------------------------------------------------------------------------------------------------------

    @property
    def waiting(self) -> list[RequestState]:
        return [r for r in self.requests.values() if r.replica is None]

    def require_admissible(self, request: RolloutRequest) -> None:
        """Raises ServiceError while closing; DataError for an id that is under way; QueueFullError."""
        if self.closing:
            raise ServiceError(f"request {request.id!r}: the service is shutting down; send it to another one")
        if request.id in self.requests:
            raise DataError(f"request {request.id!r} is under way already; give each request its own id")
        waiting = self.waiting
        samples = sum(r.samples for r in waiting)
        if waiting and samples + len(request.seeds) > self.max_waiting:
            raise QueueFullError(
                f"request {request.id!r}: {samples} samples wait for a replica, {len(request.seeds)} more exceed the "
                f"bound of {self.max_waiting}; send it again when some have finished"
            )

    def admit(self, request: RolloutRequest) -> list[Effect]:
        """Raises as `require_admissible`, with nothing admitted."""
        self.require_admissible(request)
        self.requests[request.id] = RequestState(request, self._order)
        self._order += 1
        self.pins.setdefault(request.pin, Pin()).open.add(request.id)
        return self.dispatch()

    def cancel(self, request_id: str, reason: str, outcome: Outcome = "aborted") -> list[Effect]:
        """The client gave it up (aborted), or it waited too long (failed)."""
        state = self.requests.get(request_id)
        if state is None:
            return []
        if state.replica is None:
            return [*self._end(state, outcome, reason), *self.dispatch()]
        if state.stopping is not None:
            return []
        state.stopping = (outcome, reason)
        return [] if state.again else [Stop(state.replica, request_id)]

    def shown(self, replica: str, request_id: str) -> bool:
        """Tokens came. Returns whether the client may see them; then its group's version is settled."""
        state = self._at(replica, request_id)
        if state is None or state.again:
            return False
        self.pins[state.request.pin].settled = True
        return True

    def finished(self, replica: str, request_id: str) -> list[Effect]:
        """All its samples came; also when it was being cancelled, for whatever reason: then that came too late."""
        state = self._at(replica, request_id)
        return [] if state is None else [*self._end(state, "finished", ""), *self.dispatch()]

    def cancelled(self, replica: str, request_id: str) -> list[Effect]:
        state = self._at(replica, request_id)
        if state is None:
            return []
        if state.stopping is not None:
            return [*self._end(state, *state.stopping), *self.dispatch()]
        if not state.again:
            return [*self._end(state, "aborted", f"replica {replica} cancelled it by itself"), *self.dispatch()]
        self._back(state)
        return self.dispatch()

    def refused(self, replica: str, request_id: str, reason: str) -> list[Effect]:
        """The engine could not carry it out. A cancellation still counts for what it asked."""
        state = self._at(replica, request_id)
        if state is None:
            return []
        return [*self._end(state, *(state.stopping or ("failed", reason))), *self.dispatch()]

    def pause(self, reason: str) -> None:
        self.paused = reason

    def resume(self) -> list[Effect]:
        self.paused = None
        return self.dispatch()

    # -- replicas ------------------------------------------------------------------------------------------------------

    def join(self, name: str, capacity: int, shards: int, active: PolicyVersion | None) -> list[Effect]:
        """A replica is there, or there again, with nothing running. Raises ServiceError if one of its name is."""
        known = self.replicas.get(name)
        if known is not None and known.alive:
            raise ServiceError(f"a replica called {name!r} is there already; names must differ")
        self.replicas[name] = ReplicaState(name, capacity, shards, active)
        return self.dispatch()

    def lost(self, name: str, reason: str) -> list[Effect]:
        """It answers nothing any more. What it ran runs again elsewhere, with the same seeds."""
        replica = self.replicas[name]
        if not replica.alive:
            return []
        replica.alive = False
        replica.active = replica.staged = replica.flipping = replica.older = None
        replica.installing = False
        effects: list[Effect] = []
        for state in [self.requests[i] for i in replica.running]:
            if state.stopping is not None:
                effects += self._end(state, *state.stopping)
            elif state.losses + 1 >= MAX_LOSSES:
                effects += self._end(
                    state, "failed", f"{state.losses + 1} replicas that ran it were lost, the last: {name}: {reason}"
                )
            else:
                state.losses += 1
                self.redispatched += 1
                self._back(state)
        return [*effects, *self.dispatch()]

    def stage(self, name: str, policy: PolicyVersion) -> int:
        """Staging begins; what was staged before is void. Returns the attempt's number. Raises SyncError while the
        replica flips or is lost."""
        replica = self._alive(name, policy)
        if replica.flipping is not None:
            raise SyncError(f"sync: {name} cannot stage {policy} while it flips to {replica.flipping}")
        self.attempts += 1
        replica.staged = Staged(policy, self.attempts)
        return self.attempts

    def verified(self, name: str, attempt: int, shard: int) -> None:
        """A shard of what is being staged is there and verified. A repeated word, or a late one of another attempt,
        changes nothing."""
        replica = self.replicas[name]
        if replica.alive and replica.staged is not None and replica.staged.attempt == attempt:
            assert 0 <= shard < replica.shards, f"{name} has {replica.shards} shards, {shard} is none of them"
            replica.staged.verified.add(shard)

    def discard(self, name: str, number: int) -> list[Effect]:
        """Drop what is staged for version `number`; a flip to it that still waits is given up."""
        replica = self.replicas[name]
        if replica.staged is None or replica.staged.policy.number != number or replica.installing:
            return []  # an install that is under way comes to its end first, and then nothing is staged any more
        replica.staged = replica.flipping = None
        return self.dispatch()

    def flip(self, name: str, policy: PolicyVersion) -> list[Effect]:
        """Prepare to serve what is staged; asked again while it waits, nothing changes. Raises SyncError unless every
        shard of exactly this version is verified."""
        replica = self._alive(name, policy)
        staged = replica.staged
        if staged is None or staged.policy != policy or len(staged.verified) < replica.shards:
            held = (
                "nothing" if staged is None else f"{staged.policy}, {len(staged.verified)} of {replica.shards} shards"
            )
            raise SyncError(f"sync: {name} was told to serve {policy}, but has {held} staged and verified")
        if replica.flipping is not None:  # to this very version: it is the one that is staged
            return []
        replica.flipping, replica.update = policy, self.update
        effects: list[Effect] = []
        if replica.update == "abort":
            for state in [self.requests[i] for i in replica.running]:
                if state.stopping is None and not state.again:
                    state.again = True
                    effects.append(Stop(name, state.request.id))
        return effects

    def ready_for(self, policy: PolicyVersion) -> list[str]:
        """The replicas that may be told to flip to this version."""
        return [name for name, replica in self.replicas.items() if replica.ready_for(policy)]

    def may_install(self, name: str, policy: PolicyVersion) -> bool:
        """Whether the flip that waits may be carried out now. Raises SyncError if it was given up meanwhile."""
        replica = self.replicas[name]
        if replica.flipping != policy:
            why = "lost" if not replica.alive else "told to discard it"
            raise SyncError(f"sync: the flip to {policy} was given up, {name} was {why}")
        if replica.update == "dual" and replica.out is None:
            return replica.older is None
        return not replica.running  # dual, too: while nobody knows what it serves, they may keep two versions there

    def waits_for(self, name: str) -> str:
        """In words, what keeps a flip from being carried out."""
        replica = self.replicas[name]
        all_of_them = replica.update != "dual" or replica.out is not None
        held = [i for i, v in replica.running.items() if all_of_them or v == replica.older]
        return f"{name} has {len(held)} requests under way" + (f", the oldest {held[0]!r}" if held else "")

    def install(self, name: str, policy: PolicyVersion) -> None:
        """The flip is being carried out: from now until its end nothing is sent there, so that nothing that was meant
        for the version before can run under the one after."""
        assert self.may_install(name, policy), f"{name} installs {policy} while {self.waits_for(name)}"
        self.replicas[name].installing = True

    def serves(self, name: str, active: PolicyVersion | None) -> list[Effect]:
        """The replica says what it serves: when a flip came to its end, well or not, or when it was asked."""
        replica = self.replicas[name]
        if not replica.alive:
            return []
        before = replica.active
        if active != before and not replica.installing and replica.out is None:
            # It was never told to: what it runs may have been begun under either.
            replica.out = f"it serves {active} without having been told to; {before} was known"
        elif active is not None:
            replica.out = None
        if active is not None and replica.staged is not None and replica.staged.policy == active:
            replica.staged = None
        replica.active, replica.flipping, replica.installing = active, None, False
        if replica.running and before != active:
            replica.older = before
        return self.dispatch()

    def give_up(self, name: str, policy: PolicyVersion) -> list[Effect]:
        """A flip that had to wait too long is not carried out; the replica serves what it served."""
        replica = self.replicas[name]
        if replica.flipping == policy and not replica.installing:
            replica.flipping = None
        return self.dispatch()

    def leave_out(self, name: str, why: str) -> None:
        """Send nothing there until it has flipped again, or said what it serves: nobody knows, or it was left behind by
        a publish. What runs there goes on."""
        replica = self.replicas[name]
        replica.out, replica.flipping, replica.installing = why, None, False

    # -- which goes where ----------------------------------------------------------------------------------------------

    def dispatch(self) -> list[Effect]:
        """Send what waits, oldest first. A request that only lacks room keeps later ones from the replicas that it
        could run on; one that waits for a version keeps nobody."""
        effects: list[Effect] = []
        kept: set[str] = set()
        behind = self.behind  # sending changes nothing of it
        for state in self.waiting:
            pin = self.pins[state.request.pin]
            if (end := self._cannot_come(state, pin)) is not None:
                effects += self._end(state, *end)
                continue
            if self.paused is not None or behind:
                continue
            able = [r for r in self.replicas.values() if self._may_run(r, state, pin)]
            room = [r for r in able if r.name not in kept and self._has_room(r, state.samples)]
            if not room:
                kept |= {r.name for r in able}
                continue
            effects.append(self._send(state, pin, min(room, key=self.load)))
        return effects

    def load(self, replica: ReplicaState) -> int:
        """Samples that it runs."""
        return sum(self.requests[i].samples for i in replica.running)

    def why_waiting(self, state: RequestState) -> str:
        """In words, what a request waits for."""
        request, pin = state.request, self.pins[state.request.pin]
        if self.paused is not None:
            return f"the service is paused ({self.paused})"
        alive = [r for r in self.replicas.values() if r.alive]
        if not alive:
            return "no replica is alive"
        if self.behind:
            return f"a replica that serves {self.latest} again: it was served last, and an older one will not do"
        if not any(self._may_run(r, state, pin) for r in alive):
            serving = ", ".join(f"{r.name}: {r.active or 'nothing yet'}" for r in alive)
            if pin.policy is not None:
                return f"a replica that serves {pin.policy} and takes requests ({serving})"
            if flips := [r for r in alive if r.flipping is not None]:
                return f"{flips[0].name} to flip to {flips[0].flipping}; {self.waits_for(flips[0].name)}"
            return f"a replica that serves version {request.min_version} or later ({serving})"
        return f"room: {sum(map(self.load, alive))} samples are under way"

    def _may_run(self, replica: ReplicaState, state: RequestState, pin: Pin) -> bool:
        active = replica.active
        if not replica.accepting or active is None or active.number < state.request.min_version:
            return False
        return pin.policy is None or active == pin.policy

    def _has_room(self, replica: ReplicaState, samples: int) -> bool:
        return not replica.running or self.load(replica) + samples <= replica.capacity

    def _cannot_come(self, state: RequestState, pin: Pin) -> tuple[Outcome, str] | None:
        """How a request ends that would wait for ever."""
        if pin.policy is None:
            return None
        if not self.served(pin.policy):
            outcome: Outcome = "aborted" if self.update == "abort" else "failed"
            return outcome, f"version {pin.policy}, which its group began under, is served no more"
        if pin.settled and pin.policy.number < state.request.min_version:
            why = f"its group began under {pin.policy}, and it asks for version {state.request.min_version} or later"
            return "failed", why
        return None

    def served(self, policy: PolicyVersion) -> bool:
        """Whether a replica that is alive serves it."""
        return any(r.alive and r.active == policy for r in self.replicas.values())

    @property
    def behind(self) -> bool:
        """Whether nobody serves what was published last."""
        return self.latest is not None and not self.served(self.latest)

    def _send(self, state: RequestState, pin: Pin, replica: ReplicaState) -> Send:
        assert replica.active is not None
        state.replica, state.version, pin.policy = replica.name, replica.active, replica.active
        replica.running[state.request.id] = replica.active
        return Send(replica.name, state.request, replica.active)

    def _at(self, replica: str, request_id: str) -> RequestState | None:
        """The request, if it is this replica's to answer: a late answer of one that was given up is nobody's."""
        state = self.requests.get(request_id)
        return state if state is not None and state.replica == replica else None

    def _leave(self, state: RequestState) -> None:
        """It does not run any more."""
        if state.replica is None:
            return
        replica = self.replicas[state.replica]
        del replica.running[state.request.id]
        if replica.older is not None and replica.older not in replica.running.values():
            replica.older = None
        state.replica = state.version = None

    def _back(self, state: RequestState) -> None:
        """It waits again. A group of which nothing is settled and nothing runs may begin anew, under any version."""
        self._leave(state)
        state.again = False
        pin = self.pins[state.request.pin]
        if not pin.settled and all(self.requests[i].replica is None for i in pin.open):
            pin.policy = None

    def _end(self, state: RequestState, outcome: Outcome, reason: str) -> list[Effect]:
        request, pin, version = state.request, self.pins[state.request.pin], state.version
        if outcome == "finished":
            pin.settled = True
        self._leave(state)
        del self.requests[request.id]
        pin.open.remove(request.id)
        if not pin.open:
            del self.pins[request.pin]
        elif not pin.settled and all(self.requests[i].replica is None for i in pin.open):
            pin.policy = None
        return [End(request.id, outcome, reason, version)]

    def _alive(self, name: str, policy: PolicyVersion) -> ReplicaState:
        replica = self.replicas[name]
        if not replica.alive:
            raise SyncError(f"sync: {name} is lost; it cannot take {policy}. Let it join again first")
        return replica

    # -- the invariants ------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Assert what holds between any two events."""
        for replica in self.replicas.values():
            served = {replica.active, replica.older}
            assert set(replica.running.values()) <= served, f"{replica.name} runs a version that it does not serve"
            assert replica.older is None or replica.older in replica.running.values(), "an older version with no use"
            assert replica.alive or not replica.running, f"{replica.name} is lost and runs something"
            assert replica.flipping is not None or not replica.installing
            to = replica.flipping
            assert to is None or replica.ready_for(to), "I4: a flip needs every shard verified"
        self._check_requests(self.requests.values())

    def _check_requests(self, states: Iterable[RequestState]) -> None:
        for state in states:
            if state.replica is not None:
                version = self.replicas[state.replica].running[state.request.id]
                assert version == state.version == self.pins[state.request.pin].policy, "a group of two versions"
                assert version.number >= state.request.min_version, "I6: older than asked for"
            assert state.request.id in self.pins[state.request.pin].open
        assert {i for pin in self.pins.values() for i in pin.open} == set(self.requests)
