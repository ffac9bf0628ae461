"""Every number of a step again, from its stored trajectories and the recipe alone: numpy and the definitions.

Nothing here calls what the loop calls: a number that is wrong in the loop is not wrong in the same way here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from lockstep.config import Config
from lockstep.store import StepRecord
from lockstep.types import Trajectory

EXACT, SUMMED, DEVICE = 1e-9, 1e-6, 1e-4
"""Relative tolerances: float64 either way; float64 sums of float32; float32 sums on the device."""


def k_estimate(name: str, logp: np.ndarray, ref: np.ndarray) -> np.ndarray:
    """Per-token KL(policy || reference): k1, k2, k3 (Schulman, "Approximating KL Divergence", 2020)."""
    d = ref - logp
    return {"k1": -d, "k2": d * d / 2, "k3": np.exp(d) - 1 - d}[name]


def z_scores(rewards: Sequence[float], groups: Sequence[str], epsilon: float) -> tuple[np.ndarray, int]:
    """(advantage of every sample, groups without any): GRPO's (arXiv:2402.03300, section 4.1.2), group by group."""
    found, flat = np.zeros(len(rewards)), 0
    for group in dict.fromkeys(groups):
        members = [i for i, g in enumerate(groups) if g == group]
        own = [rewards[i] for i in members]
        if len(set(own)) == 1:
            flat += 1
            continue
        mean = math.fsum(own) / len(own)
        spread = math.sqrt(math.fsum((r - mean) ** 2 for r in own) / (len(own) - 1))
        for i, r in zip(members, own, strict=True):
            found[i] = (r - mean) / (spread + epsilon)
    return found, flat


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
    tokens = sum(len(t.completion_ids) for t in everything)
    reasons = [t.finish_reason for t in everything]
    expect(
        EXACT,
        rewards__failed=len(everything) - len(kept),
        tokens__generated=tokens,
        completion_length=tokens / len(everything),
        finish__stop=reasons.count("stop"),
        finish__length=reasons.count("length"),
    )
    scores, flat = z_scores([t.reward for t in kept], [t.group_id for t in kept], config.algorithm.std_epsilon)
    expect(EXACT, groups__total=len({t.group_id for t in kept}), groups__zero_variance=flat)
    by_sample = {(t.group_id, t.index): a for t, a in zip(kept, scores, strict=True)}
    trained = _trained(step)
    found = _wrong_advantages(by_sample, trained)
    if trained:
        _expect_training(config, trained, expect)
    return found + [
        f"{name}: logged {metrics[name]!r}, recomputed {value!r}" if name in metrics else f"{name}: not logged"
        for name, value in wanted.items()
        if not _close(metrics.get(name), value, tolerances[name])
    ]


Trained = list[tuple[Trajectory, float, np.ndarray]]


def _trained(step: StepRecord) -> Trained:
    """(trajectory, advantage, trainer's log-probabilities) of those that the step trained on."""
    rows = zip(step.trajectories, step.extra["advantage"], step.extra["trainer_logprobs"], strict=True)
    return [(t, float(a), lp) for t, a, lp in rows if a is not None and lp is not None]


def _wrong_advantages(wanted: Mapping[tuple[str, int], float], trained: Trained) -> list[str]:
    wrong = [
        f"advantage of sample {t.index} of {t.group_id!r}: used {a:.6g}, its group's rewards give "
        f"{wanted[t.group_id, t.index]:.6g}"
        for t, a, _ in trained
        if not _close(a, wanted[t.group_id, t.index], EXACT)
    ]
    return wrong[:1] + ([f"and {len(wrong) - 1} more advantages"] if len(wrong) > 1 else [])


def _expect_training(config: Config, trained: Trained, expect: Any) -> None:
    algorithm = config.algorithm
    old32 = np.concatenate([t.logprobs for t, _, _ in trained])
    new32 = np.concatenate([lp for _, _, lp in trained])
    old, new = old32.astype(np.float64), new32.astype(np.float64)
    kept = np.concatenate(
        [np.zeros(len(lp)) if t.kept_logmass is None else t.kept_logmass.astype(np.float64) for t, _, lp in trained]
    )
    mass = np.exp(kept)
    advantage = mass * np.concatenate([np.full(len(lp), a) for _, a, lp in trained])
    d = new - old
    ratio, weight = np.exp(d), np.exp(d - d.max())
    free = ratio * advantage
    held = np.clip(ratio, 1 - algorithm.clip_low, 1 + algorithm.clip_high) * advantage
    loss = -np.minimum(free, held)
    references = [t.reference_logprobs for t, _, _ in trained]
    if all(ref is not None for ref in references):
        ref = np.concatenate([ref for ref in references if ref is not None]).astype(np.float64)
        kl = mass * k_estimate(algorithm.kl_estimator, new, ref)
        expect(DEVICE, **{f"kl/{algorithm.kl_estimator}": float(kl.mean())})
        loss = loss + algorithm.kl_coef * kl
    expect(
        SUMMED,
        tokens__trained=len(new),
        mismatch__unequal_tokens=int((old32.view(np.uint32) != new32.view(np.uint32)).sum()),
        mismatch__max_abs=float(np.abs(d).max()),
        mismatch__k1=float(-d.mean()),
        mismatch__k3=float((np.expm1(d) - d).mean()),
        mismatch__ess=float(weight.sum() ** 2 / (len(d) * (weight * weight).sum())),
    )
    expect(DEVICE, loss=float(loss.mean()), ratio=float(ratio.mean()), clip_fraction=float((held < free).mean()))


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
