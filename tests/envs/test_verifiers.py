"""Environments of verifiers, where it is installed (`make test-verifiers`): its own rollout, played turn by turn."""

from __future__ import annotations

import asyncio
import builtins
import signal
from typing import Any

import pytest

from lockstep.envs.multi_turn import EnvironmentFailure, Guarded, Step, Turn
from lockstep.envs.verifiers import Adapted
from lockstep.errors import ConfigError

QUESTIONS = [{"question": f"A number of 1 to 9? ({n})", "answer": str(n)} for n in range(1, 10)]


@pytest.fixture(scope="module")
def vf() -> Any:
    return pytest.importorskip("verifiers")


def guessing(vf: Any, **more: Any) -> Any:
    from datasets import Dataset

    class Guess(vf.MultiTurnEnv):
        async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
            said = messages[-1].content
            if said == "boom":
                raise vf.Error("no more guesses")
            if said == "two":
                return [{"role": "user", "content": "one"}, {"role": "user", "content": "two"}]
            if said == state["answer"]:
                state["final_env_response"] = [{"role": "user", "content": "right"}]
                return state["final_env_response"]
            return [{"role": "user", "content": "higher" if said < state["answer"] else "lower"}]

    async def right(completion: Any, answer: str) -> float:
        return float(any(m.content == answer for m in completion))

    async def turns(state: Any) -> float:
        return -0.1 * len(state["trajectory"])

    rubric = vf.Rubric(funcs=[right, turns], weights=[1.0, 1.0])
    return Guess(dataset=Dataset.from_list(QUESTIONS), rubric=rubric, system_prompt="Guess.", max_turns=4, **more)


def play(adapted: Adapted, row: dict[str, Any], said: list[str], cut: bool = False) -> list[Any]:
    """What comes of these turns; of a truncation too, if the environment is not done by then."""

    async def episode() -> list[Any]:
        guarded, found = Guarded(adapted.make(row, 0), 5.0), []
        try:
            assert await guarded.start() is None
            for number, text in enumerate(said):
                last = cut and number + 1 == len(said)
                step = await guarded.step(Turn(text, (1,), "length" if last else "stop", number))
                found.append(step)
                if step.done:
                    return found
            return [*found, await guarded.truncate()]
        finally:
            await guarded.close()

    return asyncio.run(episode())


def test_turns_are_those_of_the_librarys_own_rollout(vf: Any) -> None:
    adapted = Adapted(lambda: guessing(vf))
    row = next(r for r in (adapted.rows(i, 0) for i in range(9)) if r["example"]["answer"] == "5")
    assert [m["role"] for m in row["prompt"]] == ["system", "user"]
    first, second, third = play(adapted, row, ["7", "3", "5"])
    assert (first.observation.text, second.observation.text) == ("lower", "higher")
    assert first.observation.role == "user" and first.reward == second.reward == 0
    assert third == Step(None, pytest.approx(1.0 - 0.3), done=True)
    four = play(adapted, row, ["1", "2", "3", "4"])  # its own max_turns
    assert four[-1] == Step(None, pytest.approx(-0.4), done=True)


@pytest.mark.parametrize("cut", [False, True])
def test_what_a_limit_of_the_recipe_ends_is_judged(vf: Any, cut: bool) -> None:
    row = {"example": {**QUESTIONS[4], "example_id": 4, "prompt": [{"role": "user", "content": "?"}]}}
    assert play(Adapted(lambda: guessing(vf)), row, ["7", "3"], cut)[-1] == pytest.approx(-0.2)


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("boom", r"exception: step raised RuntimeError: the rollout failed: .*no more guesses"),
        ("two", r"exception: step raised ValueError: expected one message after a turn.*'one'.*'two'"),
    ],
)
def test_what_goes_wrong_is_said(vf: Any, said: str, why: str) -> None:
    row = {"example": {**QUESTIONS[4], "example_id": 4, "prompt": [{"role": "user", "content": "?"}]}}
    with pytest.raises(EnvironmentFailure, match=why):
        play(Adapted(lambda: guessing(vf)), row, ["9", said])


def test_tools_called_by_an_api_and_rewards_of_groups_are_refused(vf: Any) -> None:
    async def add(a: int, b: int) -> int:
        """a + b"""
        return a + b

    def tools() -> Any:
        from datasets import Dataset

        return vf.ToolEnv(tools=[add], dataset=Dataset.from_list(QUESTIONS), rubric=vf.Rubric(), max_turns=3)

    adapted = Adapted(tools)
    with pytest.raises(EnvironmentFailure, match="tools by an API of their own"):
        play(adapted, adapted.rows(0, 0), ["1"])

    async def best(states: list[Any]) -> list[float]:
        return [0.0 for _ in states]

    def group() -> Any:
        from datasets import Dataset

        return vf.SingleTurnEnv(dataset=Dataset.from_list(QUESTIONS), rubric=vf.Rubric(funcs=[best]))

    with pytest.raises(ConfigError, match="rewards whole groups"):
        Adapted(group).rows(0, 0)


def test_every_epoch_has_every_row_in_an_order_of_its_own(vf: Any) -> None:
    adapted = Adapted(lambda: guessing(vf))
    answers = [adapted.rows(i, 3)["example"]["answer"] for i in range(18)]
    assert sorted(answers[:9]) == sorted(answers[9:]) and answers[:9] != answers[9:]
    assert answers == [adapted.rows(i, 3)["example"]["answer"] for i in range(18)]
    assert answers != [adapted.rows(i, 4)["example"]["answer"] for i in range(18)]


def test_ctrl_c_stays_the_runs(vf: Any) -> None:
    before = signal.getsignal(signal.SIGINT)
    assert Adapted(lambda: guessing(vf)).rows(0, 0) and signal.getsignal(signal.SIGINT) is before


def test_without_the_library_the_remedy_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(name: str, *rest: Any) -> Any:
        if name.partition(".")[0] == "verifiers":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ConfigError, match=r"needs verifiers>=0.1.14,<0.4.*pip install 'lockstep-rl\[verifiers\]'"):
        Adapted(lambda: None).rows(0, 0)
