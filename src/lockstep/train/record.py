"""A step's numbers, from what it sampled and trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from lockstep.algorithm_section import KLEstimator
from lockstep.algorithms.losses import kl_estimate
from lockstep.rollout.engine import EngineStats
from lockstep.train.batching import kept_mass
from lockstep.types import Prompt, Trajectory


def rollout_numbers(everything: Sequence[Trajectory]) -> dict[str, Any]:
    """Of everything that was sampled for a step, scored or not."""
    scored = [t for t in everything if t.failed is None]
    rewards = np.asarray([t.reward for t in scored])
    parts = {name: [t.rewards[name] for t in scored] for name in scored[0].rewards}
    return {
        "reward": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        **{f"reward/{name}": float(np.mean(values)) for name, values in parts.items()},
        "completion_length": float(np.mean([t.num_sampled for t in everything])),
        "rewards/failed": len(everything) - len(scored),
        "tokens/generated": sum(t.num_sampled for t in everything),
        **turn_numbers(everything),
        "finish/stop": sum(t.finish_reason == "stop" for t in everything),
        "finish/length": sum(t.finish_reason == "length" for t in everything),
    }


def turn_numbers(everything: Sequence[Trajectory]) -> dict[str, float]:
    """Where there is an environment, how many turns the samples took."""
    turns = [len(t.turn_rewards) for t in everything if t.turn_rewards is not None]
    return {"turns/mean": float(np.mean(turns)), "turns/max": max(turns)} if turns else {}


def engine_numbers(before: EngineStats, now: EngineStats) -> dict[str, float]:
    """What an engine did between two looks at its totals; no padding where it made no pass."""
    did = {f.name: getattr(now, f.name) - getattr(before, f.name) for f in fields(now)}
    names = ("passes", "cached_tokens", "preemptions", "drafted", "accepted")
    found: dict[str, float] = {f"engine/{name}": did[name] for name in names}
    if did["padded_rows"]:
        found["engine/padding"] = 1 - did["rows"] / did["padded_rows"]
    return found


def mean_kept_mass(batch: Sequence[Trajectory]) -> dict[str, float]:
    """Of the tokens trained on, where ids were cut off."""
    cut = [t.kept_logmass for t in batch if t.kept_logmass is not None]
    return {"sampling/kept_mass": float(np.exp(np.concatenate(cut)).mean())} if cut else {}


def mean_kl(name: KLEstimator, logprobs: Sequence[np.ndarray | None], batch: Sequence[Trajectory]) -> float:
    """Token mean of the KL estimate over the batch, from the trainer's and the reference's log-probabilities, each
    weighted with the mass kept where ids were cut off (`losses.kl_estimate` says why).

    In numpy: a batch has another number of tokens at each step, and jax would compile for each.
    """
    used = [(lp, t) for lp, t in zip(logprobs, batch, strict=True) if lp is not None]
    policy = np.concatenate([lp for lp, _ in used]).astype(np.float64)
    reference = np.concatenate([t.reference_logprobs for _, t in used if t.reference_logprobs is not None])
    weight = np.concatenate([np.broadcast_to(kept_mass(t), len(lp)) for lp, t in used])
    return float((weight * kl_estimate(name, policy, reference, np)).mean())


def stored_rows(
    everything: Sequence[Trajectory],
    batch: Sequence[Trajectory],
    advantages: Sequence[np.ndarray | float],
    logprobs: Sequence[np.ndarray | None],
) -> tuple[list[Trajectory], dict[str, list[Any]]]:
    """(trajectories, what the trainer adds to each) for the store; empty where one took no part. advantages, logprobs:
    of the batch. Where the tokens of a sample have different advantages, `advantage` is their mean."""
    trained = {(t.group_id, t.index): (t, a, lp) for t, a, lp in zip(batch, advantages, logprobs, strict=True)}
    rows = [trained.get((t.group_id, t.index), (t, None, None)) for t in everything]
    extra: dict[str, list[Any]] = {
        "advantage": [None if a is None else float(np.mean(a)) if np.size(a) else 0.0 for _, a, _ in rows],
        "trainer_logprobs": [lp for _, _, lp in rows],
    }
    if any(isinstance(a, np.ndarray) for a in advantages):
        extra["token_advantages"] = [None if a is None else np.asarray(a, np.float32) for _, a, _ in rows]
    return [t for t, _, _ in rows], extra


def sample_text(prompts: Sequence[Prompt], trajectories: Sequence[Trajectory]) -> str:
    """The first prompt's last line and its first completion, for people."""
    prompt = next(p for p in prompts if p.id == trajectories[0].group_id)
    return prompt.text.rsplit("\n", 1)[-1] + trajectories[0].text
