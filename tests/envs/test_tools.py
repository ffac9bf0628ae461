"""Tools: how a call is read, and a calculator that runs nothing of what it reads."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.envs.adapters import reasoning_gym
from lockstep.envs.multi_turn import Turn
from lockstep.envs.tools import Calculator, ToolCall, ToolError, calculator, parse_call
from lockstep.errors import ConfigError


def test_calls_are_read_in_both_forms() -> None:
    assert parse_call("so <tool>calculator: 12*7</tool>") == ToolCall("calculator", "12*7")
    assert parse_call('<tool>{"name": "calculator", "argument": "12*7"}</tool>') == ToolCall("calculator", "12*7")
    assert parse_call("<tool>a: 1</tool> <tool>b: x: y") == ToolCall("b", "x: y")
    assert parse_call("the answer is 3") is None
    for text, why in (("<tool>12*7</tool>", "NAME: ARG"), ("<tool>{x}</tool>", "JSON"), ('<tool>{"a": 1}', "expected")):
        with pytest.raises(ToolError, match=why):
            parse_call(text)


SUMS = st.recursive(
    st.integers(0, 99).map(str),
    lambda x: st.tuples(x, st.sampled_from("+-*"), x).map("({0[0]}{0[1]}{0[2]})".format),
    max_leaves=8,
)


@given(SUMS)
def test_the_calculator_is_right(expression: str) -> None:
    assert asyncio.run(Calculator().call(expression)) == str(eval(expression))


NONE = ["", "1+", "2**9", "x", "f(1)", "'a'*3", "True", "1/0", "1 if 1 else 2", "[1]", "1e308*10", "(" * 150, "9" * 201]


@pytest.mark.parametrize("text", NONE)
def test_what_is_no_arithmetic_is_refused(text: str) -> None:
    with pytest.raises(ToolError):
        asyncio.run(Calculator().call(text))


def test_the_calculators_environment() -> None:
    async def turns(*texts: str) -> list[tuple[str | None, float, bool]]:
        environment = calculator({"answer": "84"}, 0)
        steps = [await environment.step(Turn(text, (1,), "stop", i)) for i, text in enumerate(texts)]
        return [(s.observation and s.observation.text, s.reward, s.done) for s in steps]

    assert asyncio.run(turns("<tool>calculator: 12*7</tool>", "Answer: 84")) == [
        (" = 84\n", 0.0, False), (None, 1.0, True)
    ]  # fmt: skip
    assert asyncio.run(turns("Answer: 85")) == [(None, 0.0, True)]
    ((said, reward, done),) = asyncio.run(turns("<tool>oracle: 1</tool>"))
    assert "there is no tool 'oracle'" in said and not done and reward == 0


def test_a_reasoning_gym_problem_is_one_turn() -> None:
    gym = pytest.importorskip("reasoning_gym")
    row = gym.create_dataset("chain_sum", seed=3, size=1)[0]

    async def reward(text: str) -> tuple[float, bool]:
        step = await reasoning_gym(row, 0).step(Turn(text, (1,), "stop", 0))
        return step.reward, step.done

    assert asyncio.run(reward(row["answer"] + "\n")) == (1.0, True)
    assert asyncio.run(reward("no"))[0] < 1


PAGE = (Path(__file__).parents[2] / "docs" / "multi-turn.md").read_text()


def test_the_pages_environments_do_what_it_says() -> None:
    made: dict[str, dict[str, Any]] = {}
    for name, code in re.findall(r"^```python file=(\S+)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE):
        exec(compile(code, name, "exec"), made.setdefault(name, {}))

    async def play(environment: Any, *texts: str) -> list[Any]:
        await environment.start()
        return [await environment.step(Turn(text, (1,), "stop", i)) for i, text in enumerate(texts)]

    steps = asyncio.run(play(made["guess.py"]["make"]({"answer": "5"}, 0), "3\n", "9", "5"))
    assert [(s.observation, s.reward, s.done) for s in steps] == [
        ("higher\n", -0.1, False), ("lower\n", -0.1, False), (None, 1.0, True)
    ]  # fmt: skip
    row = {"capitals": {"France": "Paris"}, "answer": "Paris"}
    steps = asyncio.run(play(made["my_tools.py"]["make"](row, 0), "<tool>capital: France</tool>", "It is Paris."))
    assert steps[0].observation.text == "Paris" and steps[1].reward == 1.0


def test_a_scorer_that_runs_what_the_model_wrote_is_no_environment(tmp_path) -> None:
    """An environment is in lockstep's own process, so what a worker's deadline would end must not begin."""
    gym = pytest.importorskip("reasoning_gym")
    row = gym.create_dataset("spiral_matrix", size=1, seed=0)[0]
    with pytest.raises(ConfigError, match="the scorer of reasoning-gym's 'spiral_matrix' runs text that the model"):
        reasoning_gym(row, 0)
