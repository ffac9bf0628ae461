"""Advantages of groups. Groups are found by id, never by position, and may differ in size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class GroupAdvantages:
    """advantages [B] float64, one per sample; zero_variance: groups whose rewards are all equal (they teach nothing);
    groups: how many there were."""

    advantages: np.ndarray
    zero_variance: int
    groups: int


def group_z_scores(rewards: Sequence[float], group_ids: Sequence[str], std_epsilon: float) -> GroupAdvantages:
    """A_i = (r_i - mean_g) / (std_g + epsilon), GRPO's advantage (Shao et al. 2024, arXiv:2402.03300, section 4.1.2).

    rewards [B] finite; group_ids [B]. std is the sample standard deviation (n - 1), as TRL, verl and tunix compute it.
    Where all rewards of a group are equal, and in a group of one, the advantage is exactly 0.
    Raises ValueError for a reward that is not finite: failed samples are dropped before this point, not averaged in.
    """
    values, ids = np.asarray(rewards, np.float64), np.asarray(group_ids, object)
    if values.shape != ids.shape:
        raise ValueError(f"expected one reward per group id, got {values.shape} rewards and {ids.shape} ids")
    if not np.isfinite(values).all():
        bad = int(np.flatnonzero(~np.isfinite(values))[0])
        raise ValueError(f"reward of sample {bad} (group {ids[bad]!r}) is {values[bad]}; drop failed samples first")
    out = np.zeros_like(values)
    flat, groups = 0, list(dict.fromkeys(ids.tolist()))
    for group in groups:
        member = ids == group
        r = values[member]
        if r.min() == r.max():
            flat += 1
        else:
            out[member] = (r - r.mean()) / (r.std(ddof=1) + std_epsilon)
    return GroupAdvantages(out, flat, len(groups))
