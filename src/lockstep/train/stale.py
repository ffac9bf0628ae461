"""Weights that the trainer has left behind, kept as long as a batch may have been sampled with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np

from lockstep.config import RolloutConfig
from lockstep.sync.snapshot import Snapshot
from lockstep.types import PolicyVersion, Trajectory

Score = Callable[[Snapshot, Sequence[Trajectory]], list[np.ndarray | None]]
"""(weights, trajectories) -> per trajectory its [T] float32 log-probabilities under them; None where T is 0."""


def versions_kept(rollout: RolloutConfig) -> int:
    """Of how many versions the actor keeps the weights: those that a batch may have been sampled with."""
    return rollout.staleness + 1 if rollout.verify_stale else 1


class Snapshots:
    """The newest `count` versions' weights, oldest first."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.kept: list[Snapshot] = []

    @property
    def newest(self) -> Snapshot | None:
        return self.kept[-1] if self.kept else None

    def keep(self, tree: Mapping[str, jax.Array], policy: PolicyVersion) -> None:
        """Take one of `tree`; the oldest gives way first."""
        while len(self.kept) >= self.count:
            self.kept.pop(0).free()
        self.kept.append(Snapshot(tree, policy))

    def recomputed(
        self, trajectories: Sequence[Trajectory], version: int, score: Score
    ) -> dict[int, np.ndarray | None]:
        """Of each trajectory with tokens of another version than `version`: index -> [T] float32 log-probabilities,
        each token's under the weights that sampled it; None where some of these are not kept."""
        stale = {i: t for i, t in enumerate(trajectories) if (t.versions != version).any()}
        found: dict[int, np.ndarray | None] = {i: np.zeros(len(t.versions), np.float32) for i, t in stale.items()}
        kept = {snapshot.version.number: snapshot for snapshot in self.kept}
        for number in sorted({int(v) for t in stale.values() for v in t.versions}):
            those = [i for i, t in stale.items() if (t.versions == number).any()]
            if number not in kept:
                found |= dict.fromkeys(those)
                continue
            scored = score(kept[number], [stale[i] for i in those])
            for i, logprobs in zip(those, scored, strict=True):
                into = found[i]
                if into is not None and logprobs is not None:
                    own = stale[i].versions == number
                    into[own] = logprobs[own]
        return found


def staleness(trajectories: Sequence[Trajectory], version: int) -> dict[str, float]:
    """By how many versions the sampling weights of the tokens trained on are behind: mean and max, and the fraction of
    tokens that are behind at all."""
    behind = version - np.concatenate([t.versions for t in trajectories])
    return {
        "staleness/mean": float(behind.mean()),
        "staleness/max": int(behind.max()),
        "staleness/tokens": float((behind > 0).mean()),
    }
