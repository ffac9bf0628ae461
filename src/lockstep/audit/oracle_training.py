"""What a step's training logged, again: from the tokens it trained on, their advantages and the recipe.

What only the weights know is not here (`grad_norm`, the entropy), nor what later updates of a step saw: they ran under
weights whose log-probabilities are not stored.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from lockstep.audit.definitions import by_token, correction, k_estimate, loss
from lockstep.config import Config
from lockstep.types import Trajectory

EXACT, SUMMED, DEVICE = 1e-9, 1e-6, 1e-4
"""Relative tolerances: float64 either way; float64 sums of float32; float32 sums on the device."""

Trained = list[tuple[Trajectory, np.ndarray, np.ndarray]]
"""(trajectory, advantage of each token [T] or of all [1], trainer's log-probabilities [T]) of those trained on."""
Expected = Iterator[tuple[float, dict[str, float]]]
"""(relative tolerance, name -> value)."""


def kl_penalty(config: Config, t: Trajectory) -> np.ndarray:
    """[T] what the KL in the reward takes off each token's."""
    s = config.algorithm
    if not s.kl_coef or s.kl_in != "reward" or t.reference_logprobs is None:
        return np.zeros(t.num_sampled)
    kl = k_estimate(s.kl_estimator, t.logprobs.astype(np.float64), t.reference_logprobs.astype(np.float64))
    return s.kl_coef * kl * _mass(t)


def earned(t: Trajectory) -> np.ndarray:
    """[T] a turn's reward at the last token before what the environment said, or before the end."""
    found = np.zeros(t.num_sampled)
    if t.turn_rewards is None:
        return found
    drawn = np.ones(len(t.completion_ids), bool) if t.sampled is None else t.sampled
    place, turn = -1, 0
    for i, own in enumerate(drawn):
        place += bool(own)
        if own and (i + 1 == len(drawn) or not drawn[i + 1]):
            found[place], turn = t.turn_rewards[turn], turn + 1
    return found


def trained_numbers(
    config: Config, step: int, trained: Trained, rewards: Sequence[float], metrics: Mapping[str, Any], idle: bool
) -> Expected:
    """rewards: of the samples trained on, less what their length costs. metrics: as logged, for what the trajectories
    do not show (the version that trained). idle: nothing was left to train on."""
    s = config.algorithm
    counts = len(np.concatenate([lp for _, _, lp in trained])), len(trained)
    rests = idle or (config.critic is not None and step <= config.critic.warmup_steps)
    parts = min(config.train.mini_batches, counts[1])
    updates = 0 if rests else config.train.epochs * parts
    yield EXACT, {"updates": updates}
    yield SUMMED, {"tokens/trained": counts[0]}
    behind = metrics["policy_version"] - np.concatenate([t.versions for t, _, _ in trained])
    yield EXACT, {"staleness/mean": float(behind.mean()), "staleness/max": int(behind.max())}
    yield EXACT, {"staleness/tokens": float((behind > 0).mean())}
    yield from _against_the_record(trained, current=not behind.any())
    yield from _against_the_reference(config, trained)
    cut = [t.kept_logmass for t, _, _ in trained if t.kept_logmass is not None]
    if cut:
        yield SUMMED, {"sampling/kept_mass": float(np.exp(np.concatenate(cut).astype(np.float64)).mean())}
    if updates:
        length = s.aggregate_length or config.max_completion_tokens
        whole = {"token_mean": counts[0], "sequence_mean": counts[1], "constant": counts[1] * length}[s.aggregate]
        yield SUMMED, {"loss/denominator": whole / parts}
    if s.correction != "none" and not rests:
        weights, capped = _corrections(config, trained)
        yield SUMMED, {"correction/mean": float(np.concatenate(weights).mean())}
        yield SUMMED, {"correction/capped": float(np.concatenate(capped).mean())}
    if updates == 1 and s.built_in:
        yield from _first_update(config, trained, metrics)
    if s.name == "ppo" and not idle and config.train.epochs * parts == 1:
        yield from _critic(config, trained, rewards)


def _mass(t: Trajectory) -> np.ndarray:
    """[T] the probability that was kept where ids were cut off."""
    return np.ones(t.num_sampled) if t.kept_logmass is None else np.exp(t.kept_logmass.astype(np.float64))


def _against_the_record(trained: Trained, current: bool) -> Expected:
    # What an older version sampled was held against that version's weights, whose log-probabilities are not stored.
    if not current:
        return
    old32, new32 = (np.concatenate(a) for a in ([t.logprobs for t, _, _ in trained], [lp for _, _, lp in trained]))
    d = new32.astype(np.float64) - old32.astype(np.float64)
    weight = np.exp(d - d.max())
    yield (
        SUMMED,
        {
            "mismatch/unequal_tokens": int((old32.view(np.uint32) != new32.view(np.uint32)).sum()),
            "mismatch/max_abs": float(np.abs(d).max()),
            "mismatch/k1": float(-d.mean()),
            "mismatch/k3": float((np.expm1(d) - d).mean()),
            "mismatch/ess": float(weight.sum() ** 2 / (len(d) * (weight * weight).sum())),
        },
    )


def _against_the_reference(config: Config, trained: Trained) -> Expected:
    if any(t.reference_logprobs is None for t, _, _ in trained):
        return
    name = config.algorithm.kl_estimator
    each = [
        _mass(t) * k_estimate(name, lp.astype(np.float64), t.reference_logprobs.astype(np.float64))
        for t, _, lp in trained
        if t.reference_logprobs is not None
    ]
    yield DEVICE, {f"kl/{name}": float(np.concatenate(each).mean())}


def _corrections(config: Config, trained: Trained) -> tuple[list[np.ndarray], list[np.ndarray]]:
    found = [correction(config.algorithm, t.logprobs.astype(np.float64), lp.astype(np.float64)) for t, _, lp in trained]
    return [np.array(w) for w, _ in found], [np.array(c) for _, c in found]


def _first_update(config: Config, trained: Trained, metrics: Mapping[str, Any]) -> Expected:
    s = config.algorithm
    corrects = s.correction != "none"
    weights = _corrections(config, trained)[0] if corrects else [np.ones(len(lp)) for _, _, lp in trained]
    mass = np.concatenate([_mass(t) * w for (t, _, _), w in zip(trained, weights, strict=True)])
    new = np.concatenate([lp for _, _, lp in trained]).astype(np.float64)
    old = np.concatenate([t.logprobs for t, _, _ in trained]).astype(np.float64)
    refs = [t.reference_logprobs for t, _, _ in trained]
    lengths = [len(lp) for _, _, lp in trained]
    fields = {
        "logp": new, "old": new if corrects else old, "weight": mass,
        "ref": np.zeros(len(new)) if any(r is None for r in refs) else np.concatenate([np.float64(r) for r in refs]),
        "advantage": mass * np.concatenate([np.broadcast_to(a, len(lp)) for _, a, lp in trained]),
        "sequence": np.repeat(np.arange(len(lengths)), lengths),
    }  # fmt: skip
    length = s.aggregate_length or config.max_completion_tokens
    value, ratio, clipped, low = loss(s, length, fields, (len(new), len(lengths)))
    yield DEVICE, {"ratio": ratio, "clip_fraction": clipped, "clip_fraction/low": low}
    if not s.entropy_coef:
        yield DEVICE, {"loss": value}
    elif s.aggregate == "token_mean" and (mass == 1).all():  # the entropy of each token is not stored, its mean is
        yield DEVICE, {"loss": value - s.entropy_coef * metrics["entropy"]}


def _critic(config: Config, trained: Trained, rewards: Sequence[float]) -> Expected:
    """Of its one update, which starts from the values that the advantages were made with."""
    values = [t.values for t, _, _ in trained if t.values is not None]
    if len(values) < len(trained):
        return
    plain = config.algorithm.model_copy(update={"whiten": False})
    groups = [t.group_id for t, _, _ in trained]
    penalties, own = [kl_penalty(config, t) for t, _, _ in trained], [earned(t) for t, _, _ in trained]
    v = np.concatenate(values).astype(np.float64)
    returns = v + np.concatenate(by_token(plain, rewards, groups, penalties, values, own))
    yield (
        DEVICE,
        {
            "critic/value": float(v.mean()),
            "critic/return": float(returns.mean()),
            "critic/loss": 0.5 * math.fsum((v - returns) ** 2) / len(v),
            "critic/clip_fraction": 0.0,
        },
    )
    if returns.var():
        yield DEVICE, {"critic/explained_variance": float(1 - (returns - v).var() / returns.var())}
