"""The code's protocol, driven through what happens in the model, and compared with it after every event.

`made_from` makes a `Protocol` whose state is a given state of the model, `drive` tells it what happened, `belief_of`
says what it believes, in the model's terms. If every edge of the model, taken from the `Protocol` made from its first
state, leads to what the model believes after it, then so does every trace, as long as `made_from` leaves nothing out:
walks that keep one `Protocol` from event to event hold it to that (`same_inside`).
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from lockstep.service.protocol import Protocol
from lockstep.service.requests import RolloutRequest
from lockstep.service.state import Effect as CodeEffect
from lockstep.service.state import End, Pin, ReplicaState, RequestState, Send, Staged, Stop
from lockstep.types import PolicyVersion, Prompt, SamplingParams
from protocol_model.environment import Model
from protocol_model.states import ENDED, NONE, RUNNING, UNBORN, Bounds, Effect, Event, State

PARAMS = SamplingParams(1.0, 4, frozenset())
EARLIER, ATTEMPT = 1, 2  # numbers of staging attempts
GIVEN_UP = ("aborted", "the client gave it up")


def version(number: int) -> PolicyVersion | None:
    return None if number == NONE else PolicyVersion(number, f"digest{number}")


def number(policy: PolicyVersion | None) -> int:
    return NONE if policy is None else policy.number


def sure(policy: PolicyVersion | None) -> PolicyVersion:
    assert policy is not None
    return policy


def name(r: int) -> str:
    return f"r{r}"


def index(name: str) -> int:
    return int(name[1:])


def rollout_request(bounds: Bounds, i: int, minimum: int) -> RolloutRequest:
    group = f"g{bounds.groups[i]}"
    return RolloutRequest(Prompt(f"q{i}", "", (1,)), (i,), PARAMS, group, minimum, stream=i in bounds.streams)


def made_from(bounds: Bounds, s: State, kind: type[Protocol] = Protocol) -> Protocol:
    """A protocol that believes what the state's coordinator does."""
    protocol = kind(update=bounds.update)  # type: ignore[arg-type]
    protocol.attempts = ATTEMPT
    for r, replica in enumerate(s.replicas):
        made = ReplicaState(name(r), bounds.capacity, bounds.shards, version(replica.active), alive=replica.alive)
        if replica.staged != NONE:
            verified = {shard for shard in range(bounds.shards) if replica.verified & 1 << shard}
            made.staged = Staged(sure(version(replica.staged)), ATTEMPT, verified)
        if replica.flipping:
            made.flipping, made.update = made.staged.policy, protocol.update  # type: ignore[union-attr]
        made.installing, made.older = replica.installing, version(replica.older)
        made.out = "nobody knows what it serves" if replica.out else None
        protocol.replicas[name(r)] = made
    for i, q in enumerate(s.requests):
        if q.status in (UNBORN, ENDED):
            continue
        state = RequestState(rollout_request(bounds, i, q.minimum), i)
        if q.status == RUNNING:
            state.replica, state.version = name(q.at), version(q.version)
            protocol.replicas[name(q.at)].running[f"q{i}"] = sure(state.version)
        state.stopping, state.again, state.losses = GIVEN_UP if q.stopping else None, q.again, q.losses  # type: ignore[assignment]
        protocol.requests[f"q{i}"] = state
        group = s.groups[bounds.groups[i]]
        pin = protocol.pins.setdefault(state.request.pin, Pin(version(group.policy), set(), group.settled))
        pin.open.add(f"q{i}")
    return protocol


def belief_of(bounds: Bounds, protocol: Protocol) -> dict[str, Any]:
    """What the code believes. Nothing is said of a lost replica but that it is lost."""
    replicas: dict[str, Any] = {name(r): "lost" for r in range(bounds.replicas)}
    for key, r in protocol.replicas.items():
        if r.alive:
            staged = (number(r.staged.policy), frozenset(r.staged.verified)) if r.staged is not None else None
            running = frozenset((i, number(v)) for i, v in r.running.items())
            flags = (number(r.flipping), r.installing, r.out is not None, number(r.older))
            replicas[key] = (number(r.active), staged, *flags, running)
    requests = {
        key: (q.replica, number(q.version), q.stopping is not None, q.again, q.losses, q.request.min_version)
        for key, q in protocol.requests.items()
    }
    pins = {key: (number(pin.policy), pin.settled, frozenset(pin.open)) for key, pin in protocol.pins.items()}
    return {"replicas": replicas, "requests": requests, "pins": pins}


