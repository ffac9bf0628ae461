"""Losses, gradients and advantages against TRL's own code, run once on fixed numbers (`tests/goldens/make_trl.py`).

Where the two define a thing differently, the test says how: the clip of CISPO, the mean of `bnpo` over a batch that is
cut, and the mean of an entropy bonus. TRL 1.16 has no PPO any more, and its SFT loss is the model's own cross-entropy.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.algorithm_section import AlgorithmConfig
from lockstep.algorithms import make_algorithm
from lockstep.algorithms.base import Samples
from lockstep.algorithms.bradley_terry import bradley_terry
from lockstep.algorithms.dpo import dpo
from lockstep.algorithms.losses import Tokens, Totals

GOLDEN = json.loads((Path(__file__).parents[1] / "goldens" / "trl.json").read_text())
INPUTS = {name: np.array(x) for name, x in GOLDEN["inputs"].items()}
MASK = INPUTS["mask"].astype(bool)

# The recipe's [algorithm] for each of TRL's settings.
OURS: dict[str, dict[str, Any]] = {
    "grpo": {"name": "grpo", "aggregate": "sequence_mean"},
    "grpo, KL": {"name": "grpo", "aggregate": "sequence_mean", "kl_coef": 0.3},
    "grpo, two-sided": {"name": "grpo", "aggregate": "sequence_mean", "dual_clip": 1.4},
    "bnpo": {"name": "grpo"},
    "dr_grpo": {"name": "dr_grpo"},
    "dr_grpo, KL": {"name": "dr_grpo", "kl_coef": 0.3},
    "dapo": {"name": "dapo"},
    # TRL's bonus is the mean over tokens whatever the loss; ours is the loss's own mean, here the same.
    "dapo, entropy": {"name": "dapo", "entropy_coef": 0.05},
    # TRL's epsilon_high is the largest weight itself, MiniMax's (and ours) is what it may lie above 1.
    "cispo": {"name": "cispo", "clip_low": 1.0, "clip_high": 0.25},
    "gspo": {"name": "gspo", "clip_low": 0.05, "clip_high": 0.08},
}


def loss_and_gradients(
    settings: dict[str, Any], rows: slice = slice(None)
) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray]]:
    """(loss, gradients in the log-probabilities and entropies [B, T]) of some rows of the batch, as one micro-batch."""
    algorithm = make_algorithm(AlgorithmConfig(**settings), GOLDEN["max_completion_length"])
    given = {name: x[rows] for name, x in INPUTS.items()}
    mask = given["mask"].astype(bool)

    def flat(x: np.ndarray) -> jax.Array:
        return jnp.asarray(np.broadcast_to(x, mask.shape).reshape(-1), jnp.float32)

    tokens = Tokens(
        mask=mask.reshape(-1),
        old_logp=flat(given["old_logps"]),
        ref_logp=flat(given["ref_logps"]),
        advantage=flat(given["advantages"][:, None]),
        sequence=np.repeat(np.arange(len(mask), dtype=np.int32), mask.shape[1]),
        weight=flat(np.ones(mask.shape)),
    )
    totals = Totals(np.float32(MASK.sum()), np.float32(len(MASK)))
    (loss, _), gradients = jax.value_and_grad(algorithm.loss, (0, 1), has_aux=True)(
        flat(given["logps"]), flat(given["entropies"]), tokens, totals
    )
    dlogp, dentropy = (np.asarray(g).reshape(mask.shape) for g in gradients)
    return np.asarray(loss), (dlogp, dentropy)


@pytest.mark.parametrize("case", OURS)
def test_a_loss_of_grpo_s_family_and_its_gradient_are_trl_s(case: str) -> None:
    golden = GOLDEN["grpo"][case]
    loss, (dlogp, dentropy) = loss_and_gradients(OURS[case])
    np.testing.assert_allclose(loss, golden["loss"], rtol=2e-5, atol=1e-7)
    np.testing.assert_allclose(dlogp, golden["gradient"], rtol=2e-5, atol=1e-7)
    np.testing.assert_allclose(dentropy, golden["entropy_gradient"], rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize("case", OURS)
def test_two_micro_batches_are_trl_s_two_accumulated_ones(case: str) -> None:
    """Except `bnpo`, and the entropy bonus of any loss: TRL averages over the tokens of each micro-batch, and then over
    micro-batches, so that what a token weighs depends on what it was cut apart with. Ours do not depend on the cut."""
    golden = GOLDEN["grpo"][case]
    halves = [loss_and_gradients(OURS[case], rows) for rows in (slice(0, 3), slice(3, 6))]
    loss = sum(float(loss) for loss, _ in halves)
    gradient = np.concatenate([dlogp for _, (dlogp, _) in halves])
    if case in ("bnpo", "dapo, entropy"):
        assert golden["halves"]["loss"] != pytest.approx(golden["loss"], rel=1e-3)
        golden_gradient = golden["gradient"]
        np.testing.assert_allclose(loss, golden["loss"], rtol=2e-5, atol=1e-7)
    else:
        golden_gradient = golden["halves"]["gradient"]
        np.testing.assert_allclose(loss, golden["halves"]["loss"], rtol=2e-5, atol=1e-7)
    np.testing.assert_allclose(gradient, golden_gradient, rtol=2e-5, atol=1e-7)


def test_the_goldens_clip_above_below_and_not_at_all() -> None:
    """Or they could not tell one bound from another."""
    ratio = np.exp(INPUTS["logps"] - INPUTS["old_logps"])
    sign = np.sign(INPUTS["advantages"])[:, None] * MASK
    found = [((ratio > 1.28) & (sign > 0)), ((ratio < 0.8) & (sign < 0)), (abs(ratio - 1) < 0.2) & MASK]
    assert all(x.any() for x in (*found, (ratio > 1.4) & (sign < 0), (ratio > 1.2) & (ratio < 1.28) & (sign > 0)))
    for found in (np.array(GOLDEN["grpo"]["gspo"]["gradient"]), np.array(GOLDEN["rloo"]["gradient"])):
        assert 0 < (found[:, 0] == 0).sum() < len(MASK)
    assert len({GOLDEN["grpo"][case]["loss"] for case in OURS}) == len(OURS)


def test_rloo_is_trl_s() -> None:
    """TRL's loss is a mean over completions of one term each; ours of each one's token mean of the same term."""
    loss, (dlogp, _) = loss_and_gradients({"name": "rloo"})
    np.testing.assert_allclose(loss, GOLDEN["rloo"]["loss"], rtol=2e-5)
    np.testing.assert_allclose(dlogp, GOLDEN["rloo"]["gradient"], rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize("number", range(len(GOLDEN["dpo"])))
def test_dpo_is_trl_s(number: int) -> None:
    golden = GOLDEN["dpo"][number]
    ratios = jnp.asarray((np.array(golden["logps"]) - golden["ref_logps"]).T, jnp.float32)
    (loss, metrics), slope = jax.value_and_grad(lambda r: dpo(r, golden["beta"], np.ones(len(r), bool)), has_aux=True)(
        ratios
    )
    np.testing.assert_allclose(loss, golden["loss"], rtol=2e-6)
    np.testing.assert_allclose(slope.T, golden["gradient"], rtol=1e-5)
    assert {name: float(metrics[name]) for name in golden["metrics"]} == pytest.approx(golden["metrics"], rel=1e-5)


@pytest.mark.parametrize("number", range(len(GOLDEN["reward_model"])))
def test_a_reward_model_s_loss_is_trl_s(number: int) -> None:
    golden = GOLDEN["reward_model"][number]
    scores, margins = jnp.asarray(np.transpose(golden["scores"]), jnp.float32), np.float32(golden["margins"])
    (loss, metrics), slope = jax.value_and_grad(bradley_terry, has_aux=True)(scores, margins, np.ones(3, bool))
    np.testing.assert_allclose(loss, golden["loss"], rtol=2e-6)
    np.testing.assert_allclose(slope.T, golden["gradient"], rtol=1e-5)
    assert {name: float(metrics[name]) for name in golden["metrics"]} == pytest.approx(golden["metrics"], rel=1e-5)


GROUPS = [f"g{i // GOLDEN['advantages']['samples']}" for i in range(len(GOLDEN["advantages"]["rewards"]))]


@pytest.mark.parametrize(
    ("case", "settings"),
    [
        ("grpo, group", {"name": "grpo", "scale_rewards": "group"}),
        ("grpo, batch", {"name": "grpo", "scale_rewards": "batch"}),
        ("grpo, none", {"name": "grpo", "scale_rewards": "none"}),
        ("grpo, none", {"name": "dr_grpo"}),
        ("rloo", {"name": "rloo"}),
        ("rloo, KL", {"name": "rloo", "kl_coef": 0.25}),
    ],
)
def test_advantages_are_trl_s(case: str, settings: dict[str, Any]) -> None:
    golden = GOLDEN["advantages"]
    penalties = None
    if "kl_coef" in settings:  # k1, taken off token by token
        kl = INPUTS["old_logps"] - INPUTS["ref_logps"]
        penalties = [golden["kl_coef"] * row[on] for row, on in zip(kl, MASK, strict=True)]
    samples = Samples.of(golden["rewards"], GROUPS, lengths=MASK.sum(1), penalties=penalties)
    found = make_algorithm(AlgorithmConfig(**settings), 8).advantages(samples).per_sample
    # TRL divides the counts n / (n - 1) of a standard deviation in float32.
    np.testing.assert_allclose(found, golden[case], rtol=1e-7)
