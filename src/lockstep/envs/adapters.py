"""Other libraries' problems as environments.

reasoning-gym: `environment.function = "lockstep.envs.adapters:reasoning_gym"` with `task.kind = "reasoning_gym"`. One
turn; its reward is the data set's own score of the whole turn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from lockstep.envs.multi_turn import Environment, Step, Turn
from lockstep.envs.scorers import runs_code
from lockstep.errors import ConfigError


class Answer(Environment):
    """One turn, which is the answer. judge: its text -> its reward."""

    def __init__(self, judge: Callable[[str], float]) -> None:
        self._judge = judge

    async def step(self, turn: Turn) -> Step:
        return Step(reward=self._judge(turn.text), done=True)


@lru_cache
def _scorer(dataset: str) -> Callable[[str, dict[str, Any]], float]:
    """Raises ConfigError for one that runs what the model wrote: an environment is not in a process of its own."""
    from reasoning_gym.factory import DATASETS, get_score_answer_fn

    if dataset in DATASETS and (found := runs_code(DATASETS[dataset][0])):
        raise ConfigError(
            f"the scorer of reasoning-gym's {dataset!r} runs text that the model wrote ({found}); use the reward "
            '"reasoning_gym" with allow_code, or an environment of your own'
        )
    return get_score_answer_fn(dataset)


def reasoning_gym(row: Mapping[str, Any], seed: int) -> Environment:
    """By the scorer of the data set that the row's `metadata` names. Raises KeyError for a row of another kind,
    ConfigError for a scorer that runs what the model wrote."""
    score = _scorer(row["metadata"]["source_dataset"])
    return Answer(lambda text: float(score(text.strip(), dict(row))))
