"""Rewards: exact comparisons, users' functions, and no failure that turns into a number."""

import asyncio
import math
import threading
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.config import RewardConfig
from lockstep.envs.rewards import Function, Reward, make_reward
from lockstep.envs.scorers import exact, first_line_exact
from lockstep.errors import ConfigError, RewardError
from lockstep.types import Prompt


def prompts(*answers, **more) -> list[Prompt]:
    return [Prompt(f"t/0/{i}", f"question {i}", (1,), {"answer": a, **more}) for i, a in enumerate(answers)]


def reward(function, on_error="fail", error_score=None, whole_batch=False, **others) -> Reward:
    functions = {"own": function, **others}
    scorers = {name: Function(name, function, whole_batch=whole_batch) for name, function in functions.items()}
    return Reward(scorers, dict.fromkeys(functions, 1.0), on_error, error_score)


# ---------------------------------------------------------------- built in


@pytest.mark.parametrize(
    ("completion", "value"),
    [
        (" 53", 1.0),
        ("53", 1.0),
        ("53\n", 1.0),
        ("53\n6 + 7 = 13", 1.0),
        ("53 \r\n", 1.0),
        ("\n53", 0.0),
        ("53.", 0.0),
        ("+53", 0.0),
        ("530", 0.0),
        ("5", 0.0),
        ("", 0.0),
        ("the answer is 53", 0.0),
        ("53\u2028and more", 0.0),
    ],
)
def test_first_line_exact(completion, value):
    assert first_line_exact(["q"], [completion], [{"answer": "53"}]) == [value]


def test_exact_compares_the_whole_completion():
    rows = [{"answer": " a\nb"}] * 3
    assert exact(["q"] * 3, ["a\nb\n", "a\nb\nc", "a"], rows) == [1.0, 0.0, 0.0]


@given(answer=st.integers(), text=st.text())
def test_gold_answers_may_be_integers_and_only_the_answer_earns(answer, text):
    assert first_line_exact(["q", "q"], [str(answer), text], [{"answer": answer}] * 2)[0] == 1.0
    assert first_line_exact(["q"], [text], [{"answer": answer}])[0] == float(text.split("\n")[0].strip() == str(answer))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"gold": "1", "level": 2}, "has no 'answer', only gold, level"),
        ({"answer": None}, r"answer is None \(NoneType\)"),
        ({"answer": 1.0}, r"answer is 1.0 \(float\)"),
        ({"answer": True}, r"answer is True \(bool\)"),
        ({"answer": "a\nb"}, "use the reward 'exact'"),
    ],
)
def test_a_row_without_a_usable_answer_is_not_a_zero(row, message):
    sample = Prompt("data/0/7", "q", (1,), row)
    with pytest.raises(RewardError, match=message) as error:
        reward(first_line_exact).score([sample], ["1"])
    assert "data/0/7" in str(error.value)
    assert reward(first_line_exact, "drop").score([sample], ["1"])[0].failed


# ---------------------------------------------------------------- recipes


def test_a_recipe_with_several_rewards(tmp_path):
    (tmp_path / "own_lengths.py").write_text(
        "def length(prompts, completions, rows):\n"
        "    assert (prompts, rows[0]['answer']) in [(['question 0'], '53'), (['question 1'], '7')]\n"
        "    return [len(c) / 8 for c in completions]\n"
    )
    functions = [{"name": "first_line_exact", "weight": 2.0}, {"name": "own_lengths:length", "weight": -1.0}]
    made = make_reward(RewardConfig(functions=functions, folder=str(tmp_path), workers=0))
    right, wrong = made.score(prompts("53", "7"), ["53", "8"])
    assert right.parts == {"first_line_exact": 1.0, "own_lengths:length": 0.25} and right.value == 1.75
    assert wrong.parts == {"first_line_exact": 0.0, "own_lengths:length": 0.125} and wrong.value == -0.125
    assert right.failed is None


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("first_line_exct", "no built-in reward 'first_line_exct'; nearest: first_line_exact"),
        ("own_absent:f", "no module 'own_absent'"),
        ("own_takes:f", r"takes \(completions\); expected def f\(prompts, completions, rows\)"),
        ("own takes:f", "is not of the form 'module:function'"),
    ],
)
def test_functions_that_cannot_be_used(tmp_path, name, message):
    (tmp_path / "own_takes.py").write_text("def f(completions): return [0.0 for _ in completions]\n")
    with pytest.raises(ConfigError, match=message):
        make_reward(RewardConfig(functions=[{"name": name}], folder=str(tmp_path), workers=0))


