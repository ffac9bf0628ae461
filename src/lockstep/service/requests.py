"""What is asked of the rollout service, and what comes back. Imports no jax.

A request is one prompt and a seed per sample. Once it is admitted it *ends* exactly once: finished, aborted, or failed
with a reason. All its samples come from one policy version, on one replica.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from lockstep.types import PolicyVersion, Prompt, SamplingParams, Trajectory

Outcome = Literal["finished", "aborted", "failed"]
UpdatePolicy = Literal["drain", "abort", "dual"]
"""What happens to requests under way when a replica gets a new version. drain: they finish before it flips, new ones
wait or go elsewhere. abort: they are cancelled and start anew, with their seeds, under the new version. dual: they
finish on the old weights while new ones run on the new, both held by one replica."""


@dataclass(frozen=True)
class RolloutRequest:
    """prompt: its id is the request's, unique among those under way, and the group_id of its trajectories. seeds: one
    per sample. group: requests that name one group come from one version (default: the prompt id). min_version: it
    waits for a replica that serves at least this version number (staleness at admission). stream: `Tokens` events are
    wanted. key: the client's idempotency key, for the journal; empty: none. queue_s: seconds it may wait for a replica
    before it fails.
    """

    prompt: Prompt
    seeds: tuple[int, ...]
    params: SamplingParams
    group: str = ""
    min_version: int = 0
    stream: bool = False
    key: str = ""
    queue_s: float = float("inf")

    @property
    def id(self) -> str:
        return self.prompt.id

    @property
    def pin(self) -> str:
        """The group whose version it shares."""
        return self.group or self.prompt.id


# -- what the client of a request hears: any number of Started, Tokens; then one Ended --------------------------------


@dataclass(frozen=True)
class Started:
    """It was sent to a replica, under this version. More than once when it was sent again; then the tokens of before
    are void, unless the version is the same: then they come out the same, and are not repeated."""

    version: PolicyVersion
    replica: str


Top = tuple[tuple[tuple[int, float], ...], ...]


@dataclass(frozen=True)
class Tokens:
    """New tokens of one sample, in order, as sampled. logprobs: float32 values, one per id, as recorded. top: per id
    the likeliest (id, logprob), where the request asks for them and they are known already."""

    index: int
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    top: Top = ()


@dataclass(frozen=True)
class Ended:
    """The end of a request. trajectories: one per sample where finished, what there is of them where aborted, else
    none. reason: why it did not finish. policy: the version it ran under, if it ran."""

    outcome: Outcome
    trajectories: tuple[Trajectory, ...] = ()
    reason: str = ""
    policy: PolicyVersion | None = None


def likeliest(trajectory: Trajectory, first: int = 0) -> Top:
    """`Tokens.top` of a sample's tokens from `first` on."""
    d = trajectory.details
    if d is None or d.top_ids is None or d.top_logprobs is None:
        return ()
    rows = zip(d.top_ids[first:].tolist(), d.top_logprobs[first:].tolist(), strict=True)
    return tuple(tuple(zip(ids, logprobs, strict=True)) for ids, logprobs in rows)


ClientEvent = Started | Tokens | Ended
OnEvent = Callable[[ClientEvent], None]
"""Called from a thread of the service, in order; must be quick and must not raise."""


class Rollouts(Protocol):
    """The rollout role as its users see it: `service.RolloutService` in this process, `client.RemoteRollouts` over
    HTTP."""

    def submit(self, request: RolloutRequest, on_event: OnEvent) -> None:
        """Admit a request. Raises, with nothing admitted: CapacityError, ConfigError or DataError for one that can
        never run; QueueFullError where too many wait; ServiceError where it is closing or no replica is left."""
        ...

    def cancel(self, request_id: str, reason: str) -> None:
        """Abort a request; its `Ended` follows. One that is not (or no more) under way is left alone."""
        ...

    def score(self, sequences: Sequence[Sequence[int]], temperature: float) -> list[tuple[PolicyVersion, list[float]]]:
        """Log-probabilities of given tokens: per sequence the version and [T] floats, the first NaN."""
        ...

    def status(self) -> ServiceStatus: ...


