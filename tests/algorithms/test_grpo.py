"""GRPO's loss as a whole: against its formula, on policies small enough to enumerate, and with garbage where masked."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.algorithm_section import KLEstimator
from lockstep.algorithms import make_algorithm
from lockstep.algorithms.base import Algorithm
from lockstep.algorithms.losses import Tokens, Totals
from lockstep.config import AlgorithmConfig

ESTIMATORS: tuple[KLEstimator, ...] = ("k1", "k2", "k3")


def grpo(**settings: Any) -> Algorithm:
    """As a recipe with these settings makes it."""
    return make_algorithm(AlgorithmConfig(**({"clip_high": 0.28} | settings)), 8)


def batch(num_tokens: int, seed: int = 0, masked: tuple[int, ...] = ()) -> tuple[np.ndarray, Tokens, Totals]:
    """Random log-probabilities around the clip's bounds; sequences of three tokens."""
    rng = np.random.default_rng(seed)
    old = -rng.random(num_tokens) * 3 - 0.5
    mask = np.ones(num_tokens, bool)
    mask[list(masked)] = False
    logp, old, ref, advantage = (
        np.asarray(x, np.float32)
        for x in (old + rng.normal(0, 0.3, num_tokens), old, old + rng.normal(0, 0.2, num_tokens),
                  rng.normal(0, 1, num_tokens))
    )  # fmt: skip
    sequence = np.arange(num_tokens, dtype=np.int32) // 3
    totals = Totals(np.float32(mask.sum()), np.float32(len(set(sequence[mask].tolist()))))
    return logp, Tokens(mask, old, ref, advantage, sequence, np.ones(num_tokens, np.float32)), totals


@cache
def compiled(algorithm: Algorithm) -> Any:
    return jax.jit(jax.value_and_grad(algorithm.loss, has_aux=True))


def value_and_grad(algorithm: Algorithm, logp: Any, tokens: Tokens, totals: Totals) -> tuple[Any, Any, Any]:
    (loss, metrics), gradient = compiled(algorithm)(logp, None, tokens, totals)
    return np.asarray(loss), {k: np.asarray(v) for k, v in metrics.items()}, np.asarray(gradient)


def by_formula(
    algorithm: Algorithm, logp: np.ndarray, tokens: Tokens, totals: Totals
) -> tuple[float, np.ndarray, float]:
    """(loss, d loss / d logp, clip fraction) token by token in float64, from the formula in the docstring."""
    loss, gradient, clips = 0.0, np.zeros(len(logp)), 0
    for t in np.flatnonzero(tokens.mask):
        new, old, ref, adv = (float(x[t]) for x in (logp, tokens.old_logp, tokens.ref_logp, tokens.advantage))
        ratio = np.exp(new - old)
        bound = 1 + algorithm.settings.clip_high if adv > 0 else 1 - algorithm.settings.clip_low
        clipped = ratio > bound if adv > 0 else ratio < bound and adv < 0
        clips += bool(clipped)
        loss -= (bound if clipped else ratio) * adv
        gradient[t] -= 0.0 if clipped else ratio * adv
        d = ref - new
        kl, slope = {"k1": (-d, 1.0), "k2": (d * d / 2, -d), "k3": (np.exp(d) - 1 - d, 1 - np.exp(d))}[
            algorithm.settings.kl_estimator
        ]
        loss += algorithm.settings.kl_coef * kl
        gradient[t] += algorithm.settings.kl_coef * slope
    return loss / totals.tokens, gradient / totals.tokens, clips / totals.tokens


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("kl_coef", [0.0, 0.7])
def test_loss_gradient_and_clip_fraction_are_the_formulas(estimator: KLEstimator, kl_coef: float) -> None:
    algorithm = grpo(clip_low=0.2, clip_high=0.28, kl_coef=kl_coef, kl_estimator=estimator)
    logp, tokens, totals = batch(48, masked=(0, 7, 47))
    loss, metrics, gradient = value_and_grad(algorithm, logp, tokens, totals)
    expected_loss, expected_gradient, clip_fraction = by_formula(algorithm, logp, tokens, totals)
    assert 0.1 < clip_fraction < 0.9
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(metrics["clip_fraction"], clip_fraction, rtol=1e-6)
    assert metrics["loss"] == loss
    ratio = np.exp(logp - tokens.old_logp)[tokens.mask].mean()
    np.testing.assert_allclose(1 + metrics["ratio_less_1"], ratio, rtol=1e-5)
    assert loss.dtype == gradient.dtype == np.float32


