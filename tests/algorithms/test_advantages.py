"""Advantages against oracles; groups go by id, have any size and order, and equal rewards teach nothing."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.algorithms.advantages import gae, group_scores, leave_one_out, returns_to_go, whitened
from lockstep.algorithms.base import Advantages, Samples

EPSILON = 1e-4


def group_z_scores(rewards: list[float], ids: list[str], epsilon: float) -> Advantages:
    return group_scores(Samples.of(rewards, ids), "group", epsilon)


def oracle(rewards: list[float], ids: list[str], epsilon: float) -> list[float]:
    """The definition, sample by sample, with exact sums."""
    out = []
    for reward, own in zip(rewards, ids, strict=True):
        group = [r for r, g in zip(rewards, ids, strict=True) if g == own]
        if len(set(group)) == 1:
            out.append(0.0)
            continue
        mean = math.fsum(group) / len(group)
        std = math.sqrt(math.fsum((r - mean) ** 2 for r in group) / (len(group) - 1))
        out.append((reward - mean) / (std + epsilon))
    return out


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[float], list[str]]:
    """Samples of up to four groups of any sizes, in any order; ties are common."""
    ids = draw(st.lists(st.sampled_from(["a", "b", "task/0/7", ""]), min_size=1, max_size=14))
    reward = st.one_of(st.sampled_from([0.0, 1.0, 0.1, -2.5]), st.floats(-1000, 1000, width=32))
    return draw(st.lists(reward, min_size=len(ids), max_size=len(ids))), ids


@given(batches(), st.sampled_from([1e-4, 1e-8, 0.5]))
def test_z_scores_are_the_definition(batch: tuple[list[float], list[str]], epsilon: float) -> None:
    rewards, ids = batch
    got = group_z_scores(rewards, ids, epsilon)
    np.testing.assert_allclose(got.per_sample, oracle(rewards, ids, epsilon), rtol=1e-6, atol=1e-9)
    assert got.per_sample.dtype == np.float64
    assert got.groups == len(set(ids))
    by_group = [{r for r, g in zip(rewards, ids, strict=True) if g == own} for own in set(ids)]
    assert got.zero_variance == sum(len(values) == 1 for values in by_group)


@given(batches(), st.randoms(use_true_random=False))
def test_permuting_the_samples_permutes_the_advantages(batch: tuple[list[float], list[str]], random) -> None:
    rewards, ids = batch
    order = list(range(len(ids)))
    random.shuffle(order)
    before = group_z_scores(rewards, ids, EPSILON)
    after = group_z_scores([rewards[i] for i in order], [ids[i] for i in order], EPSILON)
    # The order of a sum moves last bits of the mean; zeros stay exact.
    np.testing.assert_allclose(after.per_sample, before.per_sample[order], rtol=1e-7, atol=1e-10)
    np.testing.assert_array_equal(after.per_sample == 0, before.per_sample[order] == 0)
    assert (after.groups, after.zero_variance) == (before.groups, before.zero_variance)


@given(batches(), st.integers(-5, 5))
def test_a_groups_advantages_sum_to_zero_and_ignore_a_shift(batch: tuple[list[float], list[str]], shift: int) -> None:
    rewards, ids = batch
    got = group_z_scores(rewards, ids, EPSILON).per_sample
    for group in set(ids):
        assert abs(got[[g == group for g in ids]].sum()) < 1e-6
    if all(float(r).is_integer() for r in rewards):
        shifted = group_z_scores([r + shift for r in rewards], ids, EPSILON).per_sample
        np.testing.assert_allclose(shifted, got, rtol=1e-9, atol=1e-12)


def test_ragged_groups() -> None:
    ids = [*"aaaa", *"bbb", *"cccc"]
    rewards = [1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.25, 0.5, 0.75, 1.0]
    got = group_z_scores(rewards, ids, 0.0).per_sample
    np.testing.assert_allclose(got[:4], np.array([0.75, -0.25, -0.25, -0.25]) / 0.5, rtol=1e-12)
    np.testing.assert_allclose(got[4:7], np.array([1, 1, -2]) / math.sqrt(3), rtol=1e-12)
    np.testing.assert_allclose(got[7:], np.array([-3, -1, 1, 3]) / 8 / math.sqrt(5 / 48), rtol=1e-12)


def test_groups_are_found_by_id_not_by_position() -> None:
    rewards = [1.0, 5.0, 3.0, 9.0]
    apart = group_z_scores(rewards, ["a", "b", "a", "b"], EPSILON).per_sample
    beside = group_z_scores(rewards, ["a", "a", "b", "b"], EPSILON).per_sample
    np.testing.assert_allclose(apart, oracle(rewards, ["a", "b", "a", "b"], EPSILON), rtol=1e-12)
    assert (np.sign(apart) == [-1, -1, 1, 1]).all() and (np.sign(beside) == [-1, 1, -1, 1]).all()


@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e-30, -7.3, 1e15 + 0.3, 0.0])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 10])
def test_equal_rewards_give_exactly_zero(value: float, size: int) -> None:
    got = group_z_scores([value] * size + [0.0, 1.0], ["same"] * size + ["x", "x"], 1e-12)
    assert (got.per_sample[:size] == 0.0).all()
    assert (got.zero_variance, got.groups) == (1, 2)


def test_the_mean_of_equal_rewards_may_not_be_the_reward() -> None:
    """Why the case needs care: three times 0.1, subtracted from its mean, is not zero."""
    assert np.array([0.1] * 3).mean() - 0.1 != 0.0


def test_fractional_rewards_keep_their_fraction() -> None:
    got = group_z_scores([0.25, 0.5, 0.9], ["g"] * 3, EPSILON).per_sample
    np.testing.assert_allclose(got, oracle([0.25, 0.5, 0.9], ["g"] * 3, EPSILON), rtol=1e-12)
    assert len(set(got)) == 3 and (got != 0).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_reward_that_is_not_finite_is_refused_by_name(bad: float) -> None:
    with pytest.raises(ValueError, match=r"reward of sample 2 \(group 'task/0/1'\) is -?(nan|inf); drop failed"):
        group_z_scores([0.0, 1.0, bad, bad], ["task/0/0", "task/0/0", "task/0/1", "task/0/1"], EPSILON)


def test_rewards_and_ids_are_counted() -> None:
    with pytest.raises(ValueError, match=r"one reward per group id, got \(2,\) rewards and 3 ids"):
        group_z_scores([0.0, 1.0], ["a", "a", "b"], EPSILON)
    empty = group_z_scores([], [], EPSILON)
    assert (empty.per_sample.shape, empty.groups, empty.zero_variance) == ((0,), 0, 0)


@given(batches())
def test_leaving_one_out_is_the_distance_from_the_others_mean(batch: tuple[list[float], list[str]]) -> None:
    """And n / (n - 1) times Dr. GRPO's advantage."""
    rewards, ids = batch
    samples = Samples.of(rewards, ids)
    got, centred = leave_one_out(samples).per_sample, group_scores(samples, "none", EPSILON).per_sample
    for i, (reward, own) in enumerate(zip(rewards, ids, strict=True)):
        others = [r for j, (r, g) in enumerate(zip(rewards, ids, strict=True)) if g == own and j != i]
        if len({reward, *others}) == 1:
            assert got[i] == 0.0
            continue
        assert got[i] == pytest.approx(reward - math.fsum(others) / len(others), rel=1e-9, abs=1e-9)
        size = len(others) + 1
        assert got[i] == pytest.approx(centred[i] * size / (size - 1), rel=1e-9, abs=1e-12)


