"""Every algorithm x every law: what must hold whichever formula is trained with, and each formula against its paper's.

The second implementation, loops over tokens in float64, is `lockstep.audit.definitions`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.algorithm_section import OWN, AlgorithmConfig
from lockstep.algorithms import ALGORITHMS, make_algorithm
from lockstep.algorithms.base import Algorithm, Samples
from lockstep.algorithms.losses import Tokens, Totals
from lockstep.audit import definitions

CASES: dict[str, dict[str, Any]] = {name: {"name": name} for name in OWN}
CASES |= {
    "grpo, dual clip": {"name": "grpo", "dual_clip": 1.2},
    "grpo, KL k2 in the loss": {"name": "grpo", "kl_coef": 0.3, "kl_estimator": "k2"},
    "grpo, KL k3, sequence means": {"name": "grpo", "kl_coef": 0.3, "aggregate": "sequence_mean"},
    "dr_grpo, KL k3": {"name": "dr_grpo", "kl_coef": 0.3},
    "gspo, wide": {"name": "gspo", "clip_low": 0.1, "clip_high": 0.15},
    "rloo, token ratio": {"name": "rloo", "ratio": "token", "aggregate": "constant"},
}
LENGTH = 8


def make(**settings: Any) -> Algorithm:
    return make_algorithm(AlgorithmConfig(**settings), LENGTH)


every = pytest.mark.parametrize("case", CASES)
by_name = pytest.mark.parametrize("name", OWN)


def batch(seed: int = 0, noise: float = 0.25) -> tuple[np.ndarray, Tokens, Totals]:
    """Ragged sequences of 1 to 6 tokens around the clip's bounds, with masked slots between and after them."""
    rng = np.random.default_rng(seed)
    lengths = [3, 1, 6, 2, 5, 4]
    sequence = np.concatenate([[i] * (n + 1) for i, n in enumerate(lengths)]).astype(np.int32)
    mask = np.concatenate([[True] * n + [False] for n in lengths])
    m = len(mask)
    old = -rng.random(m) * 3 - 0.5
    logp, old, ref = (
        np.asarray(x, np.float32) for x in (old + rng.normal(0, noise, m), old, old + rng.normal(0, 0.2, m))
    )
    advantage = np.repeat(rng.normal(0, 1, len(lengths)), [n + 1 for n in lengths]).astype(np.float32)
    weight = np.where(rng.random(m) < 0.3, 0.8, 1.0).astype(np.float32)
    totals = Totals(np.float32(mask.sum()), np.float32(len(lengths)))
    return logp, Tokens(mask, old, ref, advantage * weight, sequence, weight), totals


@cache
def compiled(algorithm: Algorithm) -> Any:
    return jax.jit(jax.value_and_grad(algorithm.loss, has_aux=True))


def run(algorithm: Algorithm, logp: Any, tokens: Tokens, totals: Totals) -> tuple[Any, dict[str, Any], Any]:
    (loss, metrics), gradient = compiled(algorithm)(logp, None, tokens, totals)
    return np.asarray(loss), {k: np.asarray(v) for k, v in metrics.items()}, np.asarray(gradient)


def fields(logp: np.ndarray, tokens: Tokens) -> dict[str, np.ndarray]:
    names = ("old_logp", "ref_logp", "advantage", "weight", "sequence")
    found = {"logp": logp} | {n.removesuffix("_logp"): np.asarray(getattr(tokens, n)) for n in names}
    real = {n: x[tokens.mask] for n, x in found.items()}
    return {n: x if n == "sequence" else x.astype(np.float64) for n, x in real.items()}


# -- the loss ----------------------------------------------------------------------------------------------------------