@pytest.mark.parametrize("garbage", [1e9, -1e9, np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_masked_slots_may_hold_anything(garbage: float, estimator: KLEstimator) -> None:
    """Bit for bit the same loss, gradient and metrics, whichever field the garbage is in, or all of them."""
    algorithm = grpo(kl_coef=0.3, kl_estimator=estimator)
    logp, tokens, totals = batch(24, masked=(0, 1, 5, 11, 23))
    hidden = ~tokens.mask

    def spoiled(x: np.ndarray) -> np.ndarray:
        return np.where(hidden, np.asarray(garbage, x.dtype) if x.dtype == np.float32 else 2**31 - 1, x)

    clean = value_and_grad(algorithm, logp, tokens, totals)
    fields = ("old_logp", "ref_logp", "advantage", "sequence")
    dirty = [(spoiled(logp), tokens), *((logp, tokens._replace(**{f: spoiled(getattr(tokens, f))})) for f in fields)]
    dirty.append((spoiled(logp), tokens._replace(**{f: spoiled(getattr(tokens, f)) for f in fields})))
    for bad_logp, bad_tokens in dirty:
        loss, metrics, gradient = value_and_grad(algorithm, bad_logp, bad_tokens, totals)
        assert loss.tobytes() == clean[0].tobytes()
        assert gradient.tobytes() == clean[2].tobytes()
        assert {k: v.tobytes() for k, v in metrics.items()} == {k: v.tobytes() for k, v in clean[1].items()}
        assert (gradient[hidden] == 0).all()


def test_on_policy_the_ratio_is_exactly_one_and_nothing_is_clipped() -> None:
    logp, tokens, totals = batch(32, masked=(3,))
    _, metrics, gradient = value_and_grad(grpo(), logp, tokens._replace(old_logp=logp), totals)
    assert metrics["ratio_less_1"] == 0.0 and metrics["clip_fraction"] == 0.0
    np.testing.assert_allclose(gradient, np.where(tokens.mask, -tokens.advantage / totals.tokens, 0), rtol=1e-6)


def test_zero_advantage_gives_exactly_zero_gradient() -> None:
    logp, tokens, totals = batch(32)
    loss, _, gradient = value_and_grad(grpo(), logp, tokens._replace(advantage=np.zeros(32, np.float32)), totals)
    assert loss == 0.0 and (gradient == 0.0).all()


def test_kl_in_the_loss_has_a_gradient() -> None:
    """Not only a value: at zero advantage the KL term alone moves the policy."""
    logp, tokens, totals = batch(12)
    flat = tokens._replace(advantage=np.zeros(12, np.float32))
    for estimator in ESTIMATORS:
        gradient = value_and_grad(grpo(kl_coef=0.5, kl_estimator=estimator), logp, flat, totals)[2]
        assert (gradient != 0.0).all()


def test_without_a_kl_term_the_reference_is_not_read() -> None:
    logp, tokens, totals = batch(12)
    spoiled = tokens._replace(ref_logp=np.full(12, np.nan, np.float32))
    clean, dirty = (value_and_grad(grpo(), logp, t, totals) for t in (tokens, spoiled))
    assert clean[0] == dirty[0] and (clean[2] == dirty[2]).all()
    assert not grpo().kl_in_loss and grpo(kl_coef=1e-3).kl_in_loss


def test_shares_of_micro_batches_add_up() -> None:
    """Global denominators: unequal parts of a batch, each with the whole batch's totals, sum to the whole."""
    algorithm = grpo(kl_coef=0.2)
    logp, tokens, totals = batch(30, masked=(4, 29))
    loss, metrics, gradient = value_and_grad(algorithm, logp, tokens, totals)
    cuts = [slice(0, 3), slice(3, 24), slice(24, 30)]
    parts = [value_and_grad(algorithm, logp[c], Tokens(*(x[c] for x in tokens)), totals) for c in cuts]
    np.testing.assert_allclose(sum(p[0] for p in parts), loss, rtol=1e-6)
    np.testing.assert_allclose(np.concatenate([p[2] for p in parts]), gradient, rtol=1e-6)
    for name, value in metrics.items():
        np.testing.assert_allclose(sum(p[1][name] for p in parts), value, rtol=1e-6)
    own = [value_and_grad(algorithm, logp[c], Tokens(*(x[c] for x in tokens)),
                          Totals(np.float32(tokens.mask[c].sum()), np.float32(1))) for c in cuts]  # fmt: skip
    assert abs(np.mean([p[0] for p in own]) - loss) > 1e-2, "a mean of means would have passed"


def test_permuting_tokens_permutes_the_gradient() -> None:
    algorithm = grpo(kl_coef=0.2)
    logp, tokens, totals = batch(30, masked=(4, 29))
    order = np.random.default_rng(1).permutation(30)
    loss, _, gradient = value_and_grad(algorithm, logp, tokens, totals)
    moved = value_and_grad(algorithm, logp[order], Tokens(*(x[order] for x in tokens)), totals)
    np.testing.assert_allclose(moved[0], loss, rtol=1e-6)
    np.testing.assert_array_equal(moved[2], gradient[order])


@pytest.mark.parametrize("theta", [np.array([0.4, -0.7]), np.array([-1.0, 2.0])])
def test_on_a_two_token_bandit_the_expected_gradient_is_the_policy_gradient(theta: np.ndarray) -> None:
    """sum_a p(a) grad loss(a) = -grad sum_a p(a) R(a), by enumeration. Each action counts with its probability."""
    reward = np.array([1.5, -0.5])
    t = jnp.asarray(theta, jnp.float32)
    p = np.exp(theta) / np.exp(theta).sum()
    old = jax.nn.log_softmax(t)
    tokens = Tokens(np.ones(2, bool), old, np.zeros(2, np.float32), np.float32(p * reward), np.arange(2), np.ones(2))
    one = Totals(np.float32(1), np.float32(1))
    gradient = jax.grad(lambda x: grpo().loss(jax.nn.log_softmax(x), None, tokens, one)[0])(t)
    np.testing.assert_allclose(gradient, -p * (reward - (p * reward).sum()), atol=1e-6)
