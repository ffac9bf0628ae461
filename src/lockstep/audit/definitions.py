"""What the algorithms are, once more: numpy, float64, loops, straight from the papers' formulas.

Nothing here calls what the loop calls: a formula that is wrong in the loop is not wrong in the same way here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from lockstep.algorithm_section import AlgorithmConfig


def k_estimate(name: str, logp: np.ndarray, ref: np.ndarray) -> np.ndarray:
    """Per-token KL(policy || reference): k1, k2, k3 (Schulman, "Approximating KL Divergence", 2020)."""
    d = ref - logp
    return {"k1": -d, "k2": d * d / 2, "k3": np.exp(d) - 1 - d}[name]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _spread(values: Sequence[float]) -> float:
    """Sample standard deviation."""
    mean = _mean(values)
    return math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1))


def by_group(settings: AlgorithmConfig, rewards: Sequence[float], groups: Sequence[str]) -> np.ndarray:
    """The advantage of every sample, of the algorithms that compare samples of a group, group by group."""
    found = np.zeros(len(rewards))
    whole = _spread(rewards) if settings.scale_rewards == "batch" and len(rewards) > 1 else 0.0
    for group in dict.fromkeys(groups):
        members = [i for i, g in enumerate(groups) if g == group]
        own = [rewards[i] for i in members]
        if len(set(own)) == 1:
            continue
        for place, i in enumerate(members):
            others = own[:place] + own[place + 1 :]
            if settings.name == "rloo":
                found[i] = rewards[i] - _mean(others)
            elif settings.name == "raft":
                better = sum(r > rewards[i] for r in own) + sum(r == rewards[i] for r in own[:place])
                found[i] = float(better < settings.best_of)
            else:
                found[i] = rewards[i] - _mean(own)
                if settings.name != "dr_grpo" and settings.scale_rewards == "group":
                    found[i] /= _spread(own) + settings.std_epsilon
                elif settings.name != "dr_grpo" and settings.scale_rewards == "batch":
                    found[i] /= whole + settings.std_epsilon
    return found


def by_token(
    settings: AlgorithmConfig,
    rewards: Sequence[float],
    groups: Sequence[str],
    penalties: Sequence[np.ndarray],
    values: Sequence[np.ndarray] | None,
    earned: Sequence[np.ndarray] | None = None,
) -> list[np.ndarray]:
    """Advantages [T] of every sample, of the algorithms that tell tokens apart: REINFORCE++ and PPO. earned: of each,
    [T], the parts of its reward that are not the last token's."""
    last = list(rewards)
    if settings.name == "reinforce_pp" and settings.group_baseline:
        for group in dict.fromkeys(groups):
            members = [i for i, g in enumerate(groups) if g == group]
            own = [rewards[i] for i in members]
            for i in members:
                last[i] = 0.0 if len(set(own)) == 1 else rewards[i] - _mean(own)
    found = []
    for i, penalty in enumerate(penalties):
        n = len(penalty)
        own = [0.0] * n if earned is None else [float(e) for e in earned[i]]
        rest = last[i] - math.fsum(own)
        got = [-float(p) + own[t] + (rest if t == n - 1 else 0.0) for t, p in enumerate(penalty)]
        if values is None:
            discount, deltas = settings.gamma, got
        else:
            v = [*map(float, values[i]), 0.0]
            discount = settings.gamma * settings.lam
            deltas = [got[t] + settings.gamma * v[t + 1] - v[t] for t in range(n)]
        found.append(np.array([math.fsum(discount ** (k - t) * deltas[k] for k in range(t, n)) for t in range(n)]))
    if settings.name == "ppo" and not settings.whiten:
        return found
    flat = [float(x) for a in found for x in a]
    if len(set(flat)) <= 1:
        return [np.zeros(len(a)) for a in found]
    mean, spread = _mean(flat), _spread(flat)
    return [(a - mean) / (spread + settings.std_epsilon) for a in found]


