"""Two-phase publish: every replica stages and verifies a version, then all flip; or none does.

    publisher = Publisher([replica_a, replica_b], on_failure="abort")
    published = publisher.publish(offer, Deadline.after(60))

Replicas live in this process (`replica.LocalReplica`) or in another one (`remote.RemoteReplica`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Protocol

from lockstep.errors import SyncError
from lockstep.sync.plan import SyncPlan
from lockstep.sync.transport import Deadline, LinkBytes
from lockstep.sync.verify import check_same
from lockstep.types import PolicyVersion

OnFailure = Literal["abort", "evict"]
PATIENCE_S = 5.0  # for calls that only tidy up


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
    target leaf that trains; base_digest: of what does not (`verify.tree_digest`). probe: None where none is configured
    (then the receipt says so)."""

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
        """Drop what is staged for `version`, if anything."""
        ...


@dataclass(frozen=True)
class Published:
    """What came of a publish. reports: of the replicas that serve the version now. evicted: replica -> why it does not,
    of those that were dropped on the way. seconds: `stage` (until the last replica was staged), `flip`."""

    policy: PolicyVersion
    reports: Mapping[str, StageReport]
    evicted: Mapping[str, str]
    seconds: Mapping[str, float]


@dataclass
class _Attempt:
    """One call to one replica, in a thread of its own: a call that hangs must not take the trainer with it."""

    done: threading.Event = field(default_factory=threading.Event)
    result: Any = None
    error: BaseException | None = None

    def start(self, call: Callable[[], Any], name: str) -> _Attempt:
        def body() -> None:
            try:
                self.result = call()
            except BaseException as error:  # handed to whoever waits, whatever it is
                self.error = error
            finally:
                self.done.set()

        threading.Thread(target=body, name=name, daemon=True).start()
        return self


