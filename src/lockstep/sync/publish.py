"""Two-phase publish: every replica stages and verifies a version, then all flip; or none does.

    publisher = Publisher([replica_a, replica_b], on_failure="abort")
    publisher.publish(offer, Deadline.after(60))

Replicas live in this process (`LocalReplica`) or in another one (`remote.RemoteReplica`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from lockstep.sync.plan import SyncPlan
from lockstep.sync.transport import Deadline, LinkBytes
from lockstep.types import PolicyVersion


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
