"""Two-phase publish: every replica stages and verifies a version, then all flip; or none does.

    publisher = Publisher([replica_a, replica_b], on_failure="abort")
    published = publisher.publish(offer, Deadline.after(60))

Replicas live in this process (`replica.LocalReplica`) or in another one (`remote.RemoteReplica`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol, TypeVar

from lockstep.errors import SyncError
from lockstep.sync.attempts import attempt_all, say
from lockstep.sync.plan import SyncPlan
from lockstep.sync.transport import Deadline, LinkBytes
from lockstep.sync.verify import check_same
from lockstep.types import PolicyVersion

T = TypeVar("T")
OnFailure = Literal["abort", "evict"]
FLIPPING_S = 30.0  # of a deadline, most that is kept from staging for the flips
TIDYING_S = 5.0  # of what is left of it, most that is waited for replicas that failed


@dataclass(frozen=True)
class Probe:
    """Fixed token sequences and what the trainer makes of them. sequences: token ids, each of at least 2. logprobs: per
    sequence, float32 as hex digits of its bytes, of tokens 1.. given those before. exact: whether they must be equal
    bit for bit (exact numerics on both sides); else within `bound` (nats)."""

    sequences: Sequence[Sequence[int]]
    logprobs: Sequence[str]
    exact: bool
    bound: float = 0.0


@dataclass(frozen=True)
class Offer:
    """A version on offer. policy: its number and digest. plan: agreed by both sides. digests: the sender's, of every
    target leaf that trains; base_digest: of what does not (`verify.tree_digest`; empty when all trains). probe: None
    where none is configured (then the receipt says so)."""

    policy: PolicyVersion
    plan: SyncPlan
    digests: Mapping[str, str]
    base_digest: str
    probe: Probe | None


@dataclass(frozen=True)
class StageReport:
    """What one replica says after staging. digests: computed there, from the arrays that would be served. probed: how
    many sequences were checked. seconds: `transfer`, `verify`, `probe`."""

    replica: str
    digests: Mapping[str, str]
    link_bytes: LinkBytes
    bytes_written: int
    probed: int
    seconds: Mapping[str, float]


Stage = Callable[[Offer, Deadline], StageReport]


class Replica(Protocol):
    """One holder of a copy of the policy. `stage` never touches what is served; `flip` only swaps references."""

    name: str

    @property
    def active(self) -> PolicyVersion | None:
        """The version being served; None before the first flip."""
        ...

    def stage(self, offer: Offer, deadline: Deadline) -> StageReport:
        """Receive, digest, probe. Raises SyncError with nothing changed but a note that this stage failed."""
        ...

    def flip(self, policy: PolicyVersion, deadline: Deadline) -> None:
        """Serve the staged version. Raises SyncError unless exactly this version is staged and verified."""
        ...

    def discard(self, version: int) -> None:
        """Drop what is staged for `version`, or being staged, if anything. When it returns, no flip to the version is
        under way, and none that is asked for from then on can succeed before another `stage`."""
        ...


@dataclass(frozen=True)
class Published:
    """What came of a publish. reports: of the replicas that serve the version now. evicted: replica -> why it does not,
    of those that were dropped on the way. seconds: `stage` (until the last replica was staged), `flip`."""

    policy: PolicyVersion
    reports: Mapping[str, StageReport]
    evicted: Mapping[str, str]
    seconds: Mapping[str, float]


class Publisher:
    """Publishes versions to a set of replicas. source: the sender's name, for errors.

    on_failure, for a replica that fails before anything flipped: `abort` (no replica flips, everything staged is
    discarded) or `evict` (it is dropped, named, and the others flip; one must remain). A replica that fails after
    another one flipped is dropped and named either way: nothing can call the version back, and nothing raises any more.
    Dropped replicas get nothing until `admit`; the publish after that is a full one and repairs them.

    in_doubt: a version that was not published though some replica may serve it: its flip was asked for, and what came
    of it could not be found out. Its number must not be used for other content. None mostly.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        *,
        on_failure: OnFailure = "abort",
        source: str = "actor",
        keepers: Collection[str] = (),
        drain_s: float = 0.0,
    ) -> None:
        """drain_s: of every deadline, what is kept from staging because a replica may finish requests before it flips.
        keepers: names of replicas that only keep versions for others; they are never the one that must remain,
        unless there are no others. Raises SyncError without replicas, or for a name twice."""
        if not replicas:
            raise SyncError("sync: there is no replica to publish to")
        names = [replica.name for replica in replicas]
        if len(set(names)) < len(names):
            raise SyncError(
                f"sync: two replicas have one name: {', '.join(sorted(names))}; errors must tell them apart"
            )
        self.replicas: dict[str, Replica] = dict(zip(names, replicas, strict=True))
        self.evicted: dict[str, str] = {}
        self.in_doubt: PolicyVersion | None = None
        self._keepers = set(keepers)
        self._on_failure = on_failure
        self._source, self._drain_s = source, drain_s

    def admit(self, replica: Replica, *, keeps: bool = False) -> None:
        """Take a replica (back) in; it serves (keeps: only keeps) versions from the next publish on. Raises SyncError
        if its name is in use."""
        if replica.name in self.replicas:
            raise SyncError(f"sync: a replica called {replica.name!r} is there already; names must differ")
        self.evicted.pop(replica.name, None)
        self.replicas[replica.name] = replica
        (self._keepers.add if keeps else self._keepers.discard)(replica.name)

    def each(
        self,
        what: str,
        calls: Mapping[str, Callable[[], T]],
        version: int,
        deadline: Deadline,
        failed: dict[str, str],
    ) -> dict[str, T]:
        """One call per replica, all at the same time; what they return. Those that fail come to `failed` (name -> why).

        Raises SyncError when one has failed (abort), or none is left (evict).
        """
        results, errors = attempt_all(calls, what, version, deadline, self._source)
        failed |= {name: say(error) for name, error in errors.items()}
        if failed and (self._on_failure == "abort" or not self._serving(results)):
            raise self._refused(version, failed) from next(iter(errors.values()), None)
        return results

    def publish(
        self,
        offer: Offer | Mapping[str, Offer],
        deadline: Deadline,
        *,
        stages: Mapping[str, Stage] | None = None,
        failed: Mapping[str, str] | None = None,
        before_flip: Callable[[PolicyVersion], None] | None = None,
    ) -> Published:
        """Make every replica serve the offered version. offer: one for all, or one per replica where their plans differ
        (then of one and the same policy). stages: what to call instead of a replica's own `stage`. failed: those that
        have failed on the way here, which are not asked any more. before_flip: called between the two phases.

        All of it, tidying included, takes no longer than the deadline: of what is left, a part is kept for the flips
        and for finding out what became of them. Raises SyncError, naming replica and reason, with no replica flipped
        and nothing left staged; `in_doubt` is set where that could not be made sure of.
        """
        failed = dict(failed or {})
        names = [name for name in self.replicas if name not in failed]
        offers = dict.fromkeys(names, offer) if isinstance(offer, Offer) else dict(offer)
        lacking = [name for name in names if name not in offers]
        assert not lacking, f"no offer for {lacking}"
        policies = {offers[name].policy for name in names}
        assert len(policies) == 1, f"one publish, several versions: {policies}"
        (policy,) = policies
        start, left = time.perf_counter(), max(0.0, deadline.remaining() - self._drain_s)
        kept = min(FLIPPING_S, left / 4)
        staging, flipping = deadline.sooner(kept + self._drain_s), deadline.sooner(kept / 2)
        calls = stages or {name: self.replicas[name].stage for name in names}
        try:
            reports = self.each(
                "stage",
                {name: partial(self._stage, name, calls[name], offers[name], staging) for name in names},
                policy.number,
                staging,
                failed,
            )
            staged = time.perf_counter()
            if before_flip is not None:
                before_flip(policy)
            self._flip(reports, policy, failed, flipping, deadline)
        except BaseException:
            # Whatever happened (an interrupt, too), before the first flip nothing may stay half done.
            self._discard(self.replicas, policy, deadline)
            raise
        self._discard(failed, policy, deadline)
        for name, why in failed.items():
            self._drop(name, why)
        seconds = {"stage": staged - start, "flip": time.perf_counter() - staged}
        return Published(policy, {n: r for n, r in reports.items() if n not in failed}, failed, seconds)

    def _serving(self, names: Iterable[str]) -> list[str]:
        """Of these, those that count: keepers do not, unless they are all there is."""
        only_keepers = self._keepers.issuperset(self.replicas)
        return [name for name in names if only_keepers or name not in self._keepers]

    def _stage(self, name: str, stage: Stage, offer: Offer, deadline: Deadline) -> StageReport:
        report = stage(offer, deadline)
        check_report(report, offer, self._source, name)
        return report

    def _refused(self, version: int, failed: Mapping[str, str]) -> SyncError:
        whom = "; ".join(f"replica {name!r}: {why}" for name, why in failed.items())
        return SyncError(
            f"sync: version {version} was not published, {len(failed)} of {len(self.replicas)} replicas failed: "
            f"{whom}. What was staged is discarded, the others serve what they served"
        )

    # -- phase two ---------------------------------------------------------------------------------------------------

    def _flip(
        self,
        staged: Mapping[str, StageReport],
        policy: PolicyVersion,
        failed: dict[str, str],
        flipping: Deadline,
        deadline: Deadline,
    ) -> None:
        """Flip all, adding those that do not to `failed`. Raises SyncError when none has flipped, and none may any more
        (abort) or can (no replica left).

        Under abort the first one goes alone: while nothing has flipped, its failure still stops the others. Keepers
        come last, when it is certain that the version is published.
        """
        names = sorted(staged, key=lambda name: name in self._keepers)
        first = names[:1] if self._on_failure == "abort" else self._serving(names)
        before, self.in_doubt = self.in_doubt, policy
        done, doubted = self._flip_some(first, policy, failed, flipping, deadline)
        if not self._serving(done):
            if not doubted:
                self.in_doubt = before
            refused = self._refused(policy.number, failed)
            for name in doubted:
                # It cannot be trusted to serve what it served, unless there is nobody else to serve at all.
                refused.add_note(f"nobody knows whether {name} serves version {policy.number} now")
                if len(self.replicas) > 1:
                    self._drop(name, failed[name])
            raise refused
        self.in_doubt = None
        self._flip_some(names[len(first) :], policy, failed, flipping, deadline)

    def _flip_some(
        self,
        names: Sequence[str],
        policy: PolicyVersion,
        failed: dict[str, str],
        flipping: Deadline,
        deadline: Deadline,
    ) -> tuple[list[str], list[str]]:
        """(those that serve the version now, those of which nobody knows); all but the former come to `failed`."""
        calls = {name: partial(_flip_one, self.replicas[name], policy, flipping) for name in names}
        _, errors = attempt_all(calls, "flip", policy.number, flipping, self._source)
        failed |= {name: say(error) for name, error in errors.items()}
        asked = {name: partial(_settle, self.replicas[name], policy) for name in errors}
        serves, unknown = attempt_all(asked, "settle", policy.number, deadline.at_most(TIDYING_S), self._source)
        # Where only the answer got lost, all is well: this is the version that was staged and verified there.
        late = [name for name, active in serves.items() if active == policy]
        for name in late:
            del failed[name]
        return [name for name in names if name not in errors] + late, list(unknown)

    def _drop(self, name: str, why: str) -> None:
        del self.replicas[name]
        self.evicted[name] = why

    def _discard(self, names: Iterable[str], policy: PolicyVersion, deadline: Deadline) -> None:
        """What cannot be told of it can only ever serve this version if it is told to flip to it."""
        calls = {name: partial(self.replicas[name].discard, policy.number) for name in names if name in self.replicas}
        attempt_all(calls, "discard", policy.number, deadline.at_most(TIDYING_S), self._source)


