"""Every number of a step again, from its stored trajectories and the recipe alone: numpy and the definitions.

Nothing here calls what the loop calls: a number that is wrong in the loop is not wrong in the same way here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from lockstep.audit.definitions import by_group, by_token
from lockstep.audit.oracle_training import EXACT, Trained, earned, kl_penalty, trained_numbers
from lockstep.config import Config
from lockstep.store import StepRecord
from lockstep.types import Trajectory


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
    expect(EXACT, **_turns(everything))
    judged = _judged(config, kept)
    expect(EXACT, groups__total=len({t.group_id for t in judged}), groups__zero_variance=len(_flat(config, judged)))
    expect(EXACT, **_dynamic(config, kept, judged))
    if every := config.algorithm.reference_every:
        expect(EXACT, reference__step=(step.step - 1) // every * every)
    found: list[str] = []
    trained, idle = _trained(step), False
    if judged:
        wanted_advantages = _advantages(config, judged)
        idle = not any(np.any(a) for _, a, _ in trained) and _none_left(config, judged, wanted_advantages)
        if config.algorithm.built_in and not idle:  # what those of others should be, nobody else knows
            found = _wrong_advantages(wanted_advantages, trained)
    if trained:
        rewards_used = [_shaped(config, t) for t, _, _ in trained]
        for tolerance, numbers in trained_numbers(config, step.step, trained, rewards_used, metrics, idle):
            expect(tolerance, **numbers)
    return found + [
        f"{name}: logged {metrics[name]!r}, recomputed {value!r}" if name in metrics else f"{name}: not logged"
        for name, value in wanted.items()
        if not _close(metrics.get(name), value, tolerances[name])
    ]


Wanted = Mapping[tuple[str, int], np.ndarray]


def _trained(step: StepRecord) -> Trained:
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
    chosen = set(_useful(config, kept)[: config.rollout.prompts])
    return [t for t in kept if t.group_id in chosen]


def _useful(config: Config, kept: list[Trajectory]) -> list[str]:
    """Groups whose rewards differ; all, where none do."""
    groups, flat = list(dict.fromkeys(t.group_id for t in kept)), set(_flat(config, kept))
    return [g for g in groups if g not in flat] or groups


def _dynamic(config: Config, kept: list[Trajectory], judged: list[Trajectory]) -> dict[str, float]:
    """Of dynamic sampling. How many rounds there were is not to be seen where a whole group was lost."""
    if not config.algorithm.dynamic_rounds:
        return {}
    surplus = len(_useful(config, kept)) - len({t.group_id for t in judged})
    return {"dynamic/flat_groups": len(_flat(config, kept)), "dynamic/surplus_groups": surplus}


def _turns(everything: list[Trajectory]) -> dict[str, float]:
    turns = [len(t.turn_rewards) for t in everything if t.turn_rewards is not None]
    return {"turns/mean": float(np.mean(turns)), "turns/max": max(turns)} if turns else {}


def _none_left(config: Config, judged: list[Trajectory], advantages: Wanted) -> bool:
    """Whether the recipe leaves out every sample: all were cut, or none is the best of its group."""
    s = config.algorithm
    return all(
        (s.mask_truncated and t.finish_reason == "length")
        or (s.name == "raft" and not np.any(advantages[t.group_id, t.index]))
        for t in judged
    )


def _flat(config: Config, judged: Iterable[Trajectory]) -> list[str]:
    """Groups whose rewards are all equal, in order."""
    rewards: dict[str, set[float]] = {}
    for t in judged:
        rewards.setdefault(t.group_id, set()).add(_shaped(config, t))
    return [group for group, found in rewards.items() if len(found) == 1]


def _advantages(config: Config, judged: list[Trajectory]) -> Wanted:
    """What each sample's tokens should be weighted with."""
    s = config.algorithm
    keys = [(t.group_id, t.index) for t in judged]
    groups = [t.group_id for t in judged]
    rewards, penalties = [_shaped(config, t) for t in judged], [kl_penalty(config, t) for t in judged]
    outcomes = [r - math.fsum(p) for r, p in zip(rewards, penalties, strict=True)]
    if s.name not in ("reinforce_pp", "ppo"):
        return {k: np.array([a]) for k, a in zip(keys, by_group(s, outcomes, groups), strict=True)}
    values = None
    if s.name == "ppo":
        values = [t.values for t in judged if t.values is not None]
        if len(values) < len(judged):
            return {}
    turns = [earned(t) for t in judged]
    return dict(zip(keys, by_token(s, rewards, groups, penalties, values, turns), strict=True))


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
