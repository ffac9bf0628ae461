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
    values = np.asarray(rewards, np.float64)
    if values.shape != (len(group_ids),):
        raise ValueError(f"expected one reward per group id, got {values.shape} rewards and {len(group_ids)} ids")
    if not np.isfinite(values).all():
        bad = int(np.flatnonzero(~np.isfinite(values))[0])
        raise ValueError(
            f"reward of sample {bad} (group {group_ids[bad]!r}) is {values[bad]}; drop failed samples first"
        )
    groups: dict[str, list[int]] = {}
    for i, group in enumerate(group_ids):
        groups.setdefault(group, []).append(i)
    out = np.zeros_like(values)
    flat = 0
    for members in groups.values():
        r = values[members]
        # Compared, not subtracted: the mean of three rewards of 0.1 is not 0.1.
        if r.min() == r.max():
            flat += 1
        else:
            out[members] = (r - r.mean()) / (r.std(ddof=1) + std_epsilon)
    return GroupAdvantages(out, flat, len(groups))