@every
def test_loss_and_gradient_are_the_papers(case: str) -> None:
    algorithm = make(**CASES[case])
    logp, tokens, totals = batch()
    loss, metrics, gradient = run(algorithm, logp, tokens, totals)
    counts = float(totals.tokens), float(totals.sequences)
    value, ratio, clipped, low = definitions.loss(algorithm.settings, LENGTH, fields(logp, tokens), counts)
    np.testing.assert_allclose(loss, value, rtol=1e-5)
    np.testing.assert_allclose(1 + metrics["ratio_less_1"], ratio, rtol=1e-5)
    np.testing.assert_allclose(metrics["clip_fraction"], clipped, rtol=1e-5)
    np.testing.assert_allclose(metrics["clip_fraction/low"], low, rtol=1e-5)
    slope = definitions.gradient(algorithm.settings, LENGTH, fields(logp, tokens), counts)
    np.testing.assert_allclose(gradient[tokens.mask], slope, rtol=1e-3, atol=1e-6)
    assert np.abs(slope).max() > 1e-3 and (gradient[~tokens.mask] == 0).all()
    assert loss.dtype == gradient.dtype == np.float32


def test_the_cases_do_clip() -> None:
    """Or the table above would not tell one bound from another."""
    logp, tokens, totals = batch()
    found = {c: float(run(make(**CASES[c]), logp, tokens, totals)[1]["clip_fraction"]) for c in CASES}
    assert all(found[c] > 0 for c in ("grpo", "dr_grpo", "dapo", "gspo", "gspo, wide", "rloo", "ppo", "reinforce_pp"))
    assert found["grpo, dual clip"] > found["grpo"] > found["dapo"] and found["raft"] == 0


@every
@pytest.mark.parametrize("garbage", [1e9, np.nan, -np.inf])
def test_masked_garbage_changes_no_bit(case: str, garbage: float) -> None:
    algorithm = make(**CASES[case])
    logp, tokens, totals = batch()
    hidden = ~tokens.mask

    def spoiled(x: np.ndarray) -> np.ndarray:
        return np.where(hidden, np.asarray(garbage, x.dtype) if x.dtype == np.float32 else 2**31 - 1, x)

    clean = run(algorithm, logp, tokens, totals)
    names = ("old_logp", "ref_logp", "advantage", "sequence", "weight")
    dirty = tokens._replace(**{f: spoiled(getattr(tokens, f)) for f in names})
    loss, metrics, gradient = run(algorithm, spoiled(logp), dirty, totals)
    assert loss.tobytes() == clean[0].tobytes() and gradient.tobytes() == clean[2].tobytes()
    assert {k: v.tobytes() for k, v in metrics.items()} == {k: v.tobytes() for k, v in clean[1].items()}


@every
def test_on_policy_the_ratio_is_exactly_1_and_nothing_is_clipped(case: str) -> None:
    logp, tokens, totals = batch()
    _, metrics, _ = run(make(**CASES[case]), logp, tokens._replace(old_logp=logp), totals)
    assert metrics["ratio_less_1"] == 0.0 and metrics["clip_fraction"] == 0.0


@by_name
def test_zero_advantage_gives_exactly_zero_gradient(name: str) -> None:
    logp, tokens, totals = batch()
    flat = tokens._replace(advantage=np.zeros_like(tokens.advantage))
    loss, _, gradient = run(make(name=name), logp, flat, totals)
    assert loss == 0.0 and (gradient == 0.0).all()