class Publisher:
    """Publishes versions to a fixed set of replicas. source: the sender's name, for errors.

    on_failure, for a replica that fails before anything flipped: `abort` (no replica flips, everything staged is
    discarded) or `evict` (it is dropped, named, and the others flip; one must remain). A replica that fails after
    another one flipped is dropped and named either way: nothing can call the version back. Dropped replicas get
    nothing any more, until `admit`; the publish after that is a full one and repairs them.
    """

    def __init__(self, replicas: Sequence[Replica], *, on_failure: OnFailure = "abort", source: str = "actor") -> None:
        """Raises SyncError without replicas, or for a name twice."""
        if not replicas:
            raise SyncError("sync: there is no replica to publish to")
        names = [replica.name for replica in replicas]
        if len(set(names)) < len(names):
            raise SyncError(
                f"sync: two replicas have one name: {', '.join(sorted(names))}; errors must tell them apart"
            )
        self.replicas: dict[str, Replica] = dict(zip(names, replicas, strict=True))
        self.evicted: dict[str, str] = {}
        self._on_failure = on_failure
        self._source = source

    def admit(self, replica: Replica) -> None:
        """Take a replica (back) in; it serves from the next publish on. Raises SyncError if its name is in use."""
        if replica.name in self.replicas:
            raise SyncError(f"sync: a replica called {replica.name!r} is there already; names must differ")
        self.evicted.pop(replica.name, None)
        self.replicas[replica.name] = replica

    def publish(self, offer: Offer | Mapping[str, Offer], deadline: Deadline) -> Published:
        """Make every replica serve the offered version. offer: one for all, or one per replica where their plans differ
        (then of one and the same policy).

        Raises SyncError, naming replica and reason, with no replica flipped and nothing left staged.
        """
        offers = dict.fromkeys(self.replicas, offer) if isinstance(offer, Offer) else dict(offer)
        lacking = [name for name in self.replicas if name not in offers]
        assert not lacking, f"no offer for {lacking}"
        policies = {offers[name].policy for name in self.replicas}
        assert len(policies) == 1, f"one publish, several versions: {policies}"
        (policy,) = policies
        start = time.perf_counter()
        try:
            reports, failed = self._stage(offers, policy, deadline)
            if failed and (self._on_failure == "abort" or not reports):
                raise self._refused(policy, failed)
            staged = time.perf_counter()
            failed |= self._flip(reports, policy, deadline)
        except BaseException:
            # Whatever happened (an interrupt, too), before the first flip nothing may stay half done.
            for name in list(self.replicas):
                self._discard(name, policy)
            raise
        for name, why in failed.items():
            self._evict(name, why, policy)
        seconds = {"stage": staged - start, "flip": time.perf_counter() - staged}
        return Published(policy, {n: r for n, r in reports.items() if n not in failed}, failed, seconds)

    # -- phase one ---------------------------------------------------------------------------------------------------

    def _stage(
        self, offers: Mapping[str, Offer], policy: PolicyVersion, deadline: Deadline
    ) -> tuple[dict[str, StageReport], dict[str, str]]:
        """(reports of the replicas that have the version staged and verified, name -> what went wrong at the others).
        All stage at the same time."""
        under_way = {
            name: _Attempt().start(partial(replica.stage, offers[name], deadline), f"stage {name}")
            for name, replica in self.replicas.items()
        }
        reports: dict[str, StageReport] = {}
        failed: dict[str, str] = {}
        for name, attempt in under_way.items():
            try:
                report = _wait(attempt, deadline, self._source, f"replica {name!r}", "stage", policy)
                check_report(report, offers[name], self._source, name)
            except Exception as error:
                failed[name] = _say(error)
            else:
                reports[name] = report
        return reports, failed

    def _refused(self, policy: PolicyVersion, failed: Mapping[str, str]) -> SyncError:
        whom = "; ".join(f"replica {name!r}: {why}" for name, why in failed.items())
        return SyncError(
            f"sync: version {policy.number} was not published, {len(failed)} of {len(self.replicas)} replicas failed: "
            f"{whom}. What was staged is discarded, the others serve what they served"
        )

    # -- phase two ---------------------------------------------------------------------------------------------------

    def _flip(self, staged: Mapping[str, StageReport], policy: PolicyVersion, deadline: Deadline) -> dict[str, str]:
        """Name -> why, of the replicas whose flip failed though another one's succeeded. Raises SyncError when none
        has flipped, and none may any more (abort) or can (no replica left)."""
        failed: dict[str, str] = {}
        flipped = False
        for name in staged:
            replica = self.replicas[name]
            before = replica.active
            try:
                self._call(name, "flip", partial(_flip_one, replica, policy, deadline), policy, deadline)
            except Exception as error:
                failed[name] = _say(error)
                if not flipped and self._on_failure == "abort":
                    refused = self._refused(policy, failed)
                    # The failure may have come after the fact: then it cannot be trusted to serve what it served.
                    if len(self.replicas) > 1 and self._active(name, policy) != before:
                        self._evict(name, failed[name], policy)
                    raise refused from error
            else:
                flipped = True
        if not flipped:
            raise self._refused(policy, failed)
        return failed

    def _active(self, name: str, policy: PolicyVersion) -> PolicyVersion | str | None:
        """What the replica serves, or why that cannot be found out."""
        try:
            return self._call(name, "active", lambda: self.replicas[name].active, policy, Deadline.after(PATIENCE_S))
        except Exception as error:
            return _say(error)

    def _evict(self, name: str, why: str, policy: PolicyVersion) -> None:
        self._discard(name, policy)
        del self.replicas[name]
        self.evicted[name] = why

    def _discard(self, name: str, policy: PolicyVersion) -> None:
        try:
            self._call(
                name, "discard", lambda: self.replicas[name].discard(policy.number), policy, Deadline.after(PATIENCE_S)
            )
        except Exception:
            # Of a replica that is gone or stuck: it can only ever serve this version if it is told to flip to it.
            return

    def _call(self, name: str, what: str, call: Callable[[], Any], policy: PolicyVersion, deadline: Deadline) -> Any:
        attempt = _Attempt().start(call, f"{what} {name}")
        return _wait(attempt, deadline, self._source, f"replica {name!r}", what, policy)


def _flip_one(replica: Replica, policy: PolicyVersion, deadline: Deadline) -> None:
    replica.flip(policy, deadline)
    if replica.active != policy:
        raise SyncError(f"sync: it says that it serves {policy}, but serves {replica.active}")


def _wait(attempt: _Attempt, deadline: Deadline, who: str, whom: str, what: str, policy: PolicyVersion) -> Any:
    """The attempt's result. Raises what it raised, or the missed deadline."""
    # A little longer than the replica itself waits: its own error says more than ours.
    if not attempt.done.wait(deadline.remaining() + 0.25):
        raise deadline.missed(who, whom, what, policy.number)
    if attempt.error is not None:
        raise attempt.error
    return attempt.result


def _say(error: Exception) -> str:
    return str(error).removeprefix("sync: ") if isinstance(error, SyncError) else f"{type(error).__name__}: {error}"


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