# ---------------------------------------------------------------- values


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (True, 1.0),
        (np.False_, 0.0),
        (3, 3.0),
        (1 / 3, 1 / 3),
        (np.float32(0.1), float(np.float32(0.1))),
        (np.int64(-2), -2.0),
        (np.array(0.5), 0.5),
        (Fraction(1, 4), 0.25),
        (Decimal("0.2"), 0.2),
    ],
)
def test_numbers_of_any_kind_keep_their_value(value, number):
    score = reward(lambda p, c, r: [value]).score(prompts("1"), ["x"])[0]
    assert score.value == number and type(score.value) is float and score.parts == {"own": number}


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, -math.inf, None, "1.0", [1.0], {}, 1j, np.nan, np.array([1.0, 2.0]), 10**400]
)
def test_what_is_not_a_finite_number_is_a_failure(value):
    def second(p, c, r):
        return [value if text == "bad" else 1.0 for text in c]

    with pytest.raises(RewardError, match=r"reward 'own' returned .*t/0/1 'question 1' and completion 'bad'"):
        reward(second).score(prompts("1", "2"), ["good", "bad"])
    good, bad = reward(second, "drop").score(prompts("1", "2"), ["good", "bad"])
    assert good.value == 1.0 and good.failed is None
    assert math.isnan(bad.value) and math.isnan(bad.parts["own"]) and "reward 'own' returned" in bad.failed


def test_arrays_and_generators_are_lists_of_numbers():
    def values(function):
        return [s.value for s in reward(function, whole_batch=True).score(prompts("1", "2"), ["", "ab"])]

    assert values(lambda p, c, r: np.array([0.5, 1.0])) == [0.5, 1]
    assert values(lambda p, c, r: (len(t) for t in c)) == [0, 2]


@pytest.mark.parametrize("on_error", ["fail", "drop"])
@pytest.mark.parametrize(
    ("result", "message"),
    [
        ([1.0], "returned 1 values for 2 completions"),
        ([1.0] * 3, "returned 3 values for 2 completions"),
        ([], "returned 0 values"),
        (None, r"returned None \(NoneType\); expected a list of 2 numbers"),
        (1.0, r"returned 1.0 \(float\)"),
        ("11", r"returned '11' \(str\)"),
        ({0: 1.0, 1: 1.0}, r"\(dict\)"),
    ],
)
def test_a_wrong_number_of_values_always_stops(on_error, result, message):
    with pytest.raises(RewardError, match=message):
        reward(lambda p, c, r: result, on_error, whole_batch=True).score(prompts("1", "2"), ["a", "b"])


def test_a_sum_that_overflows_stops():
    with pytest.raises(RewardError, match="weighted sum"):
        reward(lambda p, c, r: [1e308], second=lambda p, c, r: [1e308]).score(prompts("1"), ["a"])


# ---------------------------------------------------------------- failures


def raises_on_bad(p, c, r):
    return [{"good": 1.0, "fair": 0.5}[text] for text in c]


def test_fail_names_function_exception_sample_and_line():
    with pytest.raises(RewardError) as error:
        reward(raises_on_bad).score(prompts("1", "2", "3"), ["good", "bad", "fair"])
    message = str(error.value)
    assert "reward 'own' raised KeyError: 'bad' (" in message and "test_rewards.py:" in message
    assert "t/0/1 'question 1' and completion 'bad'" in message and 'on_error = "drop"' in message


def test_drop_loses_the_samples_that_raise_and_no_other():
    scores = reward(raises_on_bad, "drop", other=lambda p, c, r: [0.25] * len(c)).score(
        prompts("1", "2", "3"), ["good", "bad", "fair"]
    )
    assert [s.value for s in (scores[0], scores[2])] == [1.25, 0.75]
    assert scores[1].failed.startswith("reward 'own' raised KeyError: 'bad'")
    assert math.isnan(scores[1].value) and math.isnan(scores[1].parts["own"]) and scores[1].parts["other"] == 0.25


def test_drop_counts_every_sample_when_all_raise():
    scores = reward(raises_on_bad, "drop").score(prompts("1", "2"), ["x", "y"])
    assert all(s.failed and math.isnan(s.value) for s in scores)


