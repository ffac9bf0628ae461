"""What a sync did, as one line, and the three numbers that are easily taken for one. Imports no jax."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from lockstep.types import PolicyVersion


@dataclass(frozen=True)
class SyncReceipt:
    """What one sync did. Bytes count replicas, except bytes_selected; seconds are wall-clock.

    version, digest: the published policy (digest over base and trainable weights, as the source holds them). plan: its
    hash (several, joined by `+`, where replicas differ). transport, replicas: how, and who serves the version now.
    evicted: replica -> why it does not. syncs: how many syncs of this object moved bytes so far, this one included.
    bytes_selected: of the trainable leaves, once. bytes_planned and bytes_moved: written into new destination buffers,
    as planned and as read off the buffers afterwards. bytes_crossing: what went over links, measured; num_links, links:
    over how many, and (sender, receiver, bytes) of the busiest. same_buffers: every destination leaf is the source's
    buffer, so nothing ran. seconds: `select`, `map` (map and plan), `stage`, `transfer`, `verify`, `probe` (where there
    was one), `flip`. tree_digest: of what the first replica staged; leaf_digests: the same leaf by leaf. probed:
    sequences that were checked. stored: replica -> what its transport left in a store (`transport.Stored`: kind, bytes,
    full_bytes, density, base, why). density: the first one's that compared the version with the last; None where none
    did. A replica that only keeps versions counts in `stored`, `transport` and `evicted`, and in nothing else.
    unreleased: replica -> why, of those whose transport failed to let go of the version afterwards.
    """

    version: int
    digest: str
    plan: str
    source: str
    destination: str
    source_layout: str
    destination_layout: str
    transport: str
    replicas: tuple[str, ...]
    evicted: Mapping[str, str]
    syncs: int
    leaves: int
    bytes_selected: int
    bytes_planned: int
    bytes_moved: int
    bytes_crossing: int
    num_links: int
    links: tuple[tuple[int, int, int], ...]
    same_buffers: bool
    seconds: Mapping[str, float]
    tree_digest: str
    leaf_digests: Mapping[str, str]
    probed: int
    density: float | None = None
    stored: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    unreleased: Mapping[str, str] = field(default_factory=dict)

    @property
    def policy(self) -> PolicyVersion:
        """The version that this sync published."""
        return PolicyVersion(self.version, self.digest)

    def to_json(self) -> str:
        """One line: every field but the digests of the single leaves, which `tree_digest` is made from."""
        return json.dumps({k: v for k, v in asdict(self).items() if k != "leaf_digests"})


@dataclass(frozen=True)
class Counters:
    """Three numbers that are easily taken for one. step: optimizer steps done. version: number of the published policy.
    syncs: syncs that moved bytes (none when actor and rollout hold the same arrays)."""

    step: int = 0
    version: int = 0
    syncs: int = 0

    def stepped(self) -> Counters:
        """After an optimizer step."""
        return replace(self, step=self.step + 1)

    def published(self, receipt: SyncReceipt) -> Counters:
        """After a verified sync."""
        return replace(self, version=receipt.version, syncs=self.syncs + (not receipt.same_buffers))
