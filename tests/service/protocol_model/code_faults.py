"""The code's protocol with one method broken each, which conformance must find."""

from __future__ import annotations

from lockstep.service.protocol import Protocol
from lockstep.service.requests import Outcome, RolloutRequest
from lockstep.service.state import Effect, Pin, ReplicaState, RequestState, Send
from lockstep.types import PolicyVersion


class FlipsUnverified(Protocol):
    def flip(self, name: str, policy: PolicyVersion) -> list[Effect]:
        staged = self.replicas[name].staged
        if staged is not None:
            staged.verified = set(range(self.replicas[name].shards))
        return super().flip(name, policy)


class AnyAttemptCounts(Protocol):
    def verified(self, name: str, attempt: int, shard: int) -> None:
        staged = self.replicas[name].staged
        super().verified(name, attempt if staged is None else staged.attempt, shard)


class NeverWaits(Protocol):
    def may_install(self, name: str, policy: PolicyVersion) -> bool:
        super().may_install(name, policy)
        return True


class StopsAgain(Protocol):
    def flip(self, name: str, policy: PolicyVersion) -> list[Effect]:
        for request_id in self.replicas[name].running:
            self.requests[request_id].again = False
        return super().flip(name, policy)


class AnyReplicaAnswers(Protocol):
    def _at(self, replica: str, request_id: str) -> RequestState | None:
        return self.requests.get(request_id)


class LosesWork(Protocol):
    def lost(self, name: str, reason: str) -> list[Effect]:
        return [effect for effect in super().lost(name, reason) if not isinstance(effect, Send)]


class KeepsThePin(Protocol):
    def _back(self, state: RequestState) -> None:
        self._leave(state)
        state.again = False


class NeverSettles(Protocol):
    def shown(self, replica: str, request_id: str) -> bool:
        seen = super().shown(replica, request_id)
        if seen:
            self.pins[self.requests[request_id].request.pin].settled = False
        return seen


class NoPins(Protocol):
    def _may_run(self, replica: ReplicaState, state: RequestState, pin: Pin) -> bool:
        return super()._may_run(replica, state, Pin())


class NoMinimum(Protocol):
    def _may_run(self, replica: ReplicaState, state: RequestState, pin: Pin) -> bool:
        return replica.accepting and (pin.policy is None or replica.active == pin.policy)


class NoRoomNeeded(Protocol):
    def _has_room(self, replica: ReplicaState, samples: int) -> bool:
        return True


class MostLoadedFirst(Protocol):
    def load(self, replica: ReplicaState) -> int:
        return -super().load(replica)


class EndsAtOnce(Protocol):
    def cancel(self, request_id: str, reason: str, outcome: Outcome = "aborted") -> list[Effect]:
        effects = super().cancel(request_id, reason, outcome)
        state = self.requests.get(request_id)
        return effects if state is None else effects + self._end(state, outcome, reason)


class ForgetsTheOlder(Protocol):
    def serves(self, name: str, active: PolicyVersion | None) -> list[Effect]:
        effects = super().serves(name, active)
        self.replicas[name].older = None
        return effects


class TrustsALostAnswer(Protocol):
    def leave_out(self, name: str, why: str) -> None:
        super().leave_out(name, why)
        self.replicas[name].out = None


class SendsWhileInstalling(Protocol):
    def install(self, name: str, policy: PolicyVersion) -> None:
        self.may_install(name, policy)


class KeepsStaged(Protocol):
    def discard(self, name: str, number: int) -> list[Effect]:
        replica = self.replicas[name]
        staged = replica.staged
        effects = super().discard(name, number)
        replica.staged = staged
        return effects


class ForgetsToSend(Protocol):
    def admit(self, request: RolloutRequest) -> list[Effect]:
        super().admit(request)
        return []


class GivesUpTooMuch(Protocol):
    def give_up(self, name: str, policy: PolicyVersion) -> list[Effect]:
        self.replicas[name].installing = False
        return super().give_up(name, policy)


class RefusesWhatWasGivenUp(Protocol):
    def refused(self, replica: str, request_id: str, reason: str) -> list[Effect]:
        state = self._at(replica, request_id)
        if state is not None:
            state.stopping = None
        return super().refused(replica, request_id, reason)


CODE_FAULTS: tuple[type[Protocol], ...] = (
    FlipsUnverified,
    AnyAttemptCounts,
    NeverWaits,
    StopsAgain,
    AnyReplicaAnswers,
    LosesWork,
    KeepsThePin,
    NeverSettles,
    NoPins,
    NoMinimum,
    NoRoomNeeded,
    MostLoadedFirst,
    EndsAtOnce,
    ForgetsTheOlder,
    TrustsALostAnswer,
    SendsWhileInstalling,
    KeepsStaged,
    ForgetsToSend,
    GivesUpTooMuch,
    RefusesWhatWasGivenUp,
)
