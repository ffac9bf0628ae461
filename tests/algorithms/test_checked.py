"""An algorithm of one's own that is wrong is named, with what it gave, before anything is trained on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.algorithm_section import AlgorithmConfig
from lockstep.algorithms import make_algorithm
from lockstep.algorithms.base import Advantages, Algorithm, Samples
from lockstep.algorithms.checked import judged
from lockstep.algorithms.losses import Tokens, Totals
from lockstep.errors import AlgorithmError, ConfigError, RewardError

GOOD = Advantages(np.array([1.0, -1.0]), 0, 1)
SAMPLES = Samples.of([1.0, 0.0], ["g", "g"], lengths=[2, 3])
ROWS = [np.ones(2), np.ones(3)]


class Told(Algorithm):
    """Says what it was told to say."""

    answer: Any = GOOD
    said: Any = None

    def advantages(self, samples: Samples) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def objective(self, logp: Any, ratio: Any, tokens: Tokens) -> Any:
        return self.said(logp)


def told(answer: Any = GOOD, said: Any = None) -> Algorithm:
    kind = type("Told", (Told,), {"answer": answer, "said": staticmethod(said)})
    return kind(AlgorithmConfig(name="mine:Told"))


def test_what_is_right_passes() -> None:
    """Lists too, as the arrays that they stand for."""
    assert judged(told(), SAMPLES).per_sample.tolist() == GOOD.per_sample.tolist()
    lists = [row.tolist() for row in ROWS]
    for rows, used in ((ROWS, np.array([True, False])), (lists, [True, False])):
        given = replace(GOOD, per_sample=GOOD.per_sample.tolist(), per_token=rows, returns=rows, used=used)
        found = judged(told(given), SAMPLES)
        arrays = [found.per_sample, *found.per_token, *found.returns]  # type: ignore[misc]
        assert {a.dtype for a in arrays} == {np.dtype(np.float64)}
        assert found.used.tolist() == [True, False] and [a.tolist() for a in found.per_token] == lists  # type: ignore


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (ZeroDivisionError("by 0"), "raised ZeroDivisionError: by 0"),
        (None, "gave NoneType, expected an `Advantages`"),
        ([1.0, 2.0], "gave list, expected"),
        (replace(GOOD, per_sample=np.zeros(3)), r"gave per_sample \(3,\) float64, expected \[2\] numbers"),
        (replace(GOOD, per_sample=np.array(["a", "b"])), r"gave per_sample \(2,\) <U1"),
        (replace(GOOD, per_sample=np.array([0.0, np.nan])), r"gave per_sample\[1\] = nan, .*a group without spread"),
        (replace(GOOD, per_token=ROWS[:1]), "gave per_token of 1 samples, expected 2"),
        (replace(GOOD, per_token=ROWS[::-1]), r"gave per_token\[0\] \(3,\) float64, expected \[2\]"),
        (replace(GOOD, returns=[ROWS[0], ROWS[1] * np.inf]), r"gave returns\[1\]\[0\] = inf"),
        (
            replace(GOOD, per_sample=np.array([0.0, 1e39])),
            r"gave per_sample\[1\] = 1e\+39, expected what float32",
        ),
        (replace(GOOD, zero_variance=None), "gave zero_variance = None, expected how many groups"),
        (replace(GOOD, groups="x"), "gave groups = 'x', expected how many groups"),
        (replace(GOOD, used=np.array([1, 0])), r"gave used \(2,\) int64, expected \[2\] bool"),
        (replace(GOOD, used=np.array([True])), r"gave used \(1,\) bool, expected \[2\] bool"),
    ],
)
def test_wrong_advantages_are_named(answer: Any, message: str) -> None:
    with pytest.raises(AlgorithmError, match=rf"algorithm mine:Told: advantages {message}.*Nothing of the step"):
        judged(told(answer), SAMPLES)


def test_a_critic_needs_returns() -> None:
    with pytest.raises(AlgorithmError, match="gave no `returns`, and there is a critic"):
        judged(told(), replace(SAMPLES, values=ROWS))


@pytest.mark.parametrize(
    "said",
    [lambda x: x, lambda x: (x.sum(), x > 0), lambda x: (x, False), lambda x: (x, x > 0, x), lambda x: (x[:1], x > 0)],
)
def test_an_objective_of_other_shapes_is_refused(said: Any) -> None:
    """One number for all tokens would be broadcast, and train on something else without a word."""
    ones = jnp.ones(4)
    tokens = Tokens(ones > 0, ones, ones, ones, ones, jnp.zeros(4, int))
    totals = Totals(np.float32(4), np.float32(1))
    with pytest.raises(
        AlgorithmError, match=r"algorithm mine:Told: objective gave .*expected two arrays of shape \(4,\)"
    ):
        told(said=said).loss(ones, None, tokens, totals)
    loss, _ = told(said=lambda x: (x, x > 2)).loss(ones, None, tokens, totals)
    assert float(loss) == -1.0


@pytest.mark.parametrize(
    "said", [lambda x: 1 / 0, lambda x: (x if float(x[0]) > 0 else -x, x > 0), lambda x: (np.asarray(x), x > 0)]
)
def test_an_objective_that_raises_is_named(said: Any) -> None:
    ones = jnp.ones(4)
    tokens = Tokens(ones > 0, ones, ones, ones, ones, jnp.zeros(4, int))
    with pytest.raises(AlgorithmError, match=r"mine:Told: objective raised \w+: .*jax.numpy instead of numpy"):
        jax.jit(lambda x: told(said=said).loss(x, None, tokens, Totals(np.float32(4), np.float32(1))))(ones)


def test_rewards_that_no_deviation_can_be_made_of_are_refused() -> None:
    with pytest.raises(RewardError, match=r"the reward of sample 1 \(group 'h'\) is -1e\+200; expected at most 1e\+30"):
        Samples.of([1e29, -1e200], ["g", "h"])


def test_values_and_a_critic_go_together(tmp_path) -> None:
    source = "from lockstep.algorithms.ppo import PPO\nfrom lockstep.algorithms.grpo import GRPO\n"
    (tmp_path / "checked_algorithms.py").write_text(source)
    settings = {"folder": str(tmp_path)}
    ppo, grpo = (AlgorithmConfig(name=f"checked_algorithms:{n}", **settings) for n in ("PPO", "GRPO"))
    with pytest.raises(ConfigError, match=r"checked_algorithms:PPO needs a critic's values.*add a `\[critic\]`"):
        make_algorithm(ppo, 8, critic=False)
    with pytest.raises(ConfigError, match=r"`\[critic\]` has no effect with checked_algorithms:GRPO"):
        make_algorithm(grpo, 8, critic=True)
    assert make_algorithm(ppo, 8, critic=True) and make_algorithm(grpo, 8, critic=False)
