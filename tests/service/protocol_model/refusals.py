"""What must not change anything: calls that are out of order, answers that are nobody's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lockstep.errors import DataError, LockstepError, ServiceError, SyncError
from lockstep.service.protocol import Protocol
from protocol_model.conformance import Differs, belief_of, made_from, name, rollout_request, sure, version
from protocol_model.environment import Model
from protocol_model.states import NONE, RUNNING, WAITING, Draft, State


def check_refusals(model: Model, s: State, kind: type[Protocol] = Protocol) -> int:
    """Each of these calls in state `s` is refused, or does nothing; how many there were. Raises Differs."""
    bounds, count = model.bounds, 0
    protocol = made_from(bounds, s, kind)
    before = belief_of(bounds, protocol)

    def nothing(what: str, call: Callable[[], Any]) -> None:
        nonlocal count
        result = call()
        if result or belief_of(bounds, protocol) != before:
            raise Differs(f"{what} was to change nothing in {s}; it returned {result}\n{belief_of(bounds, protocol)}")
        count += 1

    def refused(what: str, error: type[LockstepError], call: Callable[[], Any]) -> None:
        def tried() -> str:
            try:
                call()
            except error:
                return ""
            return "it was not refused"

        nothing(what, tried)

    if any(d.effects for d in model.dispatch(Draft(s))):
        return 0  # only where tokens that were just shown settled a group that another request cannot wait for
    nothing("dispatch", protocol.dispatch)
    for i, q in enumerate(s.requests):
        if q.status in (WAITING, RUNNING):
            refused("its id again", DataError, lambda i=i: protocol.admit(rollout_request(bounds, i, 0)))
        else:
            nothing("cancel", lambda i=i: protocol.cancel(f"q{i}", "too late"))
    for r, replica in enumerate(s.replicas):
        key, held, other = name(r), version(replica.staged), sure(version(bounds.versions))
        for i, q in enumerate(s.requests):
            if q.status != RUNNING or q.at != r:
                for answer in (protocol.finished, protocol.cancelled, protocol.shown):
                    nothing("nobody's answer", lambda i=i, answer=answer, key=key: answer(key, f"q{i}"))
                nothing("nobody's answer", lambda i=i, key=key: protocol.refused(key, f"q{i}", "late"))
        nothing("discard of another", lambda key=key: protocol.discard(key, bounds.versions))
        refused("a flip to another", SyncError, lambda key=key, other=other: protocol.flip(key, other))
        if held is not None and replica.verified != model.whole:
            refused("a flip too early", SyncError, lambda key=key, held=held: protocol.flip(key, held))
        if replica.flipping:
            refused("staging", SyncError, lambda key=key, other=other: protocol.stage(key, other))
            nothing("a flip again", lambda key=key, held=held: protocol.flip(key, held))
        else:
            refused("installing", SyncError, lambda key=key, other=other: protocol.may_install(key, other))
        if replica.alive:
            again = (key, bounds.capacity, bounds.shards, None)
            refused("joining again", ServiceError, lambda again=again: protocol.join(*again))
        else:
            refused("staging", SyncError, lambda key=key, other=other: protocol.stage(key, other))
            nothing("lost again", lambda key=key: protocol.lost(key, "again"))
            nothing("a word of the dead", lambda key=key, other=other: protocol.serves(key, other))
        if replica.flipping and not replica.installing and held is not None:
            may = model.may_install(s, r)
            nothing("may install", lambda key=key, held=held, may=may: protocol.may_install(key, held) != may)
        if replica.installing:
            nothing("discard", lambda key=key, held=held: protocol.discard(key, held.number))
            nothing("give up", lambda key=key, held=held: protocol.give_up(key, held))
        if replica.staged == NONE:
            nothing("verified", lambda key=key: protocol.verified(key, 1, 0))
    return count