def test_scaled_by_the_batch_every_group_is_divided_by_one_number() -> None:
    samples = Samples.of([0.0, 1.0, 5.0, 9.0, 2.0, 2.0], [*"aabbcc"])
    got = group_scores(samples, "batch", EPSILON).per_sample
    wanted = np.array([-0.5, 0.5, -2.0, 2.0, 0.0, 0.0]) / (np.std([0.0, 1.0, 5.0, 9.0, 2.0, 2.0], ddof=1) + EPSILON)
    np.testing.assert_allclose(got, wanted, rtol=1e-12)


episodes = st.integers(1, 9).flatmap(
    lambda n: st.tuples(*[st.lists(st.floats(-5, 5, width=32), min_size=n, max_size=n)] * 2)
)


@given(episodes, st.sampled_from([0.0, 0.5, 0.99, 1.0]), st.sampled_from([0.0, 0.95, 1.0]))
def test_gae_is_its_direct_sum(episode: tuple[list[float], list[float]], gamma: float, lam: float) -> None:
    """Equation 16 of arXiv:1506.02438, term by term."""
    r, v = (np.array(x, np.float64) for x in episode)
    nexts = [*v[1:], 0.0]
    deltas = [r[t] + gamma * nexts[t] - v[t] for t in range(len(r))]
    wanted = [math.fsum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, len(r))) for t in range(len(r))]
    advantages, returns = gae(r, v, gamma, lam)
    np.testing.assert_allclose(advantages, wanted, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(returns, advantages + v)
    if lam == 1.0:  # the discounted sum of rewards, whatever the critic says
        np.testing.assert_allclose(returns, returns_to_go(r, gamma), rtol=1e-9, atol=1e-9)
    if lam == 0.0:
        np.testing.assert_allclose(advantages, deltas)


def test_gae_of_no_tokens_is_empty() -> None:
    assert [len(x) for x in gae(np.zeros(0), np.zeros(0), 1.0, 0.95)] == [0, 0]


def test_whitened_tokens_have_mean_0_and_deviation_1_and_equal_ones_are_0() -> None:
    got = whitened([np.array([1.0, 2.0]), np.zeros(0), np.array([6.0])], 1e-8)
    flat = np.concatenate(got)
    assert flat.mean() == pytest.approx(0, abs=1e-12) and flat.std(ddof=1) == pytest.approx(1)
    assert [len(a) for a in got] == [2, 0, 1]
    assert all((a == 0).all() for a in whitened([np.full(3, 0.1), np.full(2, 0.1)], 1e-8))


def test_penalties_are_taken_off_token_by_token_and_off_the_whole() -> None:
    samples = Samples.of([1.0, 2.0], ["a", "a"], lengths=[2, 3], penalties=[np.array([0.1, 0.2]), np.full(3, 0.5)])
    np.testing.assert_allclose(samples.outcomes, [0.7, 0.5])
    np.testing.assert_allclose(np.concatenate(samples.token_rewards()), [-0.1, 0.8, -0.5, -0.5, 1.5])
