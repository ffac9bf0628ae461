"""The service's protocol as a model, explored exhaustively, and the code held to it.

The whole product at the full bounds (2 replicas x 2 shards, 3 versions, 3 requests of which two are a group, one fault)
is `slow`. What runs every time are its overlapping parts: staging with all its faults and one request; groups, routing
and flips with a version staged in one event.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from protocol_model.code_faults import CODE_FAULTS
from protocol_model.conformance import belief, belief_of, made_from, same_inside, step
from protocol_model.environment import Model
from protocol_model.explore import Explored, Violation, canonical, explore
from protocol_model.faults import PLANTED
from protocol_model.invariants import INVARIANTS
from protocol_model.refusals import check_refusals
from protocol_model.states import Bounds, State

from lockstep.service import protocol as code
from lockstep.service.protocol import Protocol

POLICIES = ("drain", "abort", "dual")
STAGING = Bounds(groups=(0,), fresh=frozenset(), faults=2, versions=2)
STAGING_3 = Bounds(groups=(0,), fresh=frozenset(), faults=1)
GROUPS = Bounds(shards=1, atomic=True, versions=2, faults=1)
GROUP_OF_FRESH = Bounds(shards=1, atomic=True, versions=2, groups=(0, 0), fresh=frozenset({1}), cancels=1, faults=1)
VERSIONS = Bounds(shards=1, atomic=True, groups=(0, 1), fresh=frozenset({1}), streams=frozenset(), faults=1)
QUEUE = Bounds(
    shards=1, atomic=True, versions=2, capacity=1, groups=(0, 1, 0), fresh=frozenset({1}), faults=0, cancels=1
)
PARTS = {
    "staging": STAGING,
    "staging-3": STAGING_3,
    "groups": GROUPS,
    "fresh": GROUP_OF_FRESH,
    "versions": VERSIONS,
    "queue": QUEUE,
}
FULL = Bounds()
MORE = {
    "staging": Bounds(groups=(0,), fresh=frozenset(), faults=3, cancels=1),
    "groups": Bounds(shards=1, atomic=True, versions=2, faults=2, cancels=1),
    "versions": Bounds(shards=1, atomic=True, versions=3, faults=2, groups=(0, 1), fresh=frozenset({1}), cancels=1),
    "one-replica": Bounds(replicas=1, faults=2, cancels=1),
    "losses": Bounds(shards=1, atomic=True, versions=2, groups=(0, 0), fresh=frozenset(), faults=3, losses=2),
}


def told(bounds: Bounds, found: Explored) -> None:
    print(f"{bounds}: {found.states} states, {found.edges} edges, longest fair run {found.longest}")


@pytest.mark.parametrize("update", POLICIES)
@pytest.mark.parametrize("part", PARTS)
def test_invariants_hold_in_every_state_and_a_publish_ends(part: str, update: str) -> None:
    bounds = replace(PARTS[part], update=update, rolling=part == "groups")
    found = explore(Model(bounds))
    told(bounds, found)
    assert found.states > 500


def test_every_kind_of_event_is_explored() -> None:
    """Otherwise a state that nothing reaches would hold anything."""
    taken = set(explore(Model(replace(STAGING, update="abort", faults=1, cancels=1))).events)
    kinds = {name.removeprefix("on_").replace("_", " ") for name in dir(Model) if name.startswith("on_")}
    assert taken == kinds


@pytest.mark.slow
@pytest.mark.parametrize("rolling", [False, True], ids=["at-once", "rolling"])
@pytest.mark.parametrize("update", POLICIES)
def test_full_bounds(update: str, rolling: bool) -> None:
    bounds = replace(FULL, update=update, rolling=rolling)
    told(bounds, explore(Model(bounds)))


@pytest.mark.slow
@pytest.mark.parametrize("update", POLICIES)
@pytest.mark.parametrize("part", MORE)
def test_more_faults(part: str, update: str) -> None:
    bounds = replace(MORE[part], update=update)
    told(bounds, explore(Model(bounds)))


@pytest.mark.parametrize("fault", PLANTED, ids=lambda fault: fault.__name__)
def test_planted_faults_of_the_model_are_found(fault: type[Model]) -> None:
    for bounds in (QUEUE, replace(STAGING, faults=1), VERSIONS):
        for update in POLICIES:
            try:
                explore(fault(replace(bounds, update=update)))
            except Violation as violation:
                assert violation.what in PLANTED[fault], violation
                return
    pytest.fail(f"{fault.__name__} broke no invariant")


def states(model: Model) -> Iterator[State]:
    start = canonical(model.initial())
    seen, todo = {start}, deque([start])
    while todo:
        s = todo.popleft()
        yield s
        for event, _ in model.enabled(s):
            for _, result in model.after(s, event):
                then = canonical(result)
                if then not in seen:
                    seen.add(then)
                    todo.append(then)


def conforms(bounds: Bounds, kind: type[Protocol] = Protocol, each: int = 1) -> tuple[int, int]:
    """Every edge, and what is to be refused in one of `each` states; how many. Raises AssertionError."""
    model, edges, refused = Model(bounds), 0, 0
    for count, s in enumerate(states(model)):
        made = made_from(bounds, s, kind)
        assert belief_of(bounds, made) == belief(bounds, s)
        if count % each == 0:
            refused += check_refusals(model, s, kind)
        for event, _ in model.enabled(s):
            step(model, made_from(bounds, s, kind), s, event)
            edges += 1
    return edges, refused


@pytest.fixture
def few_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code, "MAX_LOSSES", 2)


CONFORMANCE = {
    "staging": replace(STAGING, faults=1, cancels=1, losses=2),
    "group": replace(GROUP_OF_FRESH, cancels=0, losses=2),
    "versions": replace(VERSIONS, losses=2),
    "queue": QUEUE,
}


@pytest.mark.usefixtures("few_losses")
@pytest.mark.parametrize("update", POLICIES)
@pytest.mark.parametrize(
    "part", [pytest.param(part, marks=[pytest.mark.slow] * (part == "versions")) for part in CONFORMANCE]
)
def test_the_code_does_what_the_model_says(part: str, update: str) -> None:
    edges, refused = conforms(replace(CONFORMANCE[part], update=update), each=32)
    print(f"{part}, {update}: {edges} edges, {refused} calls that must change nothing")
    assert edges > 1000 and refused > 300


@pytest.mark.slow
@pytest.mark.usefixtures("few_losses")
@pytest.mark.parametrize("update", POLICIES)
def test_the_code_does_what_the_model_says_at_full_bounds(update: str) -> None:
    edges, refused = conforms(replace(FULL, update=update, losses=2), each=8)
    print(f"{update}: {edges} edges, {refused} calls that must change nothing")


# What it takes longest to find is looked for by the slow tests.
HIDDEN = {
    "FlipsUnverified", "AnyAttemptCounts", "LosesWork", "TrustsALostAnswer", "RefusesWhatWasGivenUp", "KeepsStaged",
}  # fmt: skip


@pytest.mark.usefixtures("few_losses")
@pytest.mark.parametrize(
    "fault",
    [pytest.param(f, marks=[pytest.mark.slow] * (f.__name__ in HIDDEN)) for f in CODE_FAULTS],
    ids=lambda fault: fault.__name__,
)
def test_planted_faults_of_the_code_are_found(fault: type[Protocol]) -> None:
    parts = [CONFORMANCE[part] for part in ("queue", "staging", "group", "versions")]
    for bounds in [replace(part, update=update) for part in parts for update in POLICIES]:
        try:
            conforms(bounds, fault, each=16)
        except AssertionError:  # it differs, or `Protocol.check` or another assertion of its own fails
            return
    pytest.fail(f"{fault.__name__} was not found")


WALKED = Bounds(
    replicas=3,
    versions=5,
    groups=(0, 1, 0, 2, 1, 0, 3),
    fresh=frozenset({3, 5}),
    streams=frozenset({0, 4}),
    faults=8,
    cancels=3,
    losses=2,
)


@pytest.mark.usefixtures("few_losses")
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), update=st.sampled_from(POLICIES), rolling=st.booleans(), atomic=st.booleans())
def test_long_walks(data: st.DataObject, update: str, rolling: bool, atomic: bool) -> None:
    """One protocol from event to event, at larger bounds: nothing that the model does not see builds up inside."""
    model = Model(replace(WALKED, update=update, rolling=rolling, atomic=atomic))
    random = data.draw(st.randoms(use_true_random=False))
    s = model.initial()
    protocol: Any = made_from(model.bounds, s)
    for _ in range(150):
        events = list(model.enabled(s))
        if not events:
            break
        usual = [event for event, wrong in events if not wrong]
        event = random.choice(usual if usual and random.random() < 0.8 else [event for event, _ in events])
        protocol, s = step(model, protocol, s, event)
        same_inside(model.bounds, protocol, s)
        for invariant in INVARIANTS:
            assert invariant(model, s), invariant.__name__
    check_refusals(model, s)