@every
def test_shares_of_micro_batches_add_up(case: str) -> None:
    """Cut between sequences, with the whole batch's totals; each cut numbers its sequences anew."""
    algorithm = make(**CASES[case])
    logp, tokens, totals = batch()
    whole = run(algorithm, logp, tokens, totals)
    cuts = [slice(0, 6), slice(6, 16), slice(16, 27)]
    parts = []
    for cut in cuts:
        own = Tokens(*(np.asarray(x)[cut] for x in tokens))
        parts.append(run(algorithm, logp[cut], own._replace(sequence=own.sequence - own.sequence.min()), totals))
    assert sum(c.stop - c.start for c in cuts) == len(logp)
    np.testing.assert_allclose(sum(p[0] for p in parts), whole[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(np.concatenate([p[2] for p in parts]), whole[2], rtol=1e-5, atol=1e-7)
    for metric, value in whole[1].items():
        np.testing.assert_allclose(sum(p[1][metric] for p in parts), value, rtol=1e-5, atol=1e-6)


@every
def test_permuting_sequences_permutes_the_gradient(case: str) -> None:
    algorithm = make(**CASES[case])
    logp, tokens, totals = batch()
    order = np.random.default_rng(1).permutation(len(logp))  # tokens of a sequence come apart, too
    loss, _, gradient = run(algorithm, logp, tokens, totals)
    moved = run(algorithm, logp[order], Tokens(*(np.asarray(x)[order] for x in tokens)), totals)
    np.testing.assert_allclose(moved[0], loss, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(moved[2], gradient[order], rtol=1e-4, atol=1e-7)


# -- identities --------------------------------------------------------------------------------------------------------


def same_loss(a: Algorithm, b: Algorithm, logp: Any, tokens: Tokens, totals: Totals) -> None:
    left, right = run(a, logp, tokens, totals), run(b, logp, tokens, totals)
    np.testing.assert_allclose(left[0], right[0], rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(left[2], right[2], rtol=1e-5, atol=1e-7)


def single_tokens() -> tuple[np.ndarray, Tokens, Totals]:
    logp, tokens, _ = batch()
    ones = tokens._replace(mask=np.ones(len(logp), bool), sequence=np.arange(len(logp), dtype=np.int32))
    return logp, ones, Totals(np.float32(len(logp)), np.float32(len(logp)))


def test_gspo_is_grpo_at_length_1() -> None:
    same_loss(make(name="gspo", clip_low=0.2, clip_high=0.2), make(name="grpo"), *single_tokens())


def test_cispo_is_reinforce_at_ratio_1() -> None:
    """d loss / d logp = -A / N."""
    logp, tokens, totals = batch()
    gradient = run(make(name="cispo"), logp, tokens._replace(old_logp=logp), totals)[2]
    wanted = np.where(tokens.mask, -np.asarray(tokens.advantage) / totals.tokens, 0)
    np.testing.assert_allclose(gradient, wanted, rtol=1e-6)


def test_rloo_is_dr_grpo_times_g_over_g_minus_1() -> None:
    """Advantages; and, counted alike, losses."""
    samples = Samples.of([1.0, 0.0, 0.5, 2.0, 2.0, 7.0], [*"aaabbb"])
    left, right = (make(name=n).advantages(samples).per_sample for n in ("rloo", "dr_grpo"))
    np.testing.assert_allclose(left, right * 3 / 2, rtol=1e-12)
    alike = {"ratio": "token", "aggregate": "constant"}
    same_loss(make(name="rloo", **alike), make(name="dr_grpo"), *batch())


def test_dapo_is_grpo_with_its_settings() -> None:
    same_loss(make(name="dapo"), make(name="grpo", clip_high=0.28), *batch())


def test_the_dual_clip_bounds_the_loss_of_a_bad_token() -> None:
    logp, tokens, totals = single_tokens()
    far = tokens._replace(old_logp=logp - 5, advantage=np.full(len(logp), -1, np.float32))
    loss, _, gradient = run(make(dual_clip=3.0), logp, far, totals)
    assert loss == pytest.approx(3.0) and (gradient == 0).all()
    assert run(make(), logp, far, totals)[0] > 100


# -- expectations by enumeration ---------------------------------------------------------------------------------------

REWARD = np.array([1.5, -0.5, 0.25])


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce_pp", "ppo"])
def test_on_a_one_token_bandit_the_expected_gradient_is_the_policy_gradient(name: str) -> None:
    """sum_a p(a) grad loss(a) = -grad sum_a p(a) R(a): each action enumerated, weighted with its probability."""
    theta = np.array([0.4, -0.7, 1.1])
    t = jnp.asarray(theta, jnp.float32)
    p = np.exp(theta) / np.exp(theta).sum()
    ones, zeros = np.ones(3, np.float32), np.zeros(3, np.float32)
    tokens = Tokens(
        np.ones(3, bool), jax.nn.log_softmax(t), zeros, np.float32(p * REWARD), np.arange(3, dtype=np.int32), ones
    )
    one, algorithm = Totals(np.float32(1), np.float32(1)), make_algorithm(AlgorithmConfig(name=name), 1)
    gradient = jax.grad(lambda x: algorithm.loss(jax.nn.log_softmax(x), None, tokens, one)[0])(t)
    np.testing.assert_allclose(gradient, -p * (REWARD - (p * REWARD).sum()), atol=1e-6)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "cispo", "rloo", "reinforce_pp"])
def test_on_completions_of_two_tokens_too(name: str) -> None:
    """Four completions, enumerated; the reward is of the completion. Sums over tokens: aggregate constant, length 1; of
    RLOO, whose ratio is the completion's, means over completions."""
    first, second = np.array([0.3, -0.4]), np.array([[1.0, -1.0], [0.2, 0.5]])
    reward = np.array([[1.0, -2.0], [0.5, 3.0]])
    settings = {"name": name} if name == "rloo" else {"name": name, "aggregate": "constant"}
    algorithm = make_algorithm(AlgorithmConfig(**settings), 1)

    def logps(theta: Any) -> Any:
        a, b = jax.nn.log_softmax(theta[:2]), jax.nn.log_softmax(theta[2:].reshape(2, 2), axis=1)
        return jnp.stack([jnp.stack([a[i], b[i, j]]) for i in range(2) for j in range(2)]).reshape(-1)

    theta = jnp.asarray(np.concatenate([first, second.ravel()]), jnp.float32)
    at = np.asarray(logps(theta), np.float64)
    p = np.exp(at.reshape(4, 2).sum(1))
    advantage = np.repeat(p * reward.ravel(), 2).astype(np.float32)
    sequence, ones = np.repeat(np.arange(4, dtype=np.int32), 2), np.ones(8, np.float32)
    tokens = Tokens(np.ones(8, bool), logps(theta), np.zeros(8, np.float32), advantage, sequence, ones)
    one = Totals(np.float32(1), np.float32(1))
    gradient = jax.grad(lambda x: algorithm.loss(logps(x), None, tokens, one)[0])(theta)
    wanted = jax.grad(lambda x: -(jnp.exp(logps(x).reshape(4, 2).sum(1)) * reward.ravel()).sum())(theta)
    np.testing.assert_allclose(gradient, wanted, atol=2e-6)


def test_raft_raises_the_likelihood_of_the_best() -> None:
    logp, tokens, totals = batch()
    chosen = np.isin(tokens.sequence, [1, 4]).astype(np.float32)
    loss, _, gradient = run(make(name="raft"), logp, tokens._replace(advantage=chosen), totals)
    on = tokens.mask & (chosen > 0)
    np.testing.assert_allclose(gradient, np.where(on, -1 / totals.tokens, 0), rtol=1e-6)
    np.testing.assert_allclose(loss, -logp[on].sum() / totals.tokens, rtol=1e-5)


# -- advantages --------------------------------------------------------------------------------------------------------


def samples_of(seed: int, name: str, order: np.ndarray | None = None) -> Samples:
    """Three ragged groups; penalties, and values where the algorithm takes a critic's."""
    rng = np.random.default_rng(seed)
    groups = np.array([*"abacbcabcaa"])
    lengths = rng.integers(1, 6, len(groups))
    rewards = rng.normal(size=len(groups)).round(1)
    penalties = [rng.normal(0, 0.1, n) for n in lengths]
    values = [rng.normal(size=n) for n in lengths]
    order = np.arange(len(groups)) if order is None else order
    return Samples.of(
        rewards[order], groups[order].tolist(), lengths=lengths[order], penalties=[penalties[i] for i in order],
        values=[values[i] for i in order] if ALGORITHMS[name].needs_values else None,
    )  # fmt: skip


def tokens_of(found: Any, samples: Samples) -> list[np.ndarray]:
    return [np.broadcast_to(found.of(i), n) for i, n in enumerate(samples.lengths)]


@by_name
def test_advantages_are_the_papers(name: str) -> None:
    samples, algorithm = samples_of(0, name), make(name=name)
    found = tokens_of(algorithm.advantages(samples), samples)
    if name in ("ppo", "reinforce_pp"):
        wanted = definitions.by_token(
            algorithm.settings, samples.rewards, samples.group_ids, samples.penalties, samples.values
        )
    else:
        scores = definitions.by_group(algorithm.settings, samples.outcomes.tolist(), samples.group_ids)
        wanted = [np.full(n, a) for a, n in zip(scores, samples.lengths, strict=True)]
    np.testing.assert_allclose(np.concatenate(found), np.concatenate(wanted), rtol=1e-9, atol=1e-12)


@by_name
def test_permuting_samples_permutes_advantages(name: str) -> None:
    order = np.random.default_rng(3).permutation(11)
    straight, mixed = samples_of(1, name), samples_of(1, name, order)
    algorithm = make(name=name)
    a, b = (tokens_of(algorithm.advantages(s), s) for s in (straight, mixed))
    for place, i in enumerate(order):
        np.testing.assert_allclose(b[place], a[i], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", [n for n in OWN if make(name=n).by_group])
def test_a_group_is_judged_by_itself(name: str) -> None:
    samples, algorithm = samples_of(2, name), make(name=name)
    together = algorithm.advantages(samples).per_sample
    for members in samples.groups.values():
        own = Samples.of(samples.outcomes[members], [samples.group_ids[i] for i in members])
        np.testing.assert_allclose(together[members], algorithm.advantages(own).per_sample, rtol=1e-9)


@pytest.mark.parametrize("name", [n for n in OWN if make(name=n).by_group])
def test_equal_rewards_teach_nothing(name: str) -> None:
    samples = Samples.of([0.1] * 3 + [0.9] * 4 + [-2.0], [*"aaabbbbc"])
    found = make(name=name).advantages(samples)
    assert (found.per_sample == 0).all() and (found.zero_variance, found.groups) == (3, 3)


def test_a_baseline_of_the_group_for_reinforce_pp() -> None:
    samples = Samples.of([1.0, 0.0, 5.0, 6.0], [*"aabb"], lengths=[1, 1, 1, 1])
    found = np.concatenate(tokens_of(make(name="reinforce_pp", group_baseline=True).advantages(samples), samples))
    np.testing.assert_allclose(found[:2], -found[2:], rtol=1e-9)
    plain = np.concatenate(tokens_of(make(name="reinforce_pp").advantages(samples), samples))
    assert (plain[:2] < 0).all() and (plain[2:] > 0).all()


def test_raft_takes_the_first_of_equally_good_ones() -> None:
    found = make(name="raft", best_of=2).advantages(Samples.of([1.0, 3.0, 3.0, 3.0, 2.0, 2.0], [*"aaaabb"]))
    assert found.per_sample.tolist() == [0, 1, 1, 0, 0, 0] and found.used.tolist() == [False, True, True] + [False] * 3


# -- the registry ------------------------------------------------------------------------------------------------------


def test_a_recipe_can_name_every_algorithm_and_no_other() -> None:
    assert set(OWN) == set(ALGORITHMS)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"name": "dapoo"}, r"is no algorithm; did you mean dapo\?"),
        ({"name": "raft", "clip_low": 0.1}, '`algorithm.clip_low` has no effect with name = "raft"'),
        ({"name": "dr_grpo", "std_epsilon": 1.0}, "has no effect"),
        ({"dual_clip": 0.5}, "must be > 1, or 0"),
        ({"correction": "token_masked", "correction_cap": 1.0}, "would mask about half"),
    ],
)
def test_settings_that_do_not_fit_are_errors(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        AlgorithmConfig(**settings)
