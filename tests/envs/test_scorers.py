"""Built-in scorers that compute with what a model wrote: what they take for equal, and what they refuse."""

import sys

import pytest
import reasoning_gym
from reasoning_gym.factory import DATASETS

from lockstep.config import RewardConfig, TaskConfig
from lockstep.envs.rewards import make_reward
from lockstep.envs.scorers import Named, load, runs_code
from lockstep.errors import ConfigError
from lockstep.types import Prompt


@pytest.fixture(scope="module")
def math_verify():
    return load(Named("math_verify"), None)


@pytest.mark.parametrize(
    ("gold", "completion", "value"),
    [
        ("1/2", "The answer is $\\frac{1}{2}$.", 1.0),
        ("1/2", "so it is \\boxed{0.5}", 1.0),
        (0.5, "1/2", 1.0),
        (7, "7", 1.0),
        ("\\frac{3}{4}", "$3/4$", 1.0),
        ("$x^2+2x+1$", "$(x+1)^2$", 1.0),
        ("\\boxed{12}", "It is 12", 1.0),
        ("1/2", "$1/3$", 0.0),
        ("7", "I do not know", 0.0),
        ("7", "", 0.0),
        ("(1,2)", "$(2,1)$", 0.0),
    ],
)
def test_math_verify_compares_values(math_verify, gold, completion, value):
    assert math_verify(["q"], [completion], [{"answer": gold}]) == [value]


@pytest.mark.parametrize("row", [{}, {"answer": None}, {"answer": ""}])
def test_math_verify_needs_an_answer_that_is_one(math_verify, row):
    with pytest.raises((KeyError, TypeError, ValueError)):
        math_verify(["q"], ["7"], [row])


def test_a_completion_that_cannot_be_computed_is_a_time_out_not_a_zero():
    config = RewardConfig(functions=[{"name": "math_verify"}], on_error="drop", workers=1, deadline_s=2.0)
    with make_reward(config) as reward:
        prompts = [Prompt(f"t/0/{i}", "q", (1,), {"answer": "7"}) for i in range(2)]
        hangs, right = reward.score(prompts, ["$9^{9^{9^{9}}}-9^{9^{9^{9}}}+7$", "$7$"])
    assert hangs.failed is not None and "had not answered after 2 s" in hangs.failed
    assert right.value == 1.0


def test_a_missing_package_is_said(monkeypatch):
    for name, module, extra in [("math_verify", "math_verify", "math"), ("reasoning_gym", "reasoning_gym", "tasks")]:
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(ConfigError, match=rf"pip install 'lockstep-rl\[{extra}\]'"):
            load(Named(name), None)


# ---------------------------------------------------------------- reasoning-gym


def test_reasoning_gym_scores_as_the_data_set_does():
    score = load(Named("reasoning_gym", dataset="chain_sum", options={"max_terms": 2}), None)
    entry = reasoning_gym.create_dataset("chain_sum", seed=3, size=1)[0]
    answers = [entry["answer"], f" {entry['answer']}\n", f"it is {entry['answer']}", "no"]
    assert score([""] * 4, answers, [entry] * 4) == [1.0, 1.0, len(entry["answer"]) / len(answers[2]), 0.0]


def test_the_settings_of_the_task_reach_the_scorer():
    """This scorer rounds as the data set's `max_num_decimal_places` says."""
    task = TaskConfig(kind="reasoning_gym", dataset="time_intervals", options={"task_types": ["days"]})
    config = RewardConfig(functions=[{"name": "reasoning_gym"}], workers=1)
    entry = reasoning_gym.create_dataset("time_intervals", task_types=["days"], seed=1, size=1)[0]
    with make_reward(config, task) as reward:
        (score,) = reward.score([Prompt("t", "q", (1,), entry)], [entry["answer"]])
    assert score.value == 1.0


RUN_CODE = {"countdown", "puzzle24", "n_queens", "binary_matrix", "spiral_matrix", "string_insertion"}
RUN_CODE |= {"simple_integration", "intermediate_integration", "polynomial_multiplication", "composite"}


def test_scorers_that_run_code_are_found_and_no_plain_one_is():
    found = {name for name, (kind, _) in DATASETS.items() if runs_code(kind) is not None}
    assert found >= RUN_CODE
    # These evaluate text of their own making, which cannot be told apart from outside.
    assert found - RUN_CODE <= {"bitwise_arithmetic", "number_sorting"}


def test_a_scorer_that_runs_code_is_refused_unless_allowed():
    with pytest.raises(ConfigError, match=r"'countdown' runs text that the model wrote \(parse_expr\(answer\)\)"):
        load(Named("reasoning_gym", dataset="countdown"), None)
    assert callable(load(Named("reasoning_gym", dataset="countdown", allow_code=True), None))


def test_reasoning_gym_needs_its_task():
    with pytest.raises(ConfigError, match=r"task.kind = .reasoning_gym.*got None"):
        load(Named("reasoning_gym"), None)


def test_the_answer_in_a_completion():
    exact = load(Named("exact", answer=r"(?s)<answer>(.*?)</answer>"), None)
    texts = ["<answer> 7 </answer>", "<answer>8</answer> no, <answer>7</answer>", "7", "<answer>7"]
    assert exact([""] * 4, texts, [{"answer": 7}] * 4) == [1.0, 1.0, 0.0, 0.0]
    with pytest.raises(KeyError):  # a failure of the function stays one
        exact([""], ["<answer>7</answer>"], [{}])
