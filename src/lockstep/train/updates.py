"""A step's optimizer updates: the batch, `train.epochs` times, in `train.mini_batches` parts.

The record is held against the trainer once: the first part's as it is trained on, the others' before the first update
moves the weights. Ratios are to the record; where the recipe corrects for other sampling weights, to the trainer's
log-probabilities before the first update, and the correction carries the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax

from lockstep.algorithm_section import AlgorithmConfig
from lockstep.config import Config
from lockstep.train.batching import Geometry, Weighed, make_micro_batches
from lockstep.train.trainer import StepResult, Trainer, mismatch
from lockstep.types import Trajectory

Recompute = Callable[[Sequence[Trajectory]], list[np.ndarray | None]]
"""Trajectories -> log-probabilities under the weights that train, now; None for no tokens."""


def parts(count: int, epochs: int, mini_batches: int, seed: tuple[int, ...]) -> list[list[np.ndarray]]:
    """Per epoch, the indices of each part, of nearly equal size, none empty. One part is the batch as it is; several
    are drawn anew in each epoch."""
    if mini_batches == 1:
        return [[np.arange(count)]] * epochs
    drawn = [np.random.default_rng((*seed, epoch)).permutation(count) for epoch in range(epochs)]
    return [[np.sort(p) for p in np.array_split(order, min(mini_batches, count))] for order in drawn]


def correction(
    settings: AlgorithmConfig, recorded: np.ndarray, now: np.ndarray
) -> tuple[np.ndarray | None, np.ndarray]:
    """(weights [T] float64 or None, [T] bool: where the cap was active). recorded, now [T]: log-probabilities as
    sampled and under the weights that train.

    token: w_t = exp(now_t - recorded_t); sequence: its product over the completion, for every token. truncated: at most
    the cap (Ionides 2008; as TIS in arXiv:2510.18855). masked: 0 where above it, and where below 1 / cap.
    """
    none = np.zeros(len(recorded), bool)
    if settings.correction == "none":
        return None, none
    level, _, kind = settings.correction.partition("_")
    d = now.astype(np.float64) - recorded.astype(np.float64)
    log_w = d if level == "token" else np.full(len(d), d.sum())
    cap = np.log(settings.correction_cap)
    if kind == "truncated":
        return np.exp(np.minimum(log_w, cap)), log_w > cap
    out = np.abs(log_w) > cap
    return np.where(out, 0.0, np.exp(np.where(out, 0.0, log_w))), out


def update(
    config: Config,
    trainer: Trainer,
    geometry: Geometry,
    batch: Sequence[Trajectory],
    advantages: Sequence[np.ndarray | float],
    number: int,
    recompute: Recompute,
    stale: Mapping[int, np.ndarray | None],
    trunks: Sequence[jax.Array] | None,
) -> StepResult:
    """All updates of step `number`. advantages: per sample, of all its tokens or [T]. recompute: used only if needed.
    stale, trunks: as `Trainer.step` takes them, of the batch in its order.

    Metrics are means over the updates, but for `lr`, the last one's, and `updates`, their count; the result's
    log-probabilities are those before the first.
    """
    settings, train = config.algorithm, config.train
    plan = parts(len(batch), train.epochs, train.mini_batches, (config.run.seed, number))
    several = sum(map(len, plan)) > 1
    corrects = settings.correction != "none"
    now = recompute(batch) if several or corrects else None
    weighed, counts = _weighed(settings, batch, advantages, now if corrects else None)
    results: list[StepResult] = []
    for epoch, cuts in enumerate(plan):
        for indices in cuts:
            chosen = [batch[i] for i in indices]
            micro = make_micro_batches(chosen, [weighed[i] for i in indices], config.rollout.temperature, geometry)
            held = _held_against(indices, stale, now, first=not results, again=epoch > 0)
            own = trunks if len(chosen) == len(batch) else None
            results.append(trainer.step(micro, chosen, _updates(trainer, number), own, held))
    if now is None:
        return StepResult(results[0].metrics | {"updates": 1} | counts, results[0].logprobs)
    held_pairs = [
        (t.logprobs, lp)
        for i, (t, mine) in enumerate(zip(batch, now, strict=True))
        if mine is not None and (lp := stale.get(i, mine)) is not None
    ]
    metrics = _combined([r.metrics for r in results]) | counts
    if held_pairs:
        metrics |= mismatch(np.concatenate([a for a, _ in held_pairs]), np.concatenate([b for _, b in held_pairs]))
    metrics["tokens/trained"] = sum(len(t.completion_ids) for t in batch)
    return StepResult(metrics, list(now))


def _held_against(
    indices: np.ndarray,
    stale: Mapping[int, np.ndarray | None],
    now: Sequence[np.ndarray | None] | None,
    *,
    first: bool,
    again: bool,
) -> dict[int, np.ndarray | None]:
    """What `Trainer.step` is to hold each record against, by place in the part; what is not named is compared with what
    the step itself computes. first: no update has moved the weights yet. again: the record was compared before."""
    found: dict[int, np.ndarray | None] = {}
    for place, i in enumerate(indices.tolist()):
        if again:
            found[place] = None
        elif i in stale:
            found[place] = stale[i]
        elif not first:
            assert now is not None
            found[place] = now[i]
    return found


def _weighed(
    settings: AlgorithmConfig,
    batch: Sequence[Trajectory],
    advantages: Sequence[np.ndarray | float],
    now: Sequence[np.ndarray | None] | None,
) -> tuple[list[Weighed], dict[str, float]]:
    """(what the loss reads, correction/mean and the fraction of tokens at the cap)."""
    if now is None:
        return [Weighed(a) for a in advantages], {}
    found, weights, capped = [], [], []
    for t, a, lp in zip(batch, advantages, now, strict=True):
        if lp is None:
            found.append(Weighed(a))
            continue
        w, at_cap = correction(settings, t.logprobs, lp)
        assert w is not None
        found.append(Weighed(a, lp, w))
        weights.append(w)
        capped.append(at_cap)
    return found, {
        "correction/mean": float(np.concatenate(weights).mean()),
        "correction/capped": float(np.concatenate(capped).mean()),
    }


def _updates(trainer: Trainer, number: int) -> int:
    """How many the optimizer has made, by its own count; by the step's number where it keeps none."""
    counts = optax.tree.get_all_with_path(trainer.optimizer_state, "count")
    return int(counts[0][1]) if counts else number - 1


def _combined(metrics: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    names = metrics[0].keys() - {"lr"}
    found = {n: float(np.mean([m[n] for m in metrics])) for n in sorted(names) if all(n in m for m in metrics)}
    return found | {"lr": metrics[-1]["lr"], "updates": len(metrics)}
