"""The trainer's step: what stops it before it changes anything, what it applies, what it says about it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import optax
import pytest

from lockstep.algorithms import make_algorithm
from lockstep.algorithms.base import Algorithm
from lockstep.config import AlgorithmConfig, OptimConfig, load_config
from lockstep.errors import MismatchError, NumericsError
from lockstep.train.optimizer import actor_schedule, make_optimizer, make_schedule
from lockstep.train.trainer import Trainer, first_trained_layer, mismatch


def grpo(**settings: Any) -> Algorithm:
    """As a recipe with these settings makes it."""
    return make_algorithm(AlgorithmConfig(**({"clip_high": 0.28} | settings)), 8)


def copy_of(tree: Any) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def step_refused(trainer: Trainer, batches: Any, trajectories: Any, error: type[Exception], match: str) -> None:
    """The step raises, and parameters and optimizer state keep every bit."""
    before = copy_of((trainer.trainable, trainer.optimizer_state))
    with pytest.raises(error, match=match):
        trainer.step(batches, trajectories, 0)
    assert copy_of((trainer.trainable, trainer.optimizer_state)) == before


def one_ulp(trajectories: list[Any], sample: int, token: int) -> list[Any]:
    """The record with one log-probability moved to the next float."""
    moved = trajectories[sample].logprobs.copy()
    moved[token] = np.nextafter(moved[token], np.float32(0))
    changed = list(trajectories)
    changed[sample] = replace(trajectories[sample], logprobs=moved)
    return changed


@pytest.fixture(scope="module")
def last_sample(plain, record, advantages) -> int:
    """A sample in the last of several micro-batches."""
    return plain.micro_batches(record, advantages, 16)[-1].spans[-1][0]


@pytest.fixture(scope="module")
def adam(plain) -> Trainer:
    """An exact trainer with AdamW whose step is always refused; tests share it."""
    return plain.trainer(grpo(), optax.adamw(1e-2))


# -- what stops a step -----------------------------------------------------------------------------------------------


def test_one_ulp_in_the_record_stops_an_exact_step(plain, adam, record, advantages, last_sample) -> None:
    """In the last micro-batch, so the gradients of the others exist already; still nothing is applied."""
    t = record[last_sample]
    token = len(t.completion_ids) - 1
    wrong = one_ulp(record, last_sample, token)
    named = rf"token {token} of sample {t.index} of '{t.group_id}' \(policy version 0\) was recorded with .* No update"
    step_refused(adam, plain.micro_batches(wrong, advantages, 16), wrong, MismatchError, named)


def test_fast_mode_goes_on_and_measures_the_same_ulp(plain, record, advantages, last_sample) -> None:
    wrong = one_ulp(record, last_sample, 0)
    metrics = plain.gradients(plain.micro_batches(wrong, advantages, 16), wrong, exact=False)[0].metrics
    assert metrics["mismatch/unequal_tokens"] == 1
    assert 0 < metrics["mismatch/max_abs"] < 1e-6
    assert metrics["mismatch/k1"] != 0


def test_fast_mode_measures_a_large_mismatch(plain, trajectories, advantages) -> None:
    noisy = plain.recorded(trajectories, 16, noise=0.3)
    result, _ = plain.gradients(plain.micro_batches(noisy, advantages, 16), noisy, exact=False)
    used = [i for i, lp in enumerate(result.logprobs) if lp is not None]
    recorded = np.concatenate([noisy[i].logprobs for i in used])
    recomputed = np.concatenate([result.logprobs[i] for i in used])
    for name, value in mismatch(recorded, recomputed).items():
        assert result.metrics[name] == value
    assert result.metrics["mismatch/k3"] > 0.01 and result.metrics["mismatch/ess"] < 0.99
    assert result.metrics["mismatch/unequal_tokens"] == len(recorded) == result.metrics["tokens/trained"]


@pytest.mark.parametrize("exact", [True, False])
def test_nan_weights_are_refused(exact: bool, plain, record, advantages) -> None:
    spoiled = {p: np.full_like(x, np.nan) if p == "layers.1.up" else x for p, x in plain.trainable.items()}
    trainer = plain.trainer(optimizer=optax.adamw(1e-2), exact=exact, **spoiled)
    batches = plain.micro_batches(record, advantages, 16)
    step_refused(trainer, batches, record, NumericsError, r"the trainer's log-probability of token 0 .* is nan; .*NaN")


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_a_record_that_is_not_finite_is_refused(value: float, plain, record, advantages, last_sample) -> None:
    wrong = list(record)
    wrong[last_sample] = replace(record[last_sample], logprobs=np.full_like(record[last_sample].logprobs, value))
    batches = plain.micro_batches(wrong, advantages, 16)
    trainer = plain.keeper(grpo(kl_coef=0.2), exact=False)
    step_refused(trainer, batches, wrong, NumericsError, r"the recorded log-probability of token 0 .* is (nan|-inf)")


def test_a_gradient_that_is_not_finite_is_never_applied(plain, record, advantages, last_sample) -> None:
    """Here from a reference log-probability; every log-probability of the policy is fine."""
    wrong = list(record)
    bad = np.full_like(record[last_sample].logprobs, np.nan)
    wrong[last_sample] = replace(record[last_sample], reference_logprobs=bad)
    batches = plain.micro_batches(wrong, advantages, 16)
    trainer = plain.keeper(grpo(kl_coef=0.2))
    step_refused(trainer, batches, wrong, NumericsError, "norm of the gradient is nan.*No update was applied")


def test_a_kl_term_without_a_reference_is_our_own_mistake(plain, record, advantages) -> None:
    bare = [replace(t, reference_logprobs=None) for t in record]
    batches = plain.micro_batches(bare, advantages, 16)
    with pytest.raises(AssertionError, match="needs reference log-probabilities"):
        plain.keeper(grpo(kl_coef=0.2)).step(batches, bare, 0)


def test_micro_batches_of_other_trajectories_are_our_own_mistake(plain, adam, record, advantages) -> None:
    part = plain.micro_batches(record, advantages, 16)[:-1]
    step_refused(adam, part, record, AssertionError, "made from other trajectories")


# -- what a step says ------------------------------------------------------------------------------------------------


def test_log_probabilities_come_back_per_trajectory(plain, record, advantages) -> None:
    result, _ = plain.gradients(plain.micro_batches(record, advantages, 16), record)
    for t, lp in zip(record, result.logprobs, strict=True):
        assert (lp is None) == (len(t.completion_ids) == 0)
        if lp is not None:
            assert lp.dtype == np.float32 and lp.tobytes() == t.logprobs.tobytes()
    assert result.metrics["tokens/trained"] == sum(len(t.completion_ids) for t in record)
    assert result.metrics["mismatch/max_abs"] == result.metrics["mismatch/k3"] == 0.0
    assert result.metrics["mismatch/ess"] == 1.0


def test_mismatch_is_its_definition() -> None:
    rng = np.random.default_rng(0)
    recorded = -rng.random(1000).astype(np.float32) * 5
    recomputed = recorded.copy()
    recomputed[:400] += rng.normal(0, 0.5, 400).astype(np.float32)
    got = mismatch(recorded, recomputed)
    d = recomputed.astype(float) - recorded.astype(float)
    assert got["mismatch/max_abs"] == np.abs(d).max()
    assert got["mismatch/k1"] == pytest.approx(-d.mean(), rel=1e-12)
    assert got["mismatch/k3"] == pytest.approx((np.exp(d) - 1 - d).mean(), rel=1e-9)
    assert got["mismatch/ess"] == pytest.approx(np.exp(d).sum() ** 2 / (1000 * (np.exp(d) ** 2).sum()), rel=1e-12)
    assert got["mismatch/unequal_tokens"] == 400


def test_mismatch_of_equal_bits_and_of_the_extremes() -> None:
    same = np.array([-1.5, -0.25, -90.0], np.float32)
    assert list(mismatch(same, same.copy()).values()) == [0.0, 0.0, 0.0, 1.0, 0]
    # One token far more likely for the trainer than for the sampler: one effective sample of three.
    assert mismatch(same - np.float32([0, 0, 700]), same)["mismatch/ess"] == pytest.approx(1 / 3)


def test_mismatch_k1_and_k3_estimate_the_same_divergence() -> None:
    """KL(sampler || trainer) by enumeration: each of two tokens as often as the sampler draws it (1 : 3)."""
    sampler, trainer = np.log([0.25, 0.75]), np.log([0.4, 0.6])
    drawn = np.array([0, 1, 1, 1])
    got = mismatch(sampler[drawn].astype(np.float32), trainer[drawn].astype(np.float32))
    exact = (np.exp(sampler) * (sampler - trainer)).sum()
    assert got["mismatch/k1"] == pytest.approx(exact, rel=1e-5)
    assert got["mismatch/k3"] == pytest.approx(exact, rel=1e-5)


def test_first_trained_layer() -> None:
    assert first_trained_layer({"layers.3.q.lora_a": 0, "layers.11.q.lora_a": 0}) == 3
    assert first_trained_layer({"embed": 0, "layers.3.q": 0}) == 0
    assert first_trained_layer({"final_norm": 0}) == 0


# -- what a step applies ---------------------------------------------------------------------------------------------


def moved(trainer: Trainer, before: dict[str, np.ndarray]) -> float:
    """Norm of how far the weights are from `before`."""
    return float(
        np.sqrt(sum(((np.asarray(x, np.float64) - before[p]) ** 2).sum() for p, x in trainer.trainable.items()))
    )


@pytest.mark.parametrize(("limit", "clipped"), [(0.05, True), (1e3, False), (float("inf"), False)])
def test_clipping_bounds_the_applied_update(limit: float, clipped: bool, plain, record, advantages) -> None:
    """Plain SGD at rate 1: the update is the gradient, of norm min(|g|, limit). `grad_norm` is the norm before."""
    trainer = plain.trainer(optimizer=optax.chain(optax.clip_by_global_norm(limit), optax.sgd(1.0)))
    result = trainer.step(plain.micro_batches(record, advantages, 16), record, 0)
    norm = result.metrics["grad_norm"]
    assert 0.2 < norm < 1e3
    assert moved(trainer, plain.trainable) == pytest.approx(limit if clipped else norm, rel=1e-4)


def test_the_recipes_optimizer_clips_then_takes_an_adamw_step(plain, record, advantages) -> None:
    optim = OptimConfig(lr=1e-2, weight_decay=0.1, betas=(0.8, 0.9), eps=1e-3, max_grad_norm=0.05)
    schedule = make_schedule(optim, 10)
    trainer = plain.trainer(grpo(), make_optimizer(optim, schedule), schedule)
    batches = plain.micro_batches(record, advantages, 16)
    result, gradient = plain.gradients(batches, record, grpo())
    assert trainer.step(batches, record, 0).metrics["grad_norm"] == result.metrics["grad_norm"] > 0.05
    scale = 0.05 / result.metrics["grad_norm"]
    mu = {p: np.asarray(m) for p, m in optax.tree.get(trainer.optimizer_state, "mu").items()}
    for path, start in plain.trainable.items():
        g = gradient[path] * scale
        np.testing.assert_allclose(mu[path], 0.2 * g, rtol=1e-4, atol=1e-9)
        # Bias correction makes the first step g / (|g| + eps).
        expected = start - 1e-2 * (g / (np.abs(g) + 1e-3) + 0.1 * start)
        np.testing.assert_allclose(trainer.trainable[path], expected, rtol=1e-5, atol=1e-6)


def test_the_rate_said_is_the_rate_applied(plain, trajectories, record, advantages) -> None:
    """Three updates along a warm-up with SGD: each moves the weights by lr * |g|."""
    schedule = make_schedule(OptimConfig(lr=0.02, schedule="linear", warmup_steps=2), 4)
    trainer = plain.trainer(optimizer=optax.sgd(schedule), schedule=schedule, exact=False)
    for number, rate in enumerate((0.01, 0.02, 0.02)):
        before = {p: np.asarray(x, np.float64) for p, x in trainer.trainable.items()}
        metrics = trainer.step(plain.micro_batches(record, advantages, 16), record, number).metrics
        assert metrics["lr"] == pytest.approx(rate)
        assert moved(trainer, before) == pytest.approx(rate * metrics["grad_norm"], rel=1e-3)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"schedule": "constant"}, {0: 1.0, 1: 1.0, 9: 1.0, 50: 1.0}),
        ({"schedule": "constant", "warmup_steps": 4}, {0: 0.25, 1: 0.5, 2: 0.75, 3: 1.0, 4: 1.0, 9: 1.0}),
        ({"schedule": "constant", "warmup_steps": 1}, {0: 1.0, 1: 1.0}),
        ({"schedule": "linear"}, {0: 1.0, 5: 0.5, 9: 0.1, 10: 0.0, 11: 0.0}),
        ({"schedule": "linear", "warmup_steps": 2}, {0: 0.5, 1: 1.0, 2: 1.0, 6: 0.5, 10: 0.0}),
        ({"schedule": "cosine"}, {0: 1.0, 5: 0.5, 10: 0.0, 11: 0.0}),
        ({"schedule": "cosine", "warmup_steps": 2}, {0: 0.5, 1: 1.0, 2: 1.0, 6: 0.5, 10: 0.0}),
        ({"schedule": "linear", "warmup_steps": 10}, {0: 0.1, 9: 1.0}),
    ],
)
def test_schedule_by_update_number(settings: dict[str, Any], expected: dict[int, float]) -> None:
    """Shares of the peak rate, of ten updates."""
    schedule = make_schedule(OptimConfig(lr=3e-4, **settings), 10)
    for number, share in expected.items():
        assert float(schedule(number)) == pytest.approx(3e-4 * share, rel=1e-5, abs=1e-11), number


def test_optimizer_state_lies_where_its_parameters_lie(make_policy, record, advantages) -> None:
    policy = make_policy(axes=(("fsdp", 4),))
    trainer = policy.trainer(grpo(), make_optimizer(OptimConfig(lr=1e-3), optax.constant_schedule(1e-3)))

    def check() -> None:
        for moment in ("mu", "nu"):
            for path, leaf in optax.tree.get(trainer.optimizer_state, moment).items():
                assert leaf.sharding == trainer.trainable[path].sharding, (moment, path)
                cut = "embed" in policy.leaves[path].axes
                assert leaf.addressable_shards[0].data.nbytes == leaf.nbytes // (4 if cut else 1), (moment, path)

    placed = {p: leaf.sharding for p, leaf in trainer.trainable.items()}
    check()
    trainer.step(policy.micro_batches(record, advantages), record, 0)
    assert {p: leaf.sharding for p, leaf in trainer.trainable.items()} == placed
    check()


def test_an_update_leaves_the_buffers_it_started_from(plain, record, advantages) -> None:
    """The sampler may be serving them."""
    trainer = plain.trainer(optimizer=optax.sgd(1.0))
    served = trainer.trainable
    trainer.step(plain.micro_batches(record, advantages, 16), record, 0)
    assert trainer.trainable is not served
    for path, leaf in served.items():
        assert not leaf.is_deleted()
        assert np.asarray(leaf).tobytes() == plain.trainable[path].tobytes()


def test_the_actors_rate_ends_at_the_last_step_also_after_a_critics_warm_up() -> None:
    words = ["--run.steps=10", "--algorithm.name=ppo", "--optim={lr = 1.0, schedule = 'linear'}"]
    rate = actor_schedule(load_config("recipes/addition.toml", [*words, "--critic={warmup_steps = 4}"]))
    assert [float(rate(n)) for n in (0, 3, 6)] == [1.0, 0.5, 0.0]  # six updates
