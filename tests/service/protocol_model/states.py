"""What a state of the model is, and its bounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

NONE = -1  # no version, no replica
UNBORN, WAITING, RUNNING, ENDED = range(4)
Event = tuple  # (name, *arguments)
Effect = tuple  # ("send", replica, request, version) | ("stop", replica, request) | ("end", request, outcome)


@dataclass(frozen=True)
class Bounds:
    """groups: the group of each request; they are admitted in order, one sample each. fresh: those that want a version
    at least as new as the newest published. streams: those whose tokens are shown as they come. capacity: samples per
    replica. faults, cancels: how often something goes wrong, or a client gives up. losses: replicas that a request may
    take down before it fails. atomic: a whole version is staged and verified in one event."""

    update: str = "drain"
    rolling: bool = False
    replicas: int = 2
    shards: int = 2
    versions: int = 3
    groups: tuple[int, ...] = (0, 0, 1)
    fresh: frozenset[int] = frozenset({2})
    streams: frozenset[int] = frozenset({0})
    capacity: int = 2
    faults: int = 1
    cancels: int = 0
    losses: int = 4
    atomic: bool = False


class Run(NamedTuple):
    """What a worker really does. wrote: the version under which its cache was written."""

    request: int
    wrote: int
    stopped: bool


class Replica(NamedTuple):
    """Believed: up to `older`. True: `here` (shards of this staging attempt that arrived), `weights` (per shard), `old`
    (kept for requests under way), `runs`."""

    alive: bool
    active: int
    staged: int
    verified: int
    flipping: bool
    installing: bool
    out: bool
    older: int
    here: int
    weights: tuple[int, ...]
    old: int
    runs: tuple[Run, ...]


class Request(NamedTuple):
    """Believed: up to `minimum`. True: `ends` (how often the client heard of an end), `outcome`, `computed` (of what it
    was given, the version that computed it)."""

    status: int = UNBORN
    at: int = NONE
    version: int = NONE
    stopping: bool = False
    again: bool = False
    losses: int = 0
    minimum: int = NONE
    shown: bool = False
    ends: int = 0
    outcome: str = ""
    computed: int = NONE


class Group(NamedTuple):
    """Believed: policy, settled. True: seen, the versions (bits) of what clients were given while it was open."""

    policy: int = NONE
    settled: bool = False
    seen: int = 0


class State(NamedTuple):
    """phase of the publish: "", "stage", "flip"; marks, per replica: "." to do, "f" serves it, "x" does not, "?" nobody
    knows. trained: the trainer's version. published: the newest that a replica was known to serve. wire: at most one
    answer (replica, request, version) of a replica that is no more."""

    replicas: tuple[Replica, ...]
    requests: tuple[Request, ...]
    groups: tuple[Group, ...]
    phase: str
    marks: str
    trained: int
    published: int
    faults: int
    cancels: int
    wire: tuple[int, ...]


class Draft:
    """A state while it is changed, and the effects so far."""

    def __init__(self, state: State) -> None:
        self.replicas, self.requests, self.groups = list(state.replicas), list(state.requests), list(state.groups)
        self.phase, self.marks, self.trained, self.published = state.phase, state.marks, state.trained, state.published
        self.faults, self.cancels, self.wire = state.faults, state.cancels, state.wire
        self.effects: list[Effect] = []

    def copy(self) -> Draft:
        twin = Draft(self.state())
        twin.effects = list(self.effects)
        return twin

    def state(self) -> State:
        return State(
            tuple(self.replicas),
            tuple(self.requests),
            tuple(self.groups),
            self.phase,
            self.marks,
            self.trained,
            self.published,
            self.faults,
            self.cancels,
            self.wire,
        )

    def replica(self, r: int, **changes: object) -> None:
        self.replicas[r] = self.replicas[r]._replace(**changes)

    def request(self, i: int, **changes: object) -> None:
        self.requests[i] = self.requests[i]._replace(**changes)

    def mark(self, r: int, mark: str) -> None:
        if self.marks:
            self.marks = self.marks[:r] + mark + self.marks[r + 1 :]
