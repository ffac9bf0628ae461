"""What holds in every reachable state, as the design has it (I1 to I8), and what the protocol adds to it.

Each function returns whether it holds. They look at what is true, not at what the coordinator believes, except where
the belief is what they are about.
"""

from __future__ import annotations

from collections.abc import Callable

from protocol_model.environment import Model
from protocol_model.states import ENDED, NONE, RUNNING, UNBORN, WAITING, State

Invariant = Callable[[Model, State], bool]


def i1_one_version_in_a_pass(model: Model, s: State) -> bool:
    """I1: no forward pass mixes shards of two versions."""
    return all(len(set(r.weights)) == 1 for r in s.replicas if r.alive)


def i2_a_version_is_who_computed(model: Model, s: State) -> bool:
    """I2: a token's version is the one that computed its log-probability."""
    running = all(
        model.computes(s.replicas[q.at], i) == q.version
        for i, q in enumerate(s.requests)
        if q.status == RUNNING and any(run.request == i for run in s.replicas[q.at].runs)
    )
    return running and all(q.computed == q.version for q in s.requests if q.outcome == "finished")


def i3_cache_read_under_its_version(model: Model, s: State) -> bool:
    """I3: KV is read only under the version that wrote it."""
    return all(model.computes(r, run.request) == run.wrote for r in s.replicas for run in r.runs)


def i4_flip_needs_every_shard(model: Model, s: State) -> bool:
    """I4: a flip needs every shard's stage complete and verified."""
    return all(r.here == model.whole and r.staged == s.trained for r in s.replicas if r.flipping)


def i5_staged_is_not_active(model: Model, s: State) -> bool:
    """I5: a staged buffer is never the active one: it is empty once it was installed, and while it is being installed
    nothing is written to it."""
    return all(
        (r.staged == NONE or r.staged != r.active) and (not r.installing or r.here == model.whole)
        for r in s.replicas
        if not r.out
    )


def i6_as_new_as_asked_for(model: Model, s: State) -> bool:
    """I6: a trajectory is not older than what its request bounds its staleness by."""
    given = [q.computed for q in s.requests if q.outcome == "finished"]
    asked = [q.minimum for q in s.requests if q.outcome == "finished"]
    return all(c >= m for c, m in zip(given, asked, strict=True)) and all(
        q.version >= q.minimum for q in s.requests if q.status == RUNNING
    )


def i7_ends_exactly_once(model: Model, s: State) -> bool:
    """I7: every admitted request is answered exactly once or reported with a reason; until then somebody has it."""
    for i, q in enumerate(s.requests):
        if q.ends != (q.status == ENDED) or (q.status == ENDED) != bool(q.outcome):
            return False
        if q.status == RUNNING and not any(run.request == i for run in s.replicas[q.at].runs):
            return False  # nobody will ever answer
    return True


def i8_not_changed_in_transfer(model: Model, s: State) -> bool:
    """I8: weights are not mutated while a transfer at their version is in flight."""
    return all(r.staged == s.trained and s.phase for r in s.replicas if r.alive and r.staged != NONE)


def one_version_in_a_group(model: Model, s: State) -> bool:
    """Of a group, all that clients were given and all that runs is of one version, as long as one request is open."""
    for g, group in enumerate(s.groups):
        seen = group.seen
        for i, q in enumerate(s.requests):
            if model.bounds.groups[i] == g and q.status == RUNNING:
                seen |= 1 << q.version
        if seen & (seen - 1):
            return False
    return True


def two_versions_at_most(model: Model, s: State) -> bool:
    """A replica holds one version, under dual one older besides, as long as a request needs it."""
    for r in s.replicas:
        if r.old != NONE and (model.bounds.update != "dual" or all(run.wrote != r.old for run in r.runs)):
            return False
    return True


def waiting_is_nowhere(model: Model, s: State) -> bool:
    """What waits, or is over, runs nowhere; what runs runs once; nothing runs on a replica beyond its capacity."""
    runs = [run.request for r in s.replicas for run in r.runs]
    return (
        len(runs) == len(set(runs))
        and all(s.requests[i].status == RUNNING for i in runs)
        and all(len(r.runs) <= model.bounds.capacity for r in s.replicas)
    )


INVARIANTS: tuple[Invariant, ...] = (
    i1_one_version_in_a_pass,
    i2_a_version_is_who_computed,
    i3_cache_read_under_its_version,
    i4_flip_needs_every_shard,
    i5_staged_is_not_active,
    i6_as_new_as_asked_for,
    i7_ends_exactly_once,
    i8_not_changed_in_transfer,
    one_version_in_a_group,
    two_versions_at_most,
    waiting_is_nowhere,
)


def is_over(model: Model, s: State) -> bool:
    """A good end: no publish under way, no replica in doubt, and every request admitted and ended, but for those that
    wait for a version that nobody serves and nobody will publish any more."""
    if s.phase or any((r.out and r.active != NONE) or r.flipping or not r.alive for r in s.replicas):
        return False
    for q in s.requests:
        if q.status in (UNBORN, RUNNING):
            return False
        if q.status == WAITING:
            satisfied = any(r.active >= max(q.minimum, 0) for r in s.replicas)
            if satisfied or s.trained < model.bounds.versions - 1:
                return False
    return True