# -- what a replica is to the service ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Progress:
    """Worker event: new tokens of a sample of a streamed request."""

    request_id: str
    tokens: Tokens


@dataclass(frozen=True)
class Finished:
    """Worker event: all samples are there, in order of index."""

    request_id: str
    trajectories: tuple[Trajectory, ...]


@dataclass(frozen=True)
class Cancelled:
    """Worker event: the answer to `cancel`, what was sampled so far with it. Pages are free."""

    request_id: str
    trajectories: tuple[Trajectory, ...] = ()


@dataclass(frozen=True)
class Refused:
    """Worker event: the engine would not take the request, or it broke on it."""

    request_id: str
    reason: str


@dataclass(frozen=True)
class Retired:
    """Worker event: an old version's weights and cache pages were freed. weight_bytes counts only buffers that nobody
    else holds."""

    version: PolicyVersion
    weight_bytes: int
    pages: int


@dataclass(frozen=True)
class Lost:
    """Worker event, its last: the replica is gone and answers nothing any more."""

    reason: str


WorkerEvent = Progress | Finished | Cancelled | Refused | Retired | Lost


class Worker(Protocol):
    """One replica's engine, in a thread or in a process. Calls return at once, what comes of them are events; each
    submitted request has exactly one of Finished, Cancelled, Refused, unless the worker is lost. Commands are carried
    out in order; an install may come by another way, so `barrier` comes before it."""

    name: str
    capacity: int
    """Samples it can run at a time (slots x devices)."""

    def start(self, on_event: Callable[[WorkerEvent], None]) -> None: ...

    def check(self, request: RolloutRequest) -> None:
        """Raise CapacityError or ConfigError for a request that can never run."""
        ...

    def submit(self, request: RolloutRequest) -> None: ...

    def cancel(self, request_id: str) -> None: ...

    def barrier(self, seconds: float) -> None:
        """Return once everything that was submitted so far comes before any install that begins from now on. Raises
        ServiceError if that takes longer than so many seconds."""
        ...

    def status(self) -> EngineStatus: ...

    def close(self) -> None:
        """Stop, with what is under way cancelled."""
        ...


@dataclass(frozen=True)
class EngineStatus:
    """One engine now. versions: policies whose weights it holds, oldest first. running, waiting: samples. pages: (free,
    cached, used, total), of all devices. tokens: completion tokens since the start. tokens_per_s: over the last
    seconds."""

    versions: tuple[PolicyVersion, ...]
    running: int
    waiting: int
    pages: tuple[int, int, int, int]
    tokens: int
    tokens_per_s: float
    counts: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class ReplicaStatus:
    """sync_address: where a trainer's weight sync is taken; sync_transport, sync_folder: by which way its weights must
    come (`sync.choice.Way`)."""

    name: str
    alive: bool
    active: PolicyVersion | None
    staged: PolicyVersion | None
    draining: PolicyVersion | None
    accepting: bool
    requests: int
    engine: EngineStatus | None
    sync_address: str = ""
    sync_transport: str = ""
    sync_folder: str = ""


@dataclass(frozen=True)
class ServiceStatus:
    """published: the newest version that a replica serves. waiting, running: requests. ended: totals by outcome;
    reasons: of those that did not finish, how often. waiting_for: what the oldest waiting request waits for. retired:
    the last versions let go; freed: of all since the start, how many `versions`, `weight_bytes`, `pages`. lost: the
    version published last, where nobody has it any more; until another is published, requests are refused."""

    published: PolicyVersion | None
    paused: bool
    closing: bool
    waiting: int
    running: int
    ended: dict[Outcome, int]
    reasons: dict[str, int]
    redispatched: int
    waiting_for: str
    replicas: tuple[ReplicaStatus, ...]
    retired: tuple[Retired, ...] = ()
    freed: dict[str, int] = field(default_factory=dict)
    lost: PolicyVersion | None = None
    details: dict[str, Any] = field(default_factory=dict)
