"""Every number of a step again, from its stored trajectories and the recipe alone: numpy and the definitions.

Nothing here calls what the loop calls: a number that is wrong in the loop is not wrong in the same way here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from lockstep.audit.definitions import by_group, by_token, k_estimate, loss
from lockstep.config import Config
from lockstep.store import StepRecord
from lockstep.types import Trajectory

EXACT, SUMMED, DEVICE = 1e-9, 1e-6, 1e-4
"""Relative tolerances: float64 either way; float64 sums of float32; float32 sums on the device."""


def differences(config: Config, step: StepRecord, metrics: Mapping[str, Any]) -> list[str]:
    """What of a step's metrics does not follow from its trajectories, as in "reward: logged 0.5, recomputed 0.25"."""
    everything = list(step.trajectories)
    kept = [t for t in everything if t.failed is None]
    tolerances: dict[str, float] = {}
    wanted: dict[str, float] = {}

    def expect(tolerance: float, **values: float) -> None:
        for name, value in values.items():
            wanted[name.replace("__", "/")] = value
            tolerances[name.replace("__", "/")] = tolerance

    rewards = np.array([t.reward for t in kept])
    expect(EXACT, reward=float(rewards.mean()), reward_std=float(rewards.std()))
    for name in kept[0].rewards:
        expect(EXACT, **{f"reward/{name}": float(np.mean([t.rewards[name] for t in kept]))})
    tokens = sum(t.num_sampled for t in everything)
    reasons = [t.finish_reason for t in everything]
    expect(
        EXACT,
        rewards__failed=len(everything) - len(kept),
        tokens__generated=tokens,
        completion_length=tokens / len(everything),
        finish__stop=reasons.count("stop"),
        finish__length=reasons.count("length"),
    )
    judged = _judged(config, kept)
    expect(EXACT, groups__total=len({t.group_id for t in judged}))
    found: list[str] = []
    trained = _trained(step)
    if judged:
        wanted_advantages, flat = _advantages(config, judged)
        expect(EXACT, groups__zero_variance=flat)
        idle = not any(np.any(a) for _, a, _ in trained) and _none_left(config, judged, wanted_advantages)
        if config.algorithm.built_in and not idle:  # what those of others should be, nobody else knows
            found = _wrong_advantages(wanted_advantages, trained)
    if trained:
        _expect_training(config, trained, metrics, expect)
    return found + [
        f"{name}: logged {metrics[name]!r}, recomputed {value!r}" if name in metrics else f"{name}: not logged"
        for name, value in wanted.items()
        if not _close(metrics.get(name), value, tolerances[name])
    ]


Trained = list[tuple[Trajectory, np.ndarray, np.ndarray]]
Wanted = Mapping[tuple[str, int], np.ndarray]


def _trained(step: StepRecord) -> Trained:
    """(trajectory, advantage of each token [T] or of all [1], trainer's log-probabilities) of those trained on."""
    whole = step.extra["advantage"]
    tokens = step.extra.get("token_advantages", [None] * len(whole))
    rows = zip(step.trajectories, whole, tokens, step.extra["trainer_logprobs"], strict=True)
    return [
        (t, np.asarray([a] if each is None else each, np.float64), lp)
        for t, a, each, lp in rows
        if a is not None and lp is not None
    ]


def _shaped(config: Config, t: Trajectory) -> float:
    """The reward less what the completion's length costs (DAPO, arXiv:2503.14476, equation 13)."""
    s, most = config.algorithm, config.max_completion_tokens
    over = len(t.completion_ids) - (most - s.overlong_tokens)
    return t.reward - (s.overlong_penalty * min(over / s.overlong_tokens, 1.0) if s.overlong_tokens and over > 0 else 0)


def _judged(config: Config, kept: list[Trajectory]) -> list[Trajectory]:
    """Those that advantages are made from: with dynamic sampling, the first groups with different rewards."""
    if not config.algorithm.dynamic_rounds:
        return kept
    rewards: dict[str, set[float]] = {}
    for t in kept:
        rewards.setdefault(t.group_id, set()).add(_shaped(config, t))
    uneven = [g for g, found in rewards.items() if len(found) > 1] or list(rewards)
    chosen = set(uneven[: config.rollout.prompts])
    return [t for t in kept if t.group_id in chosen]


def _none_left(config: Config, judged: list[Trajectory], advantages: Wanted) -> bool:
    """Whether the recipe leaves out every sample: all were cut, or none is the best of its group."""
    s = config.algorithm
    return all(
        (s.mask_truncated and t.finish_reason == "length")
        or (s.name == "raft" and not np.any(advantages[t.group_id, t.index]))
        for t in judged
    )


def _earned(t: Trajectory) -> np.ndarray:
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


def _penalty(config: Config, t: Trajectory) -> np.ndarray:
    """[T] what the KL in the reward takes off each token's."""
    s = config.algorithm
    if not s.kl_coef or s.kl_in != "reward" or t.reference_logprobs is None:
        return np.zeros(t.num_sampled)
    kl = k_estimate(s.kl_estimator, t.logprobs.astype(np.float64), t.reference_logprobs.astype(np.float64))
    return s.kl_coef * kl * (1.0 if t.kept_logmass is None else np.exp(t.kept_logmass.astype(np.float64)))