def test_a_function_sees_one_completion_or_all_of_them():
    def rank(p, c, r):
        return [sorted(c).index(text) for text in c]

    assert [s.value for s in reward(rank).score(prompts("1", "2"), ["b", "a"])] == [0, 0]
    assert [s.value for s in reward(rank, whole_batch=True).score(prompts("1", "2"), ["b", "a"])] == [1, 0]


def test_a_whole_batch_fails_as_a_whole():
    made = reward(raises_on_bad, "drop", whole_batch=True)
    assert all(s.failed for s in made.score(prompts("1", "2"), ["good", "bad"]))
    assert made.numbers() == {"failures/own/exception": 2}


def test_score_gives_what_failed_the_value_that_the_recipe_says_and_counts_it():
    made = reward(raises_on_bad, "score", -1.0, other=lambda p, c, r: [0.25] * len(c))
    good, bad = made.score(prompts("1", "2"), ["good", "bad"])
    assert (good.value, good.replaced, good.failed) == (1.25, None, None)
    assert bad.value == -0.75 and bad.parts == {"own": -1.0, "other": 0.25} and bad.failed is None
    assert bad.replaced.startswith("reward 'own' raised KeyError: 'bad'")
    assert made.numbers() == {"failures/own/exception": 1, "rewards/error_scored": 1}
    assert made.numbers() == {"rewards/error_scored": 0}  # each look starts anew


def test_failures_are_counted_by_function_and_kind():
    made = reward(raises_on_bad, "drop", other=lambda p, c, r: [math.nan])
    made.score(prompts("1", "2", "3"), ["good", "bad", "fair"])
    assert made.numbers() == {"failures/other/not_a_number": 3, "failures/own/exception": 1}


def test_fail_stops_at_the_first_failure():
    seen = []

    def picky(p, c, r):
        seen.extend(c)
        return [{"good": 1.0}[text] for text in c]

    with pytest.raises(RewardError, match="completion 'bad'"):
        reward(picky).score(prompts("1", "2", "3"), ["good", "bad", "worse"])
    assert seen == ["good", "bad"]


def test_an_async_function_is_awaited():
    async def reward_later(p, c, r):
        await asyncio.sleep(0)
        return [float(len(text)) for text in c]

    assert [s.value for s in reward(reward_later).score(prompts("1", "2"), ["", "ab"])] == [0, 2]


class Evil:
    def __repr__(self):
        raise RuntimeError("no repr")

    def __float__(self):
        raise RuntimeError("no float")


def test_a_value_that_raises_when_it_is_looked_at_is_a_failure():
    (score,) = reward(lambda p, c, r: [Evil()], "drop").score(prompts("1"), ["a"])
    assert "<Evil whose repr raised RuntimeError>, which is not one number (no float)" in score.failed


def test_a_generator_that_raises_midway_is_a_function_that_raises():
    def midway(p, c, r):
        for text in c:
            yield {"good": 1.0}[text]

    scores = reward(midway, "drop").score(prompts("1", "2"), ["good", "bad"])
    assert scores[0].value == 1.0 and scores[1].failed


def test_functions_cannot_change_each_others_rows():
    def spoil(p, c, r):
        for row in r:
            row["answer"], row["meta"]["n"] = "spoilt", -1
        return [0.0] * len(c)

    def look(p, c, r):
        return [float(row == {"answer": "1", "meta": {"n": 1}}) for row in r]

    sample = prompts("1", meta={"n": 1}) * 2
    assert [s.parts["look"] for s in reward(spoil, look=look).score(sample, ["", ""])] == [1.0, 1.0]
    assert sample[0].row == {"answer": "1", "meta": {"n": 1}}


def test_a_row_that_cannot_be_copied_is_a_failure():
    (score,) = reward(exact, "drop").score(prompts("1", lock=threading.Lock()), ["1"])
    assert "reward 'own': the data row cannot be copied (TypeError: cannot pickle" in score.failed


def test_prompts_and_completions_must_be_as_many():
    with pytest.raises(RewardError, match="got 2 and 1"):
        reward(raises_on_bad).score(prompts("1", "2"), ["good"])
    assert reward(raises_on_bad).score([], []) == []


def test_a_reward_that_exits_is_a_reward_that_failed(tmp_path):
    (tmp_path / "leaving.py").write_text("import sys\ndef reward(prompts, completions, rows): sys.exit(0)\n")
    config = RewardConfig(functions=[{"name": "leaving:reward"}], folder=str(tmp_path), workers=0)
    with pytest.raises(RewardError, match=r"leaving:reward.*SystemExit"):
        make_reward(config).score([Prompt("p", "p", (1,))], ["c"])
