"""Other libraries' problems as environments.

reasoning-gym: `environment.function = "lockstep.envs.adapters:reasoning_gym"` with `task.kind = "reasoning_gym"`. One
turn; its reward is the data set's own score of the whole turn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lockstep.envs.multi_turn import Environment, Step, Turn


class Answer(Environment):
    """One turn, which is the answer. judge: its text -> its reward."""

    def __init__(self, judge: Callable[[str], float]) -> None:
        self._judge = judge

    async def step(self, turn: Turn) -> Step:
        return Step(reward=self._judge(turn.text), done=True)


def reasoning_gym(row: Mapping[str, Any], seed: int) -> Environment:
    """By the scorer of the data set that the row's `metadata` names. Raises KeyError for a row of another kind."""
    from reasoning_gym import get_score_answer_fn

    score = get_score_answer_fn(row["metadata"]["source_dataset"])
    return Answer(lambda text: float(score(text.strip(), dict(row))))