def loss(
    settings: AlgorithmConfig,
    length: float,
    fields: Mapping[str, np.ndarray],
    totals: tuple[float, float],
    at: np.ndarray | None = None,
) -> tuple[float, float, float, float]:
    """(loss, mean ratio, fraction of tokens clipped, fraction clipped with a negative advantage) from fields logp, old,
    ref, advantage, weight, sequence, each [M], token by token. totals: tokens and sequences of the whole batch. at:
    log-probabilities at which what is not differentiated (CISPO's weight) is held; None: logp.

    Of built-in algorithms only.
    """
    logp, old, ref, advantage, weight, sequence = (
        fields[name] for name in ("logp", "old", "ref", "advantage", "weight", "sequence")
    )
    objective, ratios, clips, low_clips = np.zeros(len(logp)), np.zeros(len(logp)), 0, 0
    lengths = {s: int((sequence == s).sum()) for s in set(sequence.tolist())}
    for t in range(len(logp)):
        own = sequence == sequence[t]

        def ratio(p: np.ndarray, t: int = t, own: np.ndarray = own) -> float:
            if settings.ratio == "token":
                return math.exp(p[t] - old[t])
            total = math.fsum((p - old)[own])
            return math.exp(total if settings.ratio == "trajectory" else total / lengths[sequence[t]])

        a = float(advantage[t])
        r = ratios[t] = ratio(logp)
        low, high = 1 - settings.clip_low, 1 + settings.clip_high
        held = min(max(r, low), high)
        if settings.name == "raft":
            objective[t] = a * logp[t]
            continue
        if settings.name == "cispo":
            still = min(max(ratio(logp if at is None else at), low), high)
            objective[t] = still * a * logp[t]
            clips, low_clips = clips + (held != r), low_clips + (held != r and a < 0)
            continue
        objective[t] = min(r * a, held * a)
        clipped = held * a < r * a
        if settings.dual_clip and a < 0 and objective[t] < settings.dual_clip * a:
            objective[t], clipped = settings.dual_clip * a, True
        clips, low_clips = clips + clipped, low_clips + (clipped and a < 0)
    each = -objective
    if settings.kl_coef and settings.kl_in == "loss":
        each = each + settings.kl_coef * weight * k_estimate(settings.kl_estimator, logp, ref)
    if settings.aggregate == "token_mean":
        value = math.fsum(each) / totals[0]
    elif settings.aggregate == "constant":
        value = math.fsum(each) / (totals[1] * length)
    else:
        value = math.fsum(each[t] / lengths[sequence[t]] for t in range(len(each))) / totals[1]
    return value, math.fsum(ratios) / totals[0], clips / totals[0], low_clips / totals[0]


def correction(settings: AlgorithmConfig, recorded: np.ndarray, now: np.ndarray) -> tuple[list[float], list[bool]]:
    """(weight of each token of a completion, whether its cap was active), from log-probabilities as sampled and under
    the weights that train: token or sequence, truncated or masked (`algorithm.correction`)."""
    level, _, kind = settings.correction.partition("_")
    weights, capped, most = [], [], settings.correction_cap
    for t in range(len(now)):
        ratios = [math.exp(now[k] - recorded[k]) for k in range(len(now)) if level == "sequence" or k == t]
        w = math.prod(ratios)
        out = w > most or (kind == "masked" and w < 1 / most)
        weights.append((most if kind == "truncated" else 0.0) if out else w)
        capped.append(out)
    return weights, capped


def gradient(
    settings: AlgorithmConfig, length: float, fields: Mapping[str, np.ndarray], totals: tuple[float, float]
) -> np.ndarray:
    """[M] d loss / d logp by central differences in float64."""
    at, step = fields["logp"], 1e-6
    found = np.zeros(len(at))
    for t in range(len(at)):
        up, down = at.copy(), at.copy()
        up[t] += step
        down[t] -= step
        ends = [loss(settings, length, {**fields, "logp": p}, totals, at)[0] for p in (up, down)]
        found[t] = (ends[0] - ends[1]) / (2 * step)
    return found
