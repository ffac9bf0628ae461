"""Log-probabilities of a step's batch under other weights than those that train: the reference's, a snapshot's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import jax
import numpy as np

from lockstep.cluster.programs import SplitWeights
from lockstep.sync.snapshot import Snapshot
from lockstep.train.assembly import Cluster
from lockstep.train.batching import make_micro_batches
from lockstep.train.forward import score
from lockstep.types import Trajectory


def with_reference(cluster: Cluster, batch: list[Trajectory]) -> tuple[list[Trajectory], list[jax.Array] | None]:
    """The batch with the reference's log-probabilities, and the frozen trunk's output if it was needed for them. As it
    came where the run has no reference."""
    reference, trainer = cluster.reference, cluster.trainer
    if reference is None:
        return batch, None
    micro = make_micro_batches(batch, np.zeros(len(batch)), cluster.config.rollout.temperature, reference.geometry)
    trunks = trainer.trunks(micro) if reference.shares_trunk else None
    first = trainer.first_layer if trunks is not None else 0
    found: list[np.ndarray | None] = [None] * len(batch)
    for mb, flat in zip(micro, score(reference.programs, reference.weights, micro, trunks, first), strict=True):
        mb.scatter(flat, found)
    return [replace(t, reference_logprobs=lp) for t, lp in zip(batch, found, strict=True)], trunks


def under_snapshot(cluster: Cluster, snapshot: Snapshot, batch: Sequence[Trajectory]) -> list[np.ndarray | None]:
    """Per trajectory [T] float32 log-probabilities by the trainer's programs under a snapshot; None for no tokens."""
    placed = {p: a.sharding for p, a in cluster.trainer.trainable.items()}
    return under(cluster, {**cluster.trainer.params, **snapshot.restore(placed)}, batch)


def under(cluster: Cluster, params: Mapping[str, jax.Array], batch: Sequence[Trajectory]) -> list[np.ndarray | None]:
    """As `under_snapshot`, under the weights given: the whole tree."""
    trainer = cluster.trainer
    weights = SplitWeights.of(params, cluster.spec.num_layers)
    micro = make_micro_batches(batch, np.zeros(len(batch)), cluster.config.rollout.temperature, cluster.geometry)
    found: list[np.ndarray | None] = [None] * len(batch)
    for mb, flat in zip(micro, score(trainer.programs, weights, micro), strict=True):
        mb.scatter(flat, found)
    return found
