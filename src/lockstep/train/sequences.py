"""Sequences that nothing sampled as micro-batches of rows; whole ones, to read a value at the last token of each.

What predicts a token has read everything before it. So a sequence is laid out as one that goes on with one more token,
which no row reads: the value "before" that token is the value at the sequence's last one. Sequences of a group share
the rows of the beginning that they have in common.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lockstep.train.batching import Geometry, MicroBatch, make_micro_batches
from lockstep.types import Fingerprint, Trajectory

_NONE = Fingerprint("", "", "", "")


def sequence_batches(sequences: Sequence[np.ndarray], groups: Sequence[str], geometry: Geometry) -> list[MicroBatch]:
    """All sequences [S] int32, each exactly once; sample i of a span is sequences[i]. groups: names; sequences of one
    name share rows where they begin alike. Raises ConfigError where one does not fit into a micro-batch."""
    assert all(len(s) for s in sequences), "an empty sequence has no last token"
    members: dict[str, list[int]] = {}
    for i, group in enumerate(groups):
        members.setdefault(group, []).append(i)
    laid: list[Trajectory | None] = [None] * len(sequences)
    for group, chosen in members.items():
        shared = _common([sequences[i] for i in chosen])
        for i in chosen:
            # Nothing in common: a group of its own, whose prompt is its first token.
            name, cut = (group, shared) if shared else (f"{group}/{i}", 1)
            laid[i] = _laid(sequences[i], cut, name, i)
    trajectories = [t for t in laid if t is not None]
    return make_micro_batches(trajectories, np.zeros(len(trajectories)), 1.0, geometry)


def last_of(batch: MicroBatch, flat: np.ndarray, into: np.ndarray) -> None:
    """Put each sequence's value at its last token, out of `flat` [row shards * M], where `into` [B] has it."""
    for i, _, stop in batch.spans:
        into[i] = flat[stop - 1]


def at_last(batch: MicroBatch, values: np.ndarray) -> np.ndarray:
    """[row shards * M] float32: values [B] at the last token of each sequence, 0 elsewhere."""
    flat = np.zeros(batch.target.shape, np.float32)
    for i, _, stop in batch.spans:
        flat[stop - 1] = values[i]
    return flat


def _common(sequences: Sequence[np.ndarray]) -> int:
    """How many tokens all of them begin with alike."""
    shortest = min(map(len, sequences))
    table = np.stack([s[:shortest] for s in sequences])
    alike = (table == table[0]).all(0)
    return shortest if alike.all() else int(np.argmin(alike))


def unscored(prompt: np.ndarray, completion: np.ndarray, group: str, index: int) -> Trajectory:
    """Tokens that nothing sampled, as a trajectory: its record is zeros, which nobody reads."""
    none = np.zeros(len(completion), np.float32)
    return Trajectory(prompt, completion, none, np.zeros(len(completion), np.int32), "stop", 0, group, index, _NONE)


def _laid(sequence: np.ndarray, cut: int, group: str, index: int) -> Trajectory:
    return unscored(sequence[:cut], np.append(sequence[cut:], np.int32(0)).astype(np.int32), group, index)
