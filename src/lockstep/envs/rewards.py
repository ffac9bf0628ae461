"""Rewards: text in, one number per completion out; built in, or the user's own `module:function`.

A reward function sees a whole batch, one entry per completion, and returns one number for each:

    def reward(prompts: list[str], completions: list[str], rows: list[dict]) -> list[float]

prompts are the texts the policy saw (chat template included), completions the sampled text without special tokens, rows
the data rows (a copy each: a function may change its own). The reward of a sample is sum_i weight_i * value_i.

Nothing here turns a failure into a number. A function that raises, or returns something that is not a finite number,
stops the run (`on_error = "fail"`) or takes the offending samples out of training, counted (`on_error = "drop"`).

Built in are exact comparisons only. The scorers of reasoning-gym are deliberately not used: they give partial credit
for near misses, and some of them execute text that the model wrote.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, SupportsFloat

from lockstep.envs.base import Score, describe_exception, load_function, nearest
from lockstep.errors import ConfigError, RewardError
from lockstep.types import Prompt

if TYPE_CHECKING:
    from lockstep.config import RewardConfig

RewardFunction = Callable[[list[str], list[str], list[dict[str, Any]]], Sequence[float]]


def first_line_exact(prompts: list[str], completions: list[str], rows: list[dict[str, Any]]) -> list[float]:
    """1.0 where the completion's first line equals the row's `answer`, else 0.0; white space around either is ignored.

    The first line is the text up to the first line feed, or all of it when there is none: a line that ended with the
    model's own stop token, or was cut at `max_new_tokens`, counts as it stands. An empty first line is a line.
    """
    scores = []
    for completion, row in zip(completions, rows, strict=True):
        gold = _gold(row)
        if "\n" in gold:
            raise ValueError(
                f"answer {gold!r} has several lines, which no first line can equal; use the reward 'exact'"
            )
        scores.append(float(completion.split("\n", 1)[0].strip() == gold))
    return scores


def exact(prompts: list[str], completions: list[str], rows: list[dict[str, Any]]) -> list[float]:
    """1.0 where the whole completion equals the row's `answer`, else 0.0; white space around either is ignored."""
    return [float(completion.strip() == _gold(row)) for completion, row in zip(completions, rows, strict=True)]


BUILT_IN: dict[str, RewardFunction] = {"first_line_exact": first_line_exact, "exact": exact}


def _gold(row: Mapping[str, Any]) -> str:
    if "answer" not in row:
        raise KeyError(f"the data row has no 'answer', only {', '.join(sorted(row)) or 'nothing'}")
    answer = row["answer"]
    if isinstance(answer, bool) or not isinstance(answer, (str, int)):
        raise TypeError(
            f"the row's answer is {answer!r} ({type(answer).__name__}); exact comparison needs text or an int"
        )
    return str(answer).strip()


@dataclass(frozen=True)
class _Value:
    """Outcome of one function for one sample: a finite value, or the reason why there is none."""

    value: float = math.nan
    failed: str | None = None