def _flip_one(replica: Replica, policy: PolicyVersion, deadline: Deadline) -> None:
    replica.flip(policy, deadline)
    active = replica.active
    if active != policy:
        raise SyncError(f"sync: it says that it serves {policy}, but serves {active}")


def _settle(replica: Replica, policy: PolicyVersion) -> PolicyVersion | None:
    """What a replica serves whose flip failed, once that cannot change any more."""
    replica.discard(policy.number)  # waits for a flip that is under way, and makes one that is to come fail
    return replica.active


def check_report(report: StageReport, offer: Offer, source: str, replica: str) -> None:
    """Raise SyncError unless a replica staged just what was offered: every digest the sender's, the bytes on every link
    and in every buffer the plan's, every probe sequence checked."""
    check_same(offer.digests, report.digests, source, replica)
    planned = planned_links(offer.plan)
    measured = {link: size for link, size in report.link_bytes.items() if size}
    if measured != planned:
        wrong = sorted(link for link in planned.keys() | measured.keys() if planned.get(link) != measured.get(link))
        shown = "; ".join(
            f"{a} -> {b}: {planned.get((a, b), 0)} planned, {measured.get((a, b), 0)} moved" for a, b in wrong[:3]
        )
        raise SyncError(f"sync: other bytes moved to {replica} than planned, on {len(wrong)} links: {shown}")
    if report.bytes_written != offer.plan.bytes_written:
        raise SyncError(
            f"sync: {report.bytes_written} bytes were written at {replica} where {offer.plan.bytes_written} were "
            f"planned: the transport copies or reuses buffers that it should not"
        )
    wanted = len(offer.probe.sequences) if offer.probe is not None else 0
    if report.probed != wanted:
        raise SyncError(f"sync: {replica} checked {report.probed} of {wanted} probe sequences")


def planned_links(plan: SyncPlan) -> dict[tuple[int, int], int]:
    """(sender, receiver) -> bytes, of the links that the plan uses."""
    return {
        (plan.devices[a], plan.devices[b]): int(plan.links[a, b]) for a, b in zip(*plan.links.nonzero(), strict=True)
    }
