"""Advantages: of groups, of the batch, and over time. Float64 throughout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from lockstep.algorithm_section import RewardScale
from lockstep.algorithms.base import Advantages, Samples


def per_group(samples: Samples, rule: Callable[[np.ndarray], np.ndarray]) -> Advantages:
    """Advantages by a rule on the outcomes [n] of one group. Exactly 0 where they are all equal, and in a group of
    one."""
    r, out, groups = samples.outcomes, np.zeros(len(samples.rewards)), samples.groups
    for members in groups.values():
        if not _all_equal(own := r[members]):
            out[members] = rule(own)
    # A KL that is taken off tells samples apart, and teaches nothing of the task.
    return Advantages(out, sum(_all_equal(samples.rewards[m]) for m in groups.values()), len(groups))


def _all_equal(values: np.ndarray) -> bool:
    """Compared, not subtracted: the mean of three rewards of 0.1 is not 0.1."""
    return bool(values.min() == values.max())


def group_scores(samples: Samples, scale: RewardScale, std_epsilon: float) -> Advantages:
    """A_i = (r_i - mean_g) / (std + epsilon), GRPO's advantage (Shao et al. 2024, arXiv:2402.03300, section 4.1.2).

    std: of the group (sample standard deviation, n - 1, as TRL, verl and tunix compute it), or of all outcomes of the
    batch; scale "none": A_i = r_i - mean_g (Dr. GRPO, arXiv:2503.20783).
    """
    if scale == "group":
        return per_group(samples, lambda r: (r - r.mean()) / (r.std(ddof=1) + std_epsilon))
    found = per_group(samples, lambda r: r - r.mean())
    if scale == "batch" and len(samples.rewards) > 1:
        return replace(found, per_sample=found.per_sample / (samples.outcomes.std(ddof=1) + std_epsilon))
    return found


def leave_one_out(samples: Samples) -> Advantages:
    """A_i = r_i - mean of the others' rewards (Ahmadian et al. 2024, arXiv:2402.14740, section 3.3): n / (n - 1) times
    the distance from the group's mean."""
    return per_group(samples, lambda r: (r - r.mean()) * (len(r) / (len(r) - 1)))


def returns_to_go(rewards: np.ndarray, gamma: float) -> np.ndarray:
    """[T] sum over k >= t of gamma^(k - t) r_k."""
    out = np.zeros(len(rewards))
    later = 0.0
    for t in range(len(rewards) - 1, -1, -1):
        later = out[t] = rewards[t] + gamma * later
    return out


def gae(rewards: np.ndarray, values: np.ndarray, gamma: float, lam: float) -> tuple[np.ndarray, np.ndarray]:
    """(advantages [T], returns [T]) by generalised advantage estimation (Schulman et al. 2016, arXiv:1506.02438,
    equation 16); the returns are what the critic is trained on.

        A_t = sum_k (gamma lam)^k d_(t+k),   d_t = r_t + gamma V_(t+1) - V_t,   R_t = A_t + V_t

    rewards, values [T]: r_t is earned by token t, V_t is the estimate before it; after the last token nothing comes.
    """
    nexts = np.append(values[1:], 0.0)[: len(values)]
    advantages = returns_to_go(rewards + gamma * nexts - values, gamma * lam)
    return advantages, advantages + values


def whitened(per_token: Sequence[np.ndarray], std_epsilon: float) -> list[np.ndarray]:
    """Shifted and scaled to mean 0 and deviation 1 over all tokens; exactly 0 where they are all equal."""
    flat = np.concatenate([np.zeros(0), *per_token])
    if not len(flat) or flat.min() == flat.max():
        return [np.zeros(len(a)) for a in per_token]
    mean, std = flat.mean(), flat.std(ddof=1)
    return [(a - mean) / (std + std_epsilon) for a in per_token]


def by_token(samples: Samples, per_token: Sequence[np.ndarray], returns: Sequence[np.ndarray] | None) -> Advantages:
    """Advantages that differ within a sample, with the counts of its groups."""
    means = np.array([a.mean() if len(a) else 0.0 for a in per_token])
    return replace(per_group(samples, lambda r: r), per_sample=means, per_token=per_token, returns=returns)
