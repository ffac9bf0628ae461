"""What an algorithm is: a rule for advantages and a rule for the objective. The rest of the loss is common.

class Mine(Algorithm):
    def advantages(self, samples):               # numpy, once per step, over the whole batch
        return per_group(samples, lambda r: r - r.mean())

    def objective(self, logp, ratio, tokens):    # jax, per token; what is maximised
        return ratio * tokens.advantage, jnp.zeros_like(ratio, bool)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from lockstep.algorithm_section import AlgorithmConfig
from lockstep.algorithms.losses import (
    Tokens,
    Totals,
    aggregated,
    clipped_surrogate,
    kl_estimate,
    masked,
    policy_ratio,
)
from lockstep.errors import AlgorithmError, RewardError

LARGEST_REWARD = 1e30  # the squares of a batch of these add up in float64, and float32 holds them


@dataclass(frozen=True)
class Samples:
    """A step's samples, as advantages are made from them; B of them.

    rewards [B] float64, finite (the overlong penalty taken off). group_ids [B]. lengths [B]: tokens of each, T.
    earned: of each, [T] float64, the parts of its reward that single tokens earned (turns'); None: none did. penalties:
    of each, [T] float64 to be taken off the reward of each token (KL in the reward), or None. values: of
    each, [T] float64: the critic's estimate of the reward to come, before each token; None where there is no critic.
    """

    rewards: np.ndarray
    group_ids: Sequence[str]
    lengths: np.ndarray
    penalties: Sequence[np.ndarray] | None = None
    values: Sequence[np.ndarray] | None = None
    earned: Sequence[np.ndarray] | None = None

    @staticmethod
    def of(rewards: Sequence[float] | np.ndarray, group_ids: Sequence[str], **more: Any) -> Samples:
        """Checked. Without lengths, each has one token. Raises ValueError for a reward that is not finite: failed
        samples are dropped before this point, not averaged in. RewardError for one that no deviation can be made of."""
        values = np.asarray(rewards, np.float64)
        if values.shape != (len(group_ids),):
            raise ValueError(f"expected one reward per group id, got {values.shape} rewards and {len(group_ids)} ids")
        if not np.isfinite(values).all():
            bad = int(np.flatnonzero(~np.isfinite(values))[0])
            raise ValueError(
                f"reward of sample {bad} (group {group_ids[bad]!r}) is {values[bad]}; drop failed samples first"
            )
        if np.abs(values).max(initial=0) > LARGEST_REWARD:
            bad = int(np.abs(values).argmax())
            raise RewardError(
                f"the reward of sample {bad} (group {group_ids[bad]!r}) is {values[bad]:.3g}; expected at most "
                f"{LARGEST_REWARD:g}, whose squares add up to a deviation. Scale the reward"
            )
        lengths = np.asarray(more.pop("lengths", np.ones(len(values), np.int64)))
        return Samples(values, list(group_ids), lengths, **more)

    @property
    def outcomes(self) -> np.ndarray:
        """[B] the reward of each sample as a whole, its tokens' penalties taken off."""
        if self.penalties is None:
            return self.rewards
        return self.rewards - np.array([p.sum() for p in self.penalties])

    def token_rewards(self) -> list[np.ndarray]:
        """Of each sample [T]: the penalties, negative; what each token earned, and at the last the rest of the
        reward."""
        found = [np.zeros(n) for n in self.lengths]
        for i, r in enumerate(found):
            if self.penalties is not None:
                r -= self.penalties[i]
            if not len(r):
                continue
            if self.earned is None:
                r[-1] += self.rewards[i]
            else:
                r += self.earned[i]
                r[-1] += self.rewards[i] - self.earned[i].sum()
        return found

    @property
    def groups(self) -> dict[str, list[int]]:
        """Indices by group, in order of appearance. Groups are found by id, never by position, and may differ in
        size."""
        found: dict[str, list[int]] = {}
        for i, group in enumerate(self.group_ids):
            found.setdefault(group, []).append(i)
        return found


@dataclass(frozen=True)
class Advantages:
    """per_sample [B] float64; where tokens of a sample differ, their mean. per_token: then, of each sample, [T].
    used [B] bool: which samples are trained on. zero_variance: groups whose rewards (a KL not taken off) are all equal;
    groups: how many there were. returns: for the critic, of each sample [T] float64."""

    per_sample: np.ndarray
    zero_variance: int
    groups: int
    per_token: Sequence[np.ndarray] | None = None
    used: np.ndarray | None = None
    returns: Sequence[np.ndarray] | None = None

    def of(self, i: int) -> np.ndarray | float:
        """What the tokens of sample i are weighted with."""
        return self.per_sample[i] if self.per_token is None else self.per_token[i]


@dataclass(frozen=True)
class Algorithm:
    """settings: the recipe's [algorithm]. length: tokens that a completion counts for, with aggregate = "constant".
    Stateless: what a step needs comes in as arguments.

    by_group: whether a group's advantages depend on that group alone. needs_values: whether they are made from a
    critic's. options: a class of one's own names its settings here, with their defaults.
    """

    settings: AlgorithmConfig
    length: float = 1.0
    by_group: ClassVar[bool] = True
    needs_values: ClassVar[bool] = False
    options: ClassVar[Mapping[str, Any]] = MappingProxyType({})

    def __hash__(self) -> int:
        return hash((type(self), self.settings.model_dump_json(), self.length))

    def option(self, name: str) -> Any:
        """One of `options`, as the recipe has it."""
        return self.settings.options.get(name, self.options[name])

    @property
    def kl_in_loss(self) -> bool:
        return self.settings.kl_in_loss

    def advantages(self, samples: Samples) -> Advantages:
        """From a step's whole batch."""
        raise NotImplementedError

    def objective(self, logp: jax.Array, ratio: jax.Array, tokens: Tokens) -> tuple[jax.Array, jax.Array]:
        """(what is maximised per token [M], whether a clip was active [M] bool). Masked slots of all arrays are 0.
        ratio [M]: the policy's over the recorded, per `settings.ratio`."""
        raise NotImplementedError

    def _objective(self, logp: jax.Array, ratio: jax.Array, tokens: Tokens) -> tuple[jax.Array, jax.Array]:
        """`objective`, its shapes checked: an array of another shape would be broadcast into some other loss."""
        try:
            found, expected = self.objective(logp, ratio, tokens), tokens.mask.shape
        except Exception as error:
            what = str(error).partition("\n")[0]  # jax explains itself at length
            raise AlgorithmError(
                f"algorithm {self.settings.name}: objective raised {type(error).__name__}: {what}. It is traced: "
                "jax.numpy instead of numpy, and no `if` on values (docs/algorithms.md)"
            ) from error
        shapes = [getattr(x, "shape", None) for x in found] if isinstance(found, tuple) else [type(found).__name__]
        if shapes != [expected, expected]:
            raise AlgorithmError(
                f"algorithm {self.settings.name}: objective gave {shapes}, expected two arrays of shape {expected}: "
                "what is maximised per token, and whether a clip was active (docs/algorithms.md)"
            )
        return found[0], found[1].astype(bool)

    def loss(
        self, logp: jax.Array, entropy: jax.Array | None, tokens: Tokens, totals: Totals
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """This micro-batch's share of the loss (a scalar, differentiated in logp [M] and entropy [M] only) and of the
        metrics. Shares add up over micro-batches: denominators are of the whole batch. Runs under jit.

            L = -mean(objective) + kl_coef mean(w KL) - entropy_coef mean(w H),      mean by `settings.aggregate`
        """
        s, mask = self.settings, tokens.mask
        logp, old, ref, advantage, weight = (
            masked(x, mask) for x in (logp, tokens.old_logp, tokens.ref_logp, tokens.advantage, tokens.weight)
        )
        tokens = tokens._replace(
            old_logp=old, ref_logp=ref, advantage=advantage, weight=weight, sequence=jnp.where(mask, tokens.sequence, 0)
        )
        ratio = policy_ratio(s.ratio, logp, tokens)
        objective, clipped = self._objective(logp, ratio, tokens)
        mean = partial(aggregated, s.aggregate, tokens=tokens, totals=totals, length=self.length)

        def token_mean(x: jax.Array) -> jax.Array:
            return jnp.where(mask, x, 0.0).sum() / totals.tokens

        loss = mean(-objective)
        if self.kl_in_loss:
            loss += s.kl_coef * mean(weight * kl_estimate(s.kl_estimator, logp, ref))
        metrics = {
            "clip_fraction": token_mean(clipped.astype(jnp.float32)),
            "clip_fraction/low": token_mean((clipped & (advantage < 0)).astype(jnp.float32)),
            "ratio_less_1": token_mean(ratio - 1.0),  # so that shares of an exact 1 add up to an exact 1
        }
        if entropy is not None:
            entropy = masked(entropy, mask)
            metrics["entropy"] = token_mean(entropy)
            if s.entropy_coef:
                loss -= s.entropy_coef * mean(weight * entropy)
        return loss, {"loss": loss, **metrics}

    def denominator(self, totals: Totals) -> float:
        """What sums over tokens (of sequence means, for sequence_mean) are divided by."""
        return {
            "token_mean": float(totals.tokens),
            "sequence_mean": float(totals.sequences),
            "constant": float(totals.sequences) * self.length,
        }[self.settings.aggregate]


class Clipped(Algorithm):
    """The objective of PPO: min(r A, clip(r, 1 - low, 1 + high) A), with the dual clip where the recipe has one."""

    def objective(self, logp: jax.Array, ratio: jax.Array, tokens: Tokens) -> tuple[jax.Array, jax.Array]:
        s = self.settings
        return clipped_surrogate(ratio, tokens.advantage, s.clip_low, s.clip_high, s.dual_clip)
