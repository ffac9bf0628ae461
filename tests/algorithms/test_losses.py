"""The loss core: KL estimators by value and by the gradient that they really have, the clip in all its quadrants."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.algorithm_section import KLEstimator
from lockstep.algorithms import make_algorithm
from lockstep.algorithms.losses import Tokens, Totals, clipped_surrogate, kl_estimate, masked
from lockstep.config import AlgorithmConfig
from lockstep.train.record import mean_kl
from lockstep.types import Fingerprint, Trajectory

ESTIMATORS: tuple[KLEstimator, ...] = ("k1", "k2", "k3")
LOW, HIGH = 0.2, 0.28

# Two-token policies (logits) and references (log-probabilities).
POLICIES = [np.array([0.3, -0.9]), np.array([-2.0, 1.5]), np.array([0.0, 0.0])]
REFERENCES = [np.log([0.5, 0.5]), np.log([0.05, 0.95])]


def log_softmax(theta: np.ndarray) -> np.ndarray:
    return theta - np.log(np.exp(theta).sum())


def forward_kl(theta: np.ndarray, ref: np.ndarray) -> float:
    """KL(reference || policy)."""
    return float((np.exp(ref) * (ref - log_softmax(theta))).sum())


def reverse_kl(theta: np.ndarray, ref: np.ndarray) -> float:
    """KL(policy || reference)."""
    logp = log_softmax(theta)
    return float((np.exp(logp) * (logp - ref)).sum())


def numeric_gradient(f: Callable[[np.ndarray], float], theta: np.ndarray) -> np.ndarray:
    """Central differences in float64."""
    step = 1e-5
    return np.array([(f(theta + step * e) - f(theta - step * e)) / (2 * step) for e in np.eye(len(theta))])


def expected_gradient(name: KLEstimator, theta: np.ndarray, ref: np.ndarray) -> np.ndarray:
    """sum_a p(a) d k(a) / d theta: what a batch of samples from the policy gives on average. p is not differentiated,
    as samples are not."""

    def expected(t: jax.Array) -> jax.Array:
        logp = jax.nn.log_softmax(t)
        return (jax.lax.stop_gradient(jnp.exp(logp)) * kl_estimate(name, logp, jnp.asarray(ref, jnp.float32))).sum()

    return np.asarray(jax.grad(expected)(jnp.asarray(theta, jnp.float32)))


@pytest.mark.parametrize("theta", POLICIES)
@pytest.mark.parametrize("ref", REFERENCES)
def test_each_estimators_expected_gradient(theta: np.ndarray, ref: np.ndarray) -> None:
    claims = {
        "k1": np.zeros(2),
        "k2": numeric_gradient(lambda t: reverse_kl(t, ref), theta),
        "k3": numeric_gradient(lambda t: forward_kl(t, ref), theta),
    }
    for name in ESTIMATORS:
        np.testing.assert_allclose(expected_gradient(name, theta, ref), claims[name], atol=2e-6, err_msg=name)


@pytest.mark.parametrize("theta", POLICIES)
@pytest.mark.parametrize("ref", REFERENCES)
def test_as_a_reward_only_k1_is_the_kls(theta: np.ndarray, ref: np.ndarray) -> None:
    """sum_a p(a) k(a) d logp(a) / d theta: the policy gradient of a penalty that is a number by then."""

    def gradient(name: KLEstimator) -> np.ndarray:
        logp = log_softmax(theta)
        penalty = kl_estimate(name, logp, ref, np)
        return numeric_gradient(lambda t: float((np.exp(log_softmax(t)) * penalty).sum()), theta)

    reverse, forward = (numeric_gradient(lambda t, kl=kl: kl(t, ref), theta) for kl in (reverse_kl, forward_kl))
    np.testing.assert_allclose(gradient("k1"), reverse, atol=2e-6)
    np.testing.assert_allclose(gradient("k3"), reverse - forward, atol=2e-6)


@pytest.mark.parametrize("distance", [0.01, 0.1])
def test_near_the_reference_the_others_are_next_to_nothing(distance: float) -> None:
    ref, rng = np.array([0.2, -0.1, 0.4]), np.random.default_rng(0)
    theta = ref + distance * rng.standard_normal(3)
    true = numeric_gradient(lambda t: reverse_kl(t, log_softmax(ref)), theta)
    for name in ("k2", "k3"):
        penalty = kl_estimate(name, log_softmax(theta), log_softmax(ref), np)
        found = numeric_gradient(lambda t, k=penalty: float((np.exp(log_softmax(t)) * k).sum()), theta)
        assert np.linalg.norm(found) < 0.5 * distance**0.5 * np.linalg.norm(true)


def test_the_two_kl_gradients_differ() -> None:
    """So the table above tells k2 from k3."""
    theta, ref = POLICIES[1], REFERENCES[0]
    assert np.abs(expected_gradient("k2", theta, ref) - expected_gradient("k3", theta, ref)).max() > 0.05


@pytest.mark.parametrize("name", ESTIMATORS)
def test_one_formula_in_both_namespaces(name: KLEstimator) -> None:
    """numpy for the metrics, in float64 and without compiling; jax.numpy for the loss."""
    rng = np.random.default_rng(0)
    logp, ref = (-rng.random(501) * 4 for _ in range(2))
    here = kl_estimate(name, logp, ref, np)
    assert type(here) is np.ndarray and here.dtype == np.float64
    there = kl_estimate(name, jnp.asarray(logp, jnp.float32), jnp.asarray(ref, jnp.float32))
    assert isinstance(there, jax.Array) and there.dtype == jnp.float32
    np.testing.assert_allclose(there, here, rtol=1e-5, atol=1e-6)
    d = ref - logp
    np.testing.assert_allclose(here, {"k1": -d, "k2": d**2 / 2, "k3": np.exp(d) - 1 - d}[name], rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("theta", POLICIES)
@pytest.mark.parametrize("ref", REFERENCES)
def test_k1_and_k3_estimate_the_reverse_kl(theta: np.ndarray, ref: np.ndarray) -> None:
    logp = log_softmax(theta)
    for name in ("k1", "k3"):
        values = np.asarray(kl_estimate(name, jnp.asarray(logp, jnp.float32), jnp.asarray(ref, jnp.float32)))
        np.testing.assert_allclose((np.exp(logp) * values).sum(), reverse_kl(theta, ref), rtol=1e-5, atol=1e-7)


@given(st.floats(-12, 0, width=32), st.floats(-12, 0, width=32))
def test_identities_of_the_estimators(logp: float, ref: float) -> None:
    k1, k2, k3 = (float(kl_estimate(name, jnp.float32(logp), jnp.float32(ref))) for name in ESTIMATORS)
    d = float(np.float32(ref) - np.float32(logp))
    assert k1 == pytest.approx(-d, rel=0, abs=1e-37)  # XLA takes subnormal numbers for 0
    assert k2 == pytest.approx(d * d / 2, rel=1e-6, abs=1e-37)
    # float32's expm1 is right to a few units in the last place of d, which the subtraction leaves standing.
    assert k3 == pytest.approx(np.expm1(d) - d, rel=1e-5, abs=1e-6 * abs(d))
    assert k2 >= 0 and k3 >= 0
    if logp == ref:
        assert (k1, k2, k3) == (0.0, 0.0, 0.0)


def test_k3_is_never_negative_where_its_terms_cancel() -> None:
    rng = np.random.default_rng(0)
    d = (10.0 ** rng.uniform(-12, 1.5, 100_000) * rng.choice([-1, 1], 100_000)).astype(np.float32)
    k3 = np.asarray(jax.jit(lambda x: kl_estimate("k3", jnp.zeros_like(x), x))(d))
    assert (k3 >= 0).all() and np.isfinite(k3).all()


# (advantage, ratio) -> (surrogate / advantage, gradient w.r.t. logp / advantage, clip active)
QUADRANTS = {
    "A > 0, above": (2.0, 1.5, 1 + HIGH, 0.0, True),
    "A > 0, below": (2.0, 0.5, 0.5, 0.5, False),
    "A < 0, above": (-2.0, 1.5, 1.5, 1.5, False),
    "A < 0, below": (-2.0, 0.5, 1 - LOW, 0.0, True),
    "A > 0, inside": (2.0, 1.1, 1.1, 1.1, False),
    "A < 0, inside": (-2.0, 1.1, 1.1, 1.1, False),
    "A > 0, between the bounds' sizes": (1.0, 1.25, 1.25, 1.25, False),
    "A < 0, below the lower bound only": (-1.0, 0.75, 1 - LOW, 0.0, True),
    "A > 0, on policy": (3.0, 1.0, 1.0, 1.0, False),
    "A < 0, on policy": (-3.0, 1.0, 1.0, 1.0, False),
    "A = 0": (0.0, 1.7, 0.0, 0.0, False),
}


@pytest.mark.parametrize("case", QUADRANTS)
def test_clip_value_and_gradient(case: str) -> None:
    advantage, ratio, value, slope, active = QUADRANTS[case]
    old = jnp.float32(-2.0)
    logp = old + jnp.float32(np.log(ratio))

    def surrogate(x: jax.Array) -> jax.Array:
        return clipped_surrogate(jnp.exp(x - old), jnp.float32(advantage), LOW, HIGH)[0]

    got_ratio = jnp.exp(logp - old)
    got, clipped = clipped_surrogate(got_ratio, jnp.float32(advantage), LOW, HIGH)
    assert float(got) == pytest.approx(value * advantage, rel=1e-6)
    assert float(got_ratio) == pytest.approx(ratio, rel=1e-6)
    assert bool(clipped) is active
    gradient = float(jax.grad(surrogate)(logp))
    assert gradient == pytest.approx(slope * advantage, rel=1e-6)
    if active:
        assert gradient == 0.0
    if ratio == 1.0:
        assert (float(got_ratio), float(got), gradient) == (1.0, advantage, advantage)
    numeric = (float(surrogate(logp + 1e-2)) - float(surrogate(logp - 1e-2))) / 2e-2
    assert numeric == pytest.approx(gradient, rel=1e-3, abs=1e-6)


@given(st.floats(-3, 3, width=32), st.floats(-1.5, 1.5, width=32))
def test_the_surrogate_never_promises_more_than_the_ratio_or_the_clip(advantage: float, log_ratio: float) -> None:
    got = float(clipped_surrogate(jnp.exp(jnp.float32(log_ratio)), jnp.float32(advantage), LOW, HIGH)[0])
    free = np.exp(log_ratio) * advantage
    held = np.clip(np.exp(log_ratio), 1 - LOW, 1 + HIGH) * advantage
    assert got == pytest.approx(min(free, held), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("garbage", [np.nan, np.inf, -np.inf, 1e9])
def test_masking_an_input_stops_its_gradient_too(garbage: float) -> None:
    x = jnp.array([2.0, garbage, 3.0])
    mask = jnp.array([True, False, True])
    np.testing.assert_array_equal(masked(x, mask), [2.0, 0.0, 3.0])
    gradient = jax.grad(lambda y: (jnp.exp(masked(y, mask)) ** 2).sum())(x)
    assert gradient[1] == 0.0 and np.isfinite(gradient).all()


# -- where ids were cut off --------------------------------------------------------------------------------------------

# Five ids; the three likeliest are kept, with mass 14/16, so that q = (4, 2, 1) / 7: seven tokens are the whole of it.
P, R = np.array([8, 4, 2, 1, 1]) / 16, np.array([1, 5, 4, 3, 3]) / 16
KEPT, DRAWN = np.array([0, 1, 2]), np.array([0, 0, 0, 0, 1, 1, 2])


def kept_value(name: str) -> float:
    """What the ids kept contribute to the whole softmax's expectation, by enumeration."""
    return float(sum(P[y] * kl_estimate(name, np.log(P[y]), np.log(R[y]), np) for y in KEPT))


