"""A step's optimizer updates: the batch, `train.epochs` times, in `train.mini_batches` parts.

The record is held against the trainer once: the first part's as it is trained on, the others' before the first update
moves the weights. Ratios are to the record; where the recipe corrects for other sampling weights, to the trainer's
log-probabilities before the first update, and the correction carries the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from lockstep.algorithm_section import AlgorithmConfig
from lockstep.config import Config
from lockstep.train.batching import Geometry, Weighed, make_micro_batches
from lockstep.train.critic import Critic
from lockstep.train.optimizer import updates_made
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


@dataclass(frozen=True)
class Work:
    """What a step trains on. advantages: per sample, of all its tokens or [T]. returns: for the critic, [T] each, or
    None. stale, trunks: as `Trainer.step` takes them, of the batch in its order. recompute: asked for what the first
    part does not show. silent: nothing is updated, only held against the record: a KL or an entropy in the loss, a
    momentum and a weight decay move weights also where every advantage is 0."""

    number: int
    batch: Sequence[Trajectory]
    advantages: Sequence[np.ndarray | float]
    recompute: Recompute
    stale: Mapping[int, np.ndarray | None]
    trunks: Sequence[jax.Array] | None = None
    returns: Sequence[np.ndarray] | None = None
    silent: bool = False


def update(config: Config, trainer: Trainer, critic: Critic | None, geometry: Geometry, work: Work) -> StepResult:
    """All updates of a step.

    Metrics are means over the updates, but for `lr`, the last one's, and `updates`, their count; the result's
    log-probabilities are those before the first.
    """
    settings, train, batch = config.algorithm, config.train, work.batch
    # A part needs tokens, so what has none is not drawn for one.
    real = np.flatnonzero([len(t.completion_ids) > 0 for t in batch])
    drawn = parts(len(real), train.epochs, train.mini_batches, (config.run.seed, work.number))
    whole = np.arange(len(batch))
    plan = [[real[p] if len(cuts) > 1 else whole for p in cuts] for cuts in drawn]
    rests = work.silent or (critic is not None and critic.trains_alone(work.number - 1))
    corrects = settings.correction != "none"
    now: list[np.ndarray | None] = [None] * len(batch)
    # The first part's come out of its own update, before which no weight has moved.
    asked = whole if corrects or rests else np.setdiff1d(whole, plan[0][0])
    if len(asked):
        for i, lp in zip(asked, work.recompute([batch[i] for i in asked.tolist()]), strict=True):
            now[i] = lp
    weighed, counts = _weighed(settings, batch, work.advantages, now if corrects else None)
    if rests:
        trainer.require_records(batch, [work.stale.get(i, lp) for i, lp in enumerate(now)])
    results: list[StepResult] = []
    values: list[dict[str, float]] = []
    for epoch, cuts in enumerate(plan):
        for indices in (cut.tolist() for cut in cuts):
            chosen = [batch[i] for i in indices]
            if not rests:
                held = _held_against(indices, work.stale, now, first=not results, again=epoch > 0)
                micro = make_micro_batches(chosen, [weighed[i] for i in indices], config.rollout.temperature, geometry)
                own = work.trunks if len(chosen) == len(batch) else None
                done = updates_made(trainer.optimizer_state)
                results.append(trainer.step(micro, chosen, work.number - 1 if done is None else done, own, held))
            if critic is not None and work.returns is not None and not work.silent:
                values.append(_critic_step(critic, chosen, [work.returns[i] for i in indices], work.number))
    counts |= _means(values) | {"updates": len(results)}
    if len(results) == 1:
        return StepResult(results[0].metrics | counts, results[0].logprobs)
    if results:
        for i, lp in zip(plan[0][0].tolist(), results[0].logprobs, strict=True):
            now[i] = lp
        counts["lr"] = results[-1].metrics["lr"]
    held_pairs = [
        (t.logprobs, lp)
        for i, (t, mine) in enumerate(zip(batch, now, strict=True))
        if mine is not None and (lp := work.stale.get(i, mine)) is not None
    ]
    if held_pairs:
        counts |= mismatch(np.concatenate([a for a, _ in held_pairs]), np.concatenate([b for _, b in held_pairs]))
    counts["tokens/trained"] = sum(t.num_sampled for t in batch)
    return StepResult(_means([r.metrics for r in results]) | counts, now)


def _critic_step(critic: Critic, chosen: Sequence[Trajectory], returns: Sequence[np.ndarray], number: int) -> Any:
    old = [t.values for t in chosen if t.values is not None]
    assert len(old) == len(chosen), "the critic has not valued these samples"
    done = updates_made(critic.model.optimizer_state)
    return critic.step(chosen, returns, old, number - 1 if done is None else done)


def _held_against(
    indices: Sequence[int],
    stale: Mapping[int, np.ndarray | None],
    now: Sequence[np.ndarray | None],
    *,
    first: bool,
    again: bool,
) -> dict[int, np.ndarray | None]:
    """What `Trainer.step` is to hold each record against, by place in the part; what is not named is compared with what
    the step itself computes. first: no update has moved the weights yet. again: the record was compared before."""
    found: dict[int, np.ndarray | None] = {}
    for place, i in enumerate(indices):
        if again:
            found[place] = None
        elif i in stale:
            found[place] = stale[i]
        elif not first:
            found[place] = now[i]
    return found


def _weighed(
    settings: AlgorithmConfig,
    batch: Sequence[Trajectory],
    advantages: Sequence[np.ndarray | float],
    now: Sequence[np.ndarray | None] | None,
) -> tuple[list[Weighed], dict[str, Any]]:
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


def _means(metrics: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of what all have."""
    names = sorted(set.intersection(*(set(m) for m in metrics))) if metrics else []
    return {name: float(np.mean([m[name] for m in metrics])) for name in names}