def _advantages(config: Config, judged: list[Trajectory]) -> tuple[Wanted, int]:
    """(what each sample's tokens should be weighted with, groups whose rewards are all equal)."""
    s = config.algorithm
    keys = [(t.group_id, t.index) for t in judged]
    groups = [t.group_id for t in judged]
    rewards, penalties = [_shaped(config, t) for t in judged], [_penalty(config, t) for t in judged]
    outcomes = [r - math.fsum(p) for r, p in zip(rewards, penalties, strict=True)]
    scores, flat = by_group(s, outcomes, groups)
    if s.name not in ("reinforce_pp", "ppo"):
        return {k: np.array([a]) for k, a in zip(keys, scores, strict=True)}, flat
    values = None
    if s.name == "ppo":
        values = [t.values for t in judged if t.values is not None]
        if len(values) < len(judged):
            return {}, flat
    earned = [_earned(t) for t in judged]
    return dict(zip(keys, by_token(s, rewards, groups, penalties, values, earned), strict=True)), flat


def _wrong_advantages(wanted: Wanted, trained: Trained) -> list[str]:
    wrong = []
    for t, a, _ in trained:
        should = wanted.get((t.group_id, t.index))
        if should is None:
            wrong.append(f"sample {t.index} of {t.group_id!r} was trained on, which has no advantage")
        elif len(a) != len(should) or not np.allclose(a, should, EXACT if len(a) == 1 else 1e-5, 1e-6):
            at = int(np.argmax(np.abs(a - should))) if len(a) == len(should) else 0
            wrong.append(
                f"advantage of sample {t.index} of {t.group_id!r}: used {a[at]:.6g}, its rewards give {should[at]:.6g}"
            )
    return wrong[:1] + ([f"and {len(wrong) - 1} more advantages"] if len(wrong) > 1 else [])


def _expect_training(config: Config, trained: Trained, metrics: Mapping[str, Any], expect: Any) -> None:
    algorithm = config.algorithm
    old32 = np.concatenate([t.logprobs for t, _, _ in trained])
    new32 = np.concatenate([lp for _, _, lp in trained])
    old, new = old32.astype(np.float64), new32.astype(np.float64)
    kept = [np.zeros(len(lp)) if t.kept_logmass is None else t.kept_logmass for t, _, lp in trained]
    mass = np.exp(np.concatenate(kept).astype(np.float64))
    advantage = mass * np.concatenate([np.broadcast_to(a, len(lp)) for _, a, lp in trained])
    d = new - old
    weight = np.exp(d - d.max())
    references = [t.reference_logprobs for t, _, _ in trained]
    ref = np.zeros(len(new))
    if all(r is not None for r in references):
        ref = np.concatenate([r for r in references if r is not None]).astype(np.float64)
        expect(
            DEVICE,
            **{f"kl/{algorithm.kl_estimator}": float((mass * k_estimate(algorithm.kl_estimator, new, ref)).mean())},
        )
    expect(SUMMED, tokens__trained=len(new))
    # What an older version sampled was held against that version's weights, whose log-probabilities are not stored.
    if all((t.versions == metrics["policy_version"]).all() for t, _, _ in trained):
        expect(
            SUMMED,
            mismatch__unequal_tokens=int((old32.view(np.uint32) != new32.view(np.uint32)).sum()),
            mismatch__max_abs=float(np.abs(d).max()),
            mismatch__k1=float(-d.mean()),
            mismatch__k3=float((np.expm1(d) - d).mean()),
            mismatch__ess=float(weight.sum() ** 2 / (len(d) * (weight * weight).sum())),
        )
    # After more than one update, and with weights that a correction changed, losses follow from more than is stored.
    if metrics.get("updates", 1) != 1 or algorithm.correction != "none" or algorithm.entropy_coef:
        return
    if not algorithm.built_in:
        return
    lengths = [len(lp) for _, _, lp in trained]
    fields = {
        "logp": new, "old": old, "ref": ref, "advantage": advantage, "weight": mass,
        "sequence": np.repeat(np.arange(len(lengths)), lengths),
    }  # fmt: skip
    length = algorithm.aggregate_length or config.max_completion_tokens
    value, ratio, clipped = loss(algorithm, length, fields, (len(new), len(lengths)))
    expect(DEVICE, loss=value, ratio=ratio, clip_fraction=clipped)


def _close(value: Any, wanted: float, tolerance: float) -> bool:
    if not isinstance(value, int | float):
        return False
    return math.isclose(value, wanted, rel_tol=tolerance, abs_tol=min(tolerance, 1e-6))


def receipt_problems(receipts: Iterable[Mapping[str, Any]]) -> list[str]:
    """What of a run's receipts contradicts itself: versions that do not grow by one, bytes that were not planned."""
    found = []
    last: Mapping[str, Any] | None = None
    for receipt in receipts:
        version = receipt["version"]
        here = f"version {version}"
        if last is not None and version != last["version"] + 1:
            found.append(f"{here} follows version {last['version']}; each sync publishes the next number")
        if last is not None and receipt["syncs"] - last["syncs"] not in (0, 1):
            found.append(f"{here}: the count of syncs went from {last['syncs']} to {receipt['syncs']}")
        planned, moved = receipt.get("bytes_planned", receipt["bytes_moved"]), receipt["bytes_moved"]
        if planned != moved:
            found.append(f"{here}: {planned} bytes were planned, {moved} moved")
        if receipt["same_buffers"] != (moved == 0):
            found.append(f"{here}: same_buffers is {receipt['same_buffers']}, yet {moved} bytes moved")
        if receipt.get("evicted"):
            found.append(f"{here}: replicas were dropped: {dict(receipt['evicted'])}")
        last = receipt
    return found
