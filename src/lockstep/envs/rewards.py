"""Rewards: text in, one number per completion out. Functions, built in or the user's own `module:function`, and judges.

A function is called with lists, one entry per completion (one, or with `whole_batch` all of a step), and returns one
number for each:

    def reward(prompts: list[str], completions: list[str], rows: list[dict]) -> list[float]

prompts are the texts the policy saw (chat template included), completions the sampled text without special tokens, rows
the data rows (a copy each: a function may change its own). The reward of a sample is sum_i weight_i * value_i.

Functions run in worker processes with a deadline (`workers`); those built in that cannot hang run here. Nothing turns a
failure into a number by itself: one stops the run (`on_error = "fail"`), takes its sample out of training ("drop"), or
counts as the value that the recipe says ("score"); it is counted by function and kind in every case.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

from lockstep.envs.asking import Asker, Endpoint
from lockstep.envs.base import Score
from lockstep.envs.judge import Background, Judge
from lockstep.envs.outcome import Outcome, RewardFunction, WrongCount, call, failures, short
from lockstep.envs.scorers import PURE, Named, load
from lockstep.envs.verdicts import Verdicts
from lockstep.envs.workers import Pool
from lockstep.errors import ConfigError, RewardError
from lockstep.types import Prompt

if TYPE_CHECKING:
    from lockstep.config import RewardConfig, RewardJudge, TaskConfig

Batch = tuple[list[str], list[str], list[dict[str, Any]]]


class Scorer(Protocol):
    """One part of the reward."""

    def outcomes(
        self, prompts: Sequence[Prompt], completions: Sequence[str], *, until_failure: bool
    ) -> Sequence[Outcome | None]:
        """One outcome per completion. until_failure: nothing is begun after a failure; what was not is None.

        Raises: RewardError where no sample is at fault.
        """
        ...


@dataclass(frozen=True)
class Function:
    """A function, run in a pool's workers, or here where `function` is given. whole_batch: as in the recipe."""

    name: str
    function: RewardFunction | None = None
    pool: Pool | None = None
    whole_batch: bool = False

    def outcomes(
        self, prompts: Sequence[Prompt], completions: Sequence[str], *, until_failure: bool
    ) -> list[Outcome | None]:
        batches = self._batches(prompts, completions)
        if self.pool is not None:
            found = self.pool.run(self.name, batches, until_failure=until_failure)
        else:
            found = self._here(batches, until_failure)
        return [
            outcome
            for batch, outcomes in zip(batches, found, strict=True)
            for outcome in (outcomes if outcomes is not None else [None] * len(batch[1]))
        ]

    def _batches(self, prompts: Sequence[Prompt], completions: Sequence[str]) -> list[Batch]:
        texts, rows = [prompt.text for prompt in prompts], [dict(prompt.row) for prompt in prompts]
        if self.whole_batch:
            return [(texts, list(completions), rows)]
        return [([text], [done], [row]) for text, done, row in zip(texts, completions, rows, strict=True)]

    def _here(self, batches: Sequence[Batch], until_failure: bool) -> list[list[Outcome] | None]:
        found: list[list[Outcome] | None] = [None] * len(batches)
        for i, (prompts, completions, rows) in enumerate(batches):
            found[i] = outcomes = self._one_here(prompts, completions, rows)
            if until_failure and failures(outcomes):
                break
        return found

    def _one_here(self, prompts: list[str], completions: list[str], rows: list[dict[str, Any]]) -> list[Outcome]:
        assert self.function is not None
        try:
            # Each row by itself: two completions of a prompt must not share one that a function may change.
            copies = [copy.deepcopy(row) for row in rows]
        except Exception as error:  # whatever the row's own classes raise
            why = f"reward {self.name!r}: the data row cannot be copied ({type(error).__name__}: {error})"
            return [Outcome(kind="exception", why=why)] * len(rows)
        try:
            return call(self.name, self.function, (prompts, completions, copies))
        except WrongCount as error:
            raise RewardError(str(error)) from error