def belief(bounds: Bounds, s: State) -> dict[str, Any]:
    """What the model's coordinator believes, in the same form."""
    replicas: dict[str, Any] = {}
    for r, replica in enumerate(s.replicas):
        staged = None
        if replica.staged != NONE:
            done = frozenset(shard for shard in range(bounds.shards) if replica.verified & 1 << shard)
            staged = (replica.staged, done)
        running = frozenset((f"q{i}", q.version) for i, q in enumerate(s.requests) if q.status == RUNNING and q.at == r)
        flags = (replica.staged if replica.flipping else NONE, replica.installing, replica.out, replica.older)
        replicas[name(r)] = (replica.active, staged, *flags, running) if replica.alive else "lost"
    requests, pins = {}, {}
    for i, q in enumerate(s.requests):
        if q.status not in (UNBORN, ENDED):
            at = name(q.at) if q.status == RUNNING else None
            requests[f"q{i}"] = (at, q.version, q.stopping, q.again, q.losses, q.minimum)
            group = s.groups[bounds.groups[i]]
            _, _, members = pins.get(f"g{bounds.groups[i]}", (NONE, False, frozenset()))
            pins[f"g{bounds.groups[i]}"] = (group.policy, group.settled, members | {f"q{i}"})
    return {"replicas": replicas, "requests": requests, "pins": pins}


def effects_of(effects: list[CodeEffect]) -> list[Effect]:
    found: list[Effect] = []
    for effect in effects:
        if isinstance(effect, Send):
            found.append(("send", index(effect.replica), index(effect.request.id), effect.version.number))
        elif isinstance(effect, Stop):
            found.append(("stop", index(effect.replica), index(effect.request_id)))
        else:
            assert isinstance(effect, End)
            assert bool(effect.reason) == (effect.outcome != "finished"), "a reason for what did not finish"
            found.append(("end", index(effect.request_id), effect.outcome))
    return sorted(found)


def drive(bounds: Bounds, protocol: Protocol, s: State, event: Event) -> tuple[Protocol, list[CodeEffect]]:
    """Tell the protocol what happened in state `s`, as the service does: its state afterwards and what it wants done.
    It is another one after a restart."""
    what, *arguments = event
    policy = sure(version(s.trained))
    if what in ("admit", "cancel"):
        (i,) = arguments
        if what == "admit":
            return protocol, protocol.admit(rollout_request(bounds, i, s.published if i in bounds.fresh else 0))
        return protocol, protocol.cancel(f"q{i}", GIVEN_UP[1])
    if what in ("finished", "cancelled", "refused", "shown", "late"):
        return protocol, _answer(protocol, s, what, *arguments)
    if what == "restart":
        return _restarted(bounds, protocol, s, *arguments)
    if what == "abandon":
        dropped = [r for r, mark in enumerate(s.marks) if mark == "."]
        return protocol, [e for r in dropped for e in protocol.discard(name(r), policy.number)]
    if what in ("begin", "end"):
        return protocol, []
    return protocol, _of_replica(bounds, protocol, s, what, policy, *arguments)


def _answer(protocol: Protocol, s: State, what: str, r: int, i: int) -> list[CodeEffect]:
    if what == "late":
        # Of an earlier incarnation where the replica is there again: the service does not hand it on.
        return [] if s.replicas[r].alive else protocol.finished(name(r), f"q{i}")
    if what == "shown":
        q = s.requests[i]
        assert protocol.shown(name(r), f"q{i}") == (q.status == RUNNING and q.at == r and not q.again)
        return []
    if what == "refused":
        return protocol.refused(name(r), f"q{i}", "it broke")
    return getattr(protocol, what)(name(r), f"q{i}")