@dataclass(frozen=True)
class Reward:
    """The recipe's reward: functions by name, a weight for each, and what to do when one of them fails."""

    functions: Mapping[str, RewardFunction]
    weights: Mapping[str, float]
    on_error: str  # "fail" | "drop"

    def score(self, prompts: Sequence[Prompt], completions: Sequence[str]) -> list[Score]:
        """One `Score` per completion. prompts[i] is the prompt of completions[i] (repeated for a group's samples).

        Under "drop" a batch in which a function raised is given to it again sample by sample, so that only the samples
        that raise are lost; a function must therefore treat each sample by itself. (Under "fail" the same is done to
        name the sample.)

        Raises: RewardError when a function returns the wrong number of values (always), or, under "fail", when it
        raises or returns something that is not a finite number; the message names the function and the sample.
        """
        if len(prompts) != len(completions):
            raise RewardError(f"one prompt per completion expected, got {len(prompts)} and {len(completions)}")
        if not prompts:
            return []
        outcomes = {name: self._run(name, prompts, completions) for name in self.functions}
        return [self._combine({name: values[i] for name, values in outcomes.items()}) for i in range(len(prompts))]

    def _run(self, name: str, prompts: Sequence[Prompt], completions: Sequence[str]) -> list[_Value]:
        try:
            result = self._call(name, prompts, completions)
        except (Exception, SystemExit) as exc:
            if self.on_error == "drop":
                return [self._alone(name, prompt, text) for prompt, text in zip(prompts, completions, strict=True)]
            raise RewardError(self._blame(name, exc, prompts, completions)) from exc
        values = _values(name, result, len(prompts))
        if self.on_error == "fail":
            for outcome, prompt, completion in zip(values, prompts, completions, strict=True):
                if outcome.failed is not None:
                    raise RewardError(f"{outcome.failed} for {_sample(prompt, completion)}. {_REMEDY}")
        return values

    def _call(self, name: str, prompts: Sequence[Prompt], completions: Sequence[str]) -> object:
        """What the function returns, iterated to its end (a generator's code runs only then); raises what it raises."""
        rows = [copy.deepcopy(dict(prompt.row)) for prompt in prompts]
        result: object = self.functions[name]([prompt.text for prompt in prompts], list(completions), rows)
        return list(result) if isinstance(result, Iterable) and not isinstance(result, _NOT_LISTS) else result

    def _alone(self, name: str, prompt: Prompt, completion: str) -> _Value:
        try:
            result = self._call(name, [prompt], [completion])
        except (Exception, SystemExit) as exc:
            return _Value(failed=f"reward {name!r} raised {describe_exception(exc)}")
        return _values(name, result, 1)[0]

    def _blame(self, name: str, exc: BaseException, prompts: Sequence[Prompt], completions: Sequence[str]) -> str:
        """The message for a batch that raised `exc`: finds the sample by giving them to the function one at a time."""
        for prompt, completion in zip(prompts, completions, strict=True):
            alone = self._alone(name, prompt, completion)
            if alone.failed is not None:
                return f"{alone.failed} for {_sample(prompt, completion)}. {_REMEDY}"
        return (
            f"reward {name!r} raised {describe_exception(exc)} for a batch of {len(prompts)} samples, "
            f"yet for none of them alone (the first is {_sample(prompts[0], completions[0])}). {_REMEDY}"
        )

    def _combine(self, outcomes: Mapping[str, _Value]) -> Score:
        parts = {name: outcome.value for name, outcome in outcomes.items()}
        reasons = [outcome.failed for outcome in outcomes.values() if outcome.failed is not None]
        if reasons:
            return Score(math.nan, parts, "; ".join(reasons))
        total = sum(self.weights[name] * value for name, value in parts.items())
        if not math.isfinite(total):
            raise RewardError(
                f"the weighted sum of {parts} with weights {dict(self.weights)} is {total}; scale them down"
            )
        return Score(total, parts)


_NOT_LISTS = (str, bytes, Mapping)  # iterable, but never a list of rewards
_REMEDY = 'Fix the function, or set reward.on_error = "drop" to leave such samples out of training, counted'


def make_reward(config: RewardConfig) -> Reward:
    """The reward that a recipe's `[reward]` table asks for. Modules are looked for in `config.folder` first.

    Raises: ConfigError for an unknown function, or one whose arguments do not fit.
    """
    functions = {entry.name: _function(entry.name, config.folder) for entry in config.functions}
    return Reward(functions, {entry.name: entry.weight for entry in config.functions}, config.on_error)


def _function(name: str, folder: str | None) -> RewardFunction:
    if name in BUILT_IN:
        return BUILT_IN[name]
    if ":" in name:
        return load_function(name, folder, ("prompts", "completions", "rows"))
    raise ConfigError(
        f"reward.functions: there is no built-in reward {name!r}; {nearest(name, BUILT_IN)}; "
        "a function of your own is written 'module:function'"
    )


def _values(name: str, result: object, count: int) -> list[_Value]:
    """The function's result as `count` outcomes. Raises: RewardError when it is not a list of that length."""
    if not isinstance(result, list):
        raise RewardError(
            f"reward {name!r} returned {_short(result)} ({type(result).__name__}); "
            f"expected a list of {count} numbers, one per completion"
        )
    if len(result) != count:
        raise RewardError(
            f"reward {name!r} returned {len(result)} values for {count} completions; "
            "expected exactly one per completion, in their order"
        )
    return [_number(name, value) for value in result]


def _number(name: str, value: object) -> _Value:
    """A finite number of any kind (bool, int, float, NumPy or array scalar); anything else fails with a reason."""
    if isinstance(value, SupportsFloat):
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError) as exc:
            return _Value(failed=f"reward {name!r} returned {_short(value)}, which is not one number ({exc})")
        if math.isfinite(number):
            return _Value(number)
        return _Value(failed=f"reward {name!r} returned {number}, which is not a finite number")
    return _Value(failed=f"reward {name!r} returned {_short(value)} ({type(value).__name__}), which is not a number")


def _sample(prompt: Prompt, completion: str) -> str:
    return f"the sample with prompt {prompt.id} {_short(prompt.text)} and completion {_short(completion)}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:120]} ... {text[-60:]}"