@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
def test_weighted_with_the_kept_mass_an_estimate_is_the_policys_over_the_ids_kept(name: str) -> None:
    fingerprint = Fingerprint("", "", "", "")
    one = Trajectory(
        np.array([0], np.int32), DRAWN.astype(np.int32), np.log(P[DRAWN]).astype(np.float32), np.zeros(7, np.int32),
        "length", 0, "g", 0, fingerprint, reference_logprobs=np.log(R[DRAWN]).astype(np.float32),
        kept_logmass=np.full(7, np.log(14 / 16), np.float32),
    )  # fmt: skip
    np.testing.assert_allclose(mean_kl(name, [one.logprobs], [one]), kept_value(name), rtol=1e-5)
    whole = replace(one, kept_logmass=None)
    np.testing.assert_allclose(mean_kl(name, [one.logprobs], [whole]), kept_value(name) * 16 / 14, rtol=1e-5)
    kl = float((P * np.log(P / R)).sum())
    if name == "k3":
        assert 0 < kept_value(name) < kl


def test_so_is_the_gradient_of_the_penalty() -> None:
    """Of k2, whose gradient is the reverse KL's: the sum over ids kept of p log(p / r) (one-hot - p), enumerated."""
    theta = jnp.log(jnp.asarray(P, jnp.float32))
    weight = np.full(7, 14 / 16, np.float32)
    logp = jax.nn.log_softmax(theta)[DRAWN]
    tokens = Tokens(np.ones(7, bool), logp, np.log(R[DRAWN]).astype(np.float32), np.zeros(7), np.arange(7), weight)
    algorithm = make_algorithm(AlgorithmConfig(kl_coef=1.0, kl_estimator="k2"), 8)
    totals = Totals(np.float32(7), np.float32(1))
    gradient = jax.grad(lambda t: algorithm.loss(jax.nn.log_softmax(t)[DRAWN], None, tokens, totals)[0])(theta)
    wanted = sum(P[y] * np.log(P[y] / R[y]) * (np.eye(5)[y] - P) for y in KEPT)
    np.testing.assert_allclose(gradient, wanted, atol=1e-6)
    assert np.abs(gradient - wanted * 16 / 14).max() > 1e-3, "unweighted, it would be this"