def _restarted(bounds: Bounds, protocol: Protocol, s: State, happened: bool) -> tuple[Protocol, list[CodeEffect]]:
    """The journal ends what was open; replicas that go on join with what they serve."""
    new = type(protocol)(update=protocol.update)
    effects: list[CodeEffect] = [
        End(i, "failed", "the server stopped while it was under way") for i in protocol.requests
    ]
    for r, replica in enumerate(s.replicas):
        if replica.alive:
            serves = s.trained if happened and replica.installing else replica.weights[0]
            effects += new.join(name(r), bounds.capacity, bounds.shards, version(serves))
    return new, effects


def _of_replica(
    bounds: Bounds, protocol: Protocol, s: State, what: str, policy: PolicyVersion, r: int, *more: Any
) -> list[CodeEffect]:
    key, weights = name(r), version(s.replicas[r].weights[0])
    if what in ("stage", "restage"):
        attempt = protocol.stage(key, policy)
        if bounds.atomic:
            for shard in range(bounds.shards):
                protocol.verified(key, attempt, shard)
        return []
    if what in ("verified", "verified before"):
        staged = protocol.replicas[key].staged
        assert staged is not None
        protocol.verified(key, staged.attempt if what == "verified" else staged.attempt - 1, *more)
        return []
    if what == "install":
        assert protocol.may_install(key, policy)
        protocol.install(key, policy)
        return []
    if what == "not installed":
        return protocol.serves(key, weights) + protocol.discard(key, policy.number)
    if what == "answer lost":
        protocol.leave_out(key, "nobody knows what it serves")
        return protocol.discard(key, policy.number)
    if what == "give up":
        return protocol.give_up(key, policy) + protocol.discard(key, policy.number)
    if what == "rejoin":
        return protocol.join(key, bounds.capacity, bounds.shards, weights if more[0] else None)
    if what == "crash":
        return protocol.lost(key, "it was killed")
    calls = {
        "evict": lambda: protocol.discard(key, policy.number),
        "flip": lambda: protocol.flip(key, policy),
        "installed": lambda: protocol.serves(key, policy),
        "told": lambda: protocol.serves(key, weights),
    }
    return calls[what]()


class Differs(AssertionError):
    """The code does another thing than the model says."""


def step(model: Model, protocol: Protocol, s: State, event: Event) -> tuple[Protocol, State]:
    """Take one event in both. Returns the protocol and the state of the model that it is in now. Raises Differs."""
    protocol, effects = drive(model.bounds, protocol, s, event)
    protocol.check()
    done, believes = effects_of(effects), belief_of(model.bounds, protocol)
    results = model.after(s, event)
    for wanted, then in results:
        if done == wanted and believes == belief(model.bounds, then):
            return protocol, then
    wanted, then = results[0]
    raise Differs(f"{event} in {s}\ncode:  {done} {believes}\nmodel: {wanted} {belief(model.bounds, then)}")


def same_inside(bounds: Bounds, protocol: Protocol, s: State) -> None:
    """The protocol's state, field by field, is that of one made from the model's state."""

    def inside(protocol: Protocol) -> dict[str, Any]:
        replicas = {key: asdict(r) for key, r in protocol.replicas.items() if r.alive}
        for replica in replicas.values():
            if replica["staged"] is not None:
                del replica["staged"]["attempt"]
            if replica["flipping"] is None:
                del replica["update"]
            if replica["out"] is not None:
                replica["out"] = "nobody knows"
        requests = {key: asdict(q) for key, q in protocol.requests.items()}
        orders = [q.pop("order") for q in requests.values()]
        assert orders == sorted(orders)
        return {"replicas": replicas, "requests": requests, "pins": {k: asdict(p) for k, p in protocol.pins.items()}}

    got, wanted = inside(protocol), inside(made_from(bounds, s))
    if got != wanted:
        raise Differs(f"in {s}\ncode: {got}\nmade: {wanted}")
