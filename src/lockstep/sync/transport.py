"""What every way of moving a version's weights offers: `send` at the trainer, `receive` at the sampler.

A transport carries out a plan and decides nothing. It says what it moved, link by link, so that the plan can be held
against it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import jax
from jax.sharding import Sharding

from lockstep.errors import SyncError
from lockstep.sync.plan import SyncPlan

LinkBytes = Mapping[tuple[int, int], int]
"""(sender, receiver), by the plan's device numbers -> bytes that went over this link. Local copies are not listed."""


@dataclass(frozen=True)
class Deadline:
    """Until when somebody waits for somebody. started, ends: of `time.monotonic()`."""

    started: float
    ends: float

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        """From now on. Raises SyncError unless `seconds` is above 0."""
        if not seconds > 0:
            raise SyncError(f"a deadline must be above 0 seconds; got {seconds!r}")
        now = time.monotonic()
        return cls(now, now + seconds)

    def remaining(self) -> float:
        """Seconds left, at least 0."""
        return max(0.0, self.ends - time.monotonic())

    def sooner(self, seconds: float) -> Deadline:
        """One that ends so much earlier, for a part of the work."""
        return Deadline(self.started, self.ends - seconds)

    def at_most(self, seconds: float) -> Deadline:
        """This one, or so many seconds from now if that is sooner."""
        now = time.monotonic()
        return Deadline(now, now + seconds) if now + seconds < self.ends else self

    def missed(self, who: str, whom: str, what: str, version: int) -> SyncError:
        """The error to raise when it has passed: who waited for whom, for what, since when, at which version."""
        waited = time.monotonic() - self.started
        return SyncError(
            f"sync: {who} waited {waited:.1f} s for {whom} ({what}, version {version}); the deadline was "
            f"{self.ends - self.started:.1f} s. Nothing was published"
        )


@dataclass(frozen=True)
class Stored:
    """What a sender left in a store. kind: `full`, `delta`, or `kept` (the very version was there already). bytes: that
    it wrote; full_bytes: of the whole leaves. density: fraction of the elements that changed since the last published
    version; None where the two were not compared. base: the version that a delta starts from. why: this kind and no
    other; empty where there was no choice."""

    kind: Literal["full", "delta", "kept"]
    bytes: int
    full_bytes: int
    density: float | None = None
    base: str | None = None
    why: str = ""


@dataclass(frozen=True)
class Sent:
    """What the sending side did. link_bytes: what it put on each link (empty when the receiver does the moving).
    stored: what it left in a store, where it has one."""

    link_bytes: LinkBytes
    seconds: float
    stored: Stored | None = None


@dataclass(frozen=True)
class Staged:
    """What has arrived, beside what is installed. tree: target path -> array, on its destination sharding; leaves that
    are in place stand on the source's buffers. link_bytes: measured. seconds: until all had arrived."""

    tree: dict[str, jax.Array]
    link_bytes: LinkBytes
    seconds: float


class Transport(Protocol):
    """One way from the trainer's arrays to the sampler's.

    numbers: this side's devices by the plan's device numbers. Both sides must use the same plan (its hash is compared).
    A failure leaves nothing behind that another `receive` could take for complete, and raises SyncError.
    """

    name: str

    def send(
        self,
        version: int,
        plan: SyncPlan,
        source: Mapping[str, jax.Array],
        numbers: Mapping[int, jax.Device],
        deadline: Deadline,
        digest: str = "",
    ) -> Sent:
        """Make the version's weights available to the receiver. `source` must stay unchanged until `release`. digest:
        of the policy, for transports that leave something which outlives the sync."""
        ...

    def receive(
        self,
        version: int,
        plan: SyncPlan,
        destination: Mapping[str, Sharding],
        numbers: Mapping[int, jax.Device],
        deadline: Deadline,
    ) -> Staged:
        """Bring them here, into buffers of their own (or the source's, where the plan says in place); wait for all."""
        ...

    def forget(self) -> None:
        """The receiver may have lost what it had: the next `send` must not build on it."""
        ...

    def release(self, version: int, published: bool) -> None:
        """Free what `send` holds for this version, whether or not it was received. published: whether a replica serves
        it now; where not, what could outlive the sync is withdrawn too. Called once per push, also when `send` failed
        or never came; twice is harmless."""
        ...
