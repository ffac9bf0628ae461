"""What a step trains on: sampled, scored, accepted, judged against each other.

    collector = Collector(cluster, batches, progress, watchdog)
    experience = collector.collect(step, version, cursor, first_version, clock)

Where the recipe has dynamic sampling, groups whose rewards are all equal are replaced by groups of further prompts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from lockstep.algorithms.base import Advantages, Samples
from lockstep.algorithms.checked import judged
from lockstep.algorithms.losses import kl_estimate
from lockstep.errors import RewardError, ServiceError
from lockstep.progress import Progress
from lockstep.train.assembly import Cluster
from lockstep.train.batching import kept_mass
from lockstep.train.clock import Clock
from lockstep.train.rewarding import rewarded
from lockstep.train.rollouts import Batch, Batches, accepted, consumable, dropped_counts
from lockstep.train.scoring import with_reference
from lockstep.train.watchdog import Watchdog, dump_stacks
from lockstep.types import Prompt, Trajectory


@dataclass
class Experience:
    """One step's. prompts: all that were asked for. everything: all that was sampled, scored or not. kept: those that
    advantages were made from, in groups. batch: those that are trained on, with what reference and critic say;
    advantages: per sample of the batch, of all its tokens or [T]. returns: [T] each, where there is a critic. trunks:
    the frozen layers' output, where that was needed. counts: for the step's metrics. asked: as it was asked for, in
    rounds. silent: nothing is left to train on, and the batch has advantages of 0."""

    prompts: list[Prompt]
    everything: list[Trajectory]
    kept: list[Trajectory]
    groups: Advantages
    batch: list[Trajectory]
    advantages: list[np.ndarray | float]
    returns: list[np.ndarray] | None
    trunks: list[jax.Array] | None
    counts: dict[str, Any]
    asked: list[Batch]
    silent: bool = False


@dataclass
class _Round:
    """Of all rounds so far. flat: groups left out because their rewards are all equal."""

    asked: list[Batch] = field(default_factory=list)
    everything: list[Trajectory] = field(default_factory=list)
    kept: list[Trajectory] = field(default_factory=list)
    flat: list[Trajectory] = field(default_factory=list)
    dropped: dict[str, str] = field(default_factory=dict)
    scored: Counter[str] = field(default_factory=Counter)


class Collector:
    def __init__(
        self, cluster: Cluster, batches: Batches, progress: Progress, watchdog: Watchdog, run_dir: Path
    ) -> None:
        self.cluster, self.batches, self.progress, self.watchdog = cluster, batches, progress, watchdog
        self.config, self.run_dir = cluster.config, run_dir

    def collect(self, number: int, version: int, cursor: int, first_version: int, clock: Clock) -> Experience:
        """Step `number`'s. version: of the weights that train; cursor: prompts used before; first_version: the oldest
        whose weights this process has published."""
        found = _Round()
        wanted = self.config.rollout.prompts
        for _ in range(1 + self.config.algorithm.dynamic_rounds):
            clock.enter("generate")
            used = sum(len(b.prompts) for b in found.asked)
            asked = self._generate(number, cursor + used, first_version)
            found.asked.append(asked)
            oldest = max(0, version - self.config.rollout.staleness)
            trajectories, dropped = consumable(asked, oldest, self.config.rollout.on_lost)
            for group, why in dropped.items():
                self._warn(f"step {number}: group {group!r} is left out: {why}")
            found.dropped |= dropped
            clock.enter("score")
            trajectories, scored = rewarded(
                self.cluster.reward,
                self.cluster.tokenizer,
                asked.prompts,
                trajectories,
                self._warn,
                "fail" if self.config.environment is None else self.config.environment.on_error,
            )
            found.scored.update(scored)
            found.everything += trajectories
            kept = self._accepted([t for t in trajectories if t.failed is None], version)
            if not self.config.algorithm.dynamic_rounds:
                found.kept = kept
                break
            flat = self._flat(kept)
            found.kept += [t for t in kept if t.group_id not in flat]
            found.flat += [t for t in kept if t.group_id in flat]
            if len({t.group_id for t in found.kept}) >= wanted:
                break
        _require_some(number, found)
        return self._judged(number, found)

    def _warn(self, line: str) -> None:
        self.progress.event(line, warning=True)

    def _judged(self, number: int, found: _Round) -> Experience:
        """With advantages and the reference's log-probabilities, and the choice of what to train on."""
        counts: dict[str, Any] = {}
        kept = found.kept
        if self.config.algorithm.dynamic_rounds:
            # Nothing to learn from is no reason to stop the run: the flat groups are then what there is.
            groups = list(dict.fromkeys(t.group_id for t in kept or found.flat))
            chosen = set(groups[: self.config.rollout.prompts])
            kept = [t for t in kept or found.flat if t.group_id in chosen]
            counts = {
                "dynamic/rounds": len(found.asked),
                "dynamic/flat_groups": len({t.group_id for t in found.flat}),
                "dynamic/surplus_groups": len(groups) - len(chosen),
            }
        algorithm, trunks = self.cluster.trainer.algorithm, None
        if self.config.algorithm.kl_in_reward:
            kept, _ = with_reference(self.cluster, kept)
        if self.cluster.critic is not None:
            values = self.cluster.critic.values(kept)
            kept = [replace(t, values=v) for t, v in zip(kept, values, strict=True)]
        groups_found = judged(algorithm, self.samples(kept))
        picked, silent = self._select(kept, groups_found, number)
        batch = [kept[i] for i in picked]
        if not self.config.algorithm.kl_in_reward:
            batch, trunks = with_reference(self.cluster, batch)
        return Experience(
            [p for b in found.asked for p in b.prompts],
            found.everything,
            kept,
            groups_found,
            batch,
            [0.0 if silent else groups_found.of(i) for i in picked],
            None if groups_found.returns is None else [groups_found.returns[i] for i in picked],
            trunks,
            counts | dropped_counts(found.dropped) | dict(found.scored),
            found.asked,
            silent,
        )

    def samples(self, kept: Sequence[Trajectory]) -> Samples:
        """As the algorithm takes them: rewards less the overlong penalty, and where the KL is in the reward each
        token's share of it."""
        s = self.config.algorithm
        lengths = np.array([t.num_sampled for t in kept])
        penalties = None
        if s.kl_in_reward:
            penalties = [s.kl_coef * _kl(s.kl_estimator, t) for t in kept]
        earned = [t.earned for t in kept] if any(t.turn_rewards is not None for t in kept) else None
        return Samples.of(
            self._rewards(kept),
            [t.group_id for t in kept],
            lengths=lengths,
            penalties=penalties,
            values=_values(kept),
            earned=earned,
        )

    def _flat(self, kept: Sequence[Trajectory]) -> set[str]:
        """Groups whose rewards, the overlong penalty taken off, are all equal."""
        rewards: dict[str, set[float]] = {}
        for t, reward in zip(kept, self._rewards(kept), strict=True):
            rewards.setdefault(t.group_id, set()).add(float(reward))
        return {group for group, found in rewards.items() if len(found) == 1}

    def _rewards(self, kept: Sequence[Trajectory]) -> np.ndarray:
        s, most = self.config.algorithm, self.config.max_completion_tokens
        rewards = np.array([t.reward for t in kept], np.float64)
        if not s.overlong_tokens:
            return rewards
        lengths = np.array([len(t.completion_ids) for t in kept])  # what `most` counts, an environment's words too
        return rewards - overlong(lengths, most, s.overlong_tokens, s.overlong_penalty)

    def _select(self, kept: Sequence[Trajectory], groups: Advantages, number: int) -> tuple[np.ndarray, bool]:
        """(indices of the rollouts to train on, in order; whether there are none: then of those whose numbers the step
        logs, and that change nothing)."""
        config = self.config
        used = np.ones(len(kept), bool) if groups.used is None else groups.used.copy()
        if config.algorithm.mask_truncated:
            used &= np.array([t.finish_reason != "length" for t in kept])
        if not used.any():
            self._warn(f"step {number}: no completion is left to train on; nothing is updated")
            return np.arange(len(kept)), True
        indices = np.flatnonzero(used)
        if config.train.select == "all":
            return indices, False
        size = np.abs(groups.per_sample[indices])
        ties = np.random.default_rng((config.run.seed, number)).random(len(indices))
        return np.sort(indices[np.lexsort((ties, -size))[: config.train.select_count]]), False

    def _generate(self, number: int, cursor: int, first_version: int) -> Batch:
        """The step's batch; as many of those that follow as the bound allows are asked for, and go on meanwhile."""
        rollout = self.config.rollout
        ahead = range(number, min(number + rollout.staleness, self.config.run.steps) + 1)
        self.batches.ask(
            [
                Batch(
                    later,
                    self.cluster.task.prompts(cursor + (later - number) * rollout.prompts, rollout.prompts),
                    max(first_version, later - 1 - rollout.staleness),
                )
                for later in ahead
                if later not in self.batches
            ]
        )
        try:
            with self.watchdog.watching(lambda: self.batches.waits_for(number)):
                return self.batches.collect(number, rollout.deadline_s)
        except ServiceError:
            self.progress.event(f"what every thread did: {dump_stacks(self.run_dir)}")
            raise

    def _accepted(self, trajectories: list[Trajectory], version: int) -> list[Trajectory]:
        cut = self.config.rollout.truncation == "correct"
        return accepted(trajectories, self.cluster.fingerprint, version, cut=cut)