@dataclass
class Reward:
    """The recipe's reward: its parts by name, a weight for each, and what a failure of one is.

    on_error: "fail" | "drop" | "score". error_score: for "score". pool, background: closed with it.
    """

    scorers: Mapping[str, Scorer]
    weights: Mapping[str, float]
    on_error: str
    error_score: float | None = None
    pool: Pool | None = None
    background: Background | None = None
    verdicts: Verdicts | None = None
    _kinds: Counter[tuple[str, str]] = field(default_factory=Counter)
    _replaced: int = 0

    def score(self, prompts: Sequence[Prompt], completions: Sequence[str]) -> list[Score]:
        """One `Score` per completion. prompts[i] is the prompt of completions[i] (repeated for a group's samples).

        Raises: RewardError when a function returns the wrong number of values (always), or, under "fail", when a part
        fails; the message names the part and the sample.
        """
        if len(prompts) != len(completions):
            raise RewardError(f"one prompt per completion expected, got {len(prompts)} and {len(completions)}")
        if not prompts:
            return []
        outcomes = {name: self._run(name, prompts, completions) for name in self.scorers}
        return [self._combine({name: values[i] for name, values in outcomes.items()}) for i in range(len(prompts))]

    def add(self, name: str, scorer: Scorer, weight: float) -> None:
        """One more part: what cannot be made before the run's devices are known."""
        assert name not in self.scorers, f"two rewards are called {name!r}"
        self.scorers = {**self.scorers, name: scorer}
        self.weights = {**self.weights, name: weight}

    def numbers(self) -> dict[str, int]:
        """For the metrics, of what was scored since the last call: failures/NAME/KIND where there were any,
        rewards/error_scored under "score" (samples that hold an `error_score`), judge/NAME/... of each judge."""
        found = {f"failures/{name}/{kind}": count for (name, kind), count in sorted(self._kinds.items())}
        if self.on_error == "score":
            found["rewards/error_scored"] = self._replaced
        self._kinds, self._replaced = Counter(), 0
        for judge in self._judges:
            found |= judge.counts()
        return found

    @property
    def _judges(self) -> list[Judge]:
        return [scorer for scorer in self.scorers.values() if isinstance(scorer, Judge)]

    def keep_verdicts(self, run_dir: Path) -> None:
        """Keep what judges say in the run directory, and use what is there. Nothing where there are no judges.

        Raises: CheckpointError for a file that holds something else.
        """
        if not (judges := self._judges):
            return
        kept = Verdicts(run_dir / "verdicts.sqlite")
        if self.verdicts is not None:
            self.verdicts.close()
        self.verdicts = kept
        for judge in judges:
            judge.verdicts = kept

    def close(self) -> None:
        """End worker processes and connections; a second call does nothing."""
        if self.pool is not None:
            self.pool.close()
        if self.background is not None:
            for judge in self._judges:
                judge.close()
            self.background.close()
            self.background = None
        if self.verdicts is not None:
            self.verdicts.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _run(self, name: str, prompts: Sequence[Prompt], completions: Sequence[str]) -> list[Outcome]:
        found = self.scorers[name].outcomes(prompts, completions, until_failure=self.on_error == "fail")
        for outcome, prompt, completion in zip(found, prompts, completions, strict=True):
            if outcome is None or outcome.kind is None:
                continue
            if self.on_error == "fail":
                raise RewardError(
                    f"{outcome.why} for the sample with prompt {prompt.id} {short(prompt.text)} and completion "
                    f"{short(completion)}. {_REMEDY}"
                )
            self._kinds[name, outcome.kind] += 1
        assert all(outcome is not None for outcome in found), "only a failure keeps others from being begun"
        return [outcome for outcome in found if outcome is not None]

    def _combine(self, outcomes: Mapping[str, Outcome]) -> Score:
        failed = {name: outcome for name, outcome in outcomes.items() if outcome.kind is not None}
        parts = {name: outcome.value for name, outcome in outcomes.items()}
        why = "; ".join(outcome.why for outcome in failed.values())
        if failed and self.on_error != "score":
            return Score(math.nan, parts, why)
        if failed:
            assert self.error_score is not None
            parts |= dict.fromkeys(failed, self.error_score)
            self._replaced += 1
        total = sum(self.weights[name] * value for name, value in parts.items())
        if not math.isfinite(total):
            raise RewardError(
                f"the weighted sum of {parts} with weights {dict(self.weights)} is {total}; scale them down"
            )
        return Score(total, parts, replaced=why or None)


_REMEDY = (
    'Mend what failed, or set reward.on_error = "drop" to leave such samples out of training, counted, or "score" to '
    "give them a value of your choice"
)


def make_reward(
    config: RewardConfig,
    task: TaskConfig | None = None,
    rollout: Callable[[RewardJudge], Asker] | None = None,
) -> Reward:
    """The reward that a recipe's `[reward]` table asks for; close it. Modules are looked for in `config.folder` first.

    task: the recipe's, for the reward "reasoning_gym". rollout: who answers for a judge with engine = "rollout".
    Raises: ConfigError for an unknown function, one whose arguments do not fit, or a judge that cannot be asked.
    """
    of_gym = task is not None and task.kind == "reasoning_gym"
    named = {
        entry.name: Named(
            entry.name,
            entry.answer,
            entry.allow_code,
            task.dataset if task is not None and of_gym else None,
            dict(task.options) if task is not None and of_gym else {},
        )
        for entry in config.functions
    }
    judges = {entry.name: _asker(entry, rollout) for entry in config.judges}
    away = [one for name, one in named.items() if config.workers and name not in PURE]
    here = {name: load(one, config.folder) for name, one in named.items() if one not in away}
    pool = Pool(away, config.folder, config.workers, config.deadline_s) if away else None
    scorers: dict[str, Scorer] = {
        entry.name: Function(entry.name, here.get(entry.name), None if entry.name in here else pool, entry.whole_batch)
        for entry in config.functions
    }
    background = Background() if judges else None
    verdicts = Verdicts(None) if judges else None
    for judge in config.judges:
        assert background is not None and verdicts is not None
        scorers[judge.name] = Judge(judge, judges[judge.name], background, verdicts)
    weights = {entry.name: entry.weight for entry in config.functions}
    weights |= {judge.name: judge.weight for judge in config.judges}
    return Reward(scorers, weights, config.on_error, config.error_score, pool, background, verdicts)


def _asker(judge: RewardJudge, rollout: Callable[[RewardJudge], Asker] | None) -> Asker:
    if judge.engine == "endpoint":
        return Endpoint(judge)
    if rollout is None:
        raise ConfigError(
            f'judge {judge.name!r} has engine = "rollout", which answers within a run only; to try its rubric outside '
            "of one, name a server that serves the model"
        )
    return rollout(judge)