def _require_some(number: int, found: _Round) -> None:
    """Raise, with the reason, where no round of the step left a sample to train on."""
    if found.kept or found.flat:
        return
    failed = [t.failed for t in found.everything if t.failed is not None]
    if failed:
        raise RewardError(f"every one of the {len(failed)} samples failed to score; the first: {failed[0]}")
    group, why = next(iter(found.dropped.items()))
    raise ServiceError(
        f"step {number} has nothing to train on, all {len(found.dropped)} groups were dropped; {group!r} {why}"
    )


def overlong(lengths: np.ndarray, most: int, tokens: int, penalty: float) -> np.ndarray:
    """[B] what completions lose for their length: 0 up to most - tokens, then linearly up to `penalty` at most (DAPO,
    arXiv:2503.14476, equation 13)."""
    return penalty * np.clip((lengths - (most - tokens)) / tokens, 0.0, 1.0)


def _kl(name: Any, t: Trajectory) -> np.ndarray:
    """[T] float64, of the record, weighted with the mass kept where ids were cut off."""
    assert t.reference_logprobs is not None, "the reference has not scored this sample"
    logp = t.logprobs.astype(np.float64)
    return kept_mass(t) * kl_estimate(name, logp, t.reference_logprobs.astype(np.float64), np)


def _values(kept: Sequence[Trajectory]) -> list[np.ndarray] | None:
    found = [t.values.astype(np.float64) for t in kept if t.values is not None]
    return found if len(found) == len(kept) else None


def rounds_busy(batches: Batches, asked: Sequence[Batch]) -> Mapping[int, tuple[float, float]]:
    """Step -> from when to when the rollout worked on it, with all rounds of this step as one."""
    found = batches.busy()
    first = [b.first for b in asked if b.first is not None]
    if first:
        found[asked[0].number] = (min(first), max(b.last for b in asked))
    return found
