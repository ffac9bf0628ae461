"""Environments of several turns: what a user writes, and what keeps it to its contract.

    class Guess(Environment):
        def __init__(self, number): self.number = number
        async def step(self, turn):
            if turn.text.strip() == self.number:
                return Step(reward=1.0, done=True)
            return Step("no, again: ")

    def make(row, seed): return Guess(row["answer"])

An environment is made for one sample and used once: `start`, then `step` until one says `done` or a limit is reached
(`truncate`), then `close`. Imports no jax.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import numbers
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol, TypeVar, get_args

from lockstep.envs.outcome import short
from lockstep.loading import describe_exception
from lockstep.types import FinishReason

T = TypeVar("T")
Role = Literal["user", "tool", "system"]
ROLES = get_args(Role)


@dataclass(frozen=True)
class Observation:
    """What the policy reads next. role: whose turn it is in a chat template; without one the text stands as it is."""

    text: str
    role: Role = "user"


@dataclass(frozen=True)
class Turn:
    """What the policy wrote. text: special tokens skipped. ids: as sampled, a stop token included. finish_reason:
    "length" where it was cut; then no turn follows, and a step that is not done is followed by `truncate`. number: from
    0."""

    text: str
    ids: tuple[int, ...]
    finish_reason: FinishReason
    number: int


@dataclass(frozen=True)
class Step:
    """What came of a turn. observation: what the policy reads next, not empty; needed where there is a next turn, else
    unused. reward: of this turn, finite; a sample's reward is the sum. done: the episode is over."""

    observation: Observation | str | None = None
    reward: float = 0.0
    done: bool = False


class Environment(Protocol):
    """One episode's. Subclass it: `start`, `truncate` and `close` then do nothing by default.

    Its code runs in an event loop that all episodes share: what blocks (a subprocess, a long computation) belongs in
    `asyncio.to_thread`, for a deadline can end what waits and not what blocks.
    """

    async def start(self) -> Observation | str | None:
        """Called once, before the first turn. The row's prompt is the first observation, the same for a whole group;
        what this returns comes after it, which only `task.template = "plain"` has a place for."""
        return None

    async def step(self, turn: Turn) -> Step:
        """The answer to a turn."""
        ...

    async def truncate(self) -> float:
        """Called instead of a further step where a limit of the recipe ends the episode before it is done: a turn that
        was cut, the last turn, the last token. What it returns is earned by the last turn, besides what that step
        gave."""
        return 0.0

    async def close(self) -> None:
        """Called once at the end, whatever happened before."""
        return None


MakeEnvironment = Callable[[Mapping[str, Any], int], Environment]
"""(the data row, a copy; the sample's seed) -> its environment."""

Kind = Literal["exception", "timeout", "contract"]


class EnvironmentFailure(Exception):
    """There is no answer: it raised, its deadline passed, or what it returned or was asked breaks the contract."""

    def __init__(self, kind: Kind, why: str) -> None:
        super().__init__(f"environment {kind}: {why}")


class Guarded:
    """An environment, held to its contract and to a deadline (seconds) for each call."""

    def __init__(self, environment: Environment, deadline_s: float) -> None:
        self._environment, self._deadline_s = environment, deadline_s
        self._state: Literal["new", "running", "done", "closed"] = "new"

    async def start(self) -> Observation | None:
        """Raises EnvironmentFailure, on a second call too."""
        self._require("new", "start")
        self._state = "running"
        return _observation(await self._within("start", self._environment.start))

    async def step(self, turn: Turn, last: bool = False) -> Step:
        """With an `Observation` unless done or `last`: nothing is read any more. Raises EnvironmentFailure, before
        `start` and after `done` too."""
        self._require("running", "step")
        step = await self._within("step", partial(self._environment.step, turn))
        if not isinstance(step, Step):
            raise EnvironmentFailure("contract", f"step returned {short(step)}; expected a Step")
        reward = _finite("step", step.reward)
        if not isinstance(step.done, bool):
            raise EnvironmentFailure("contract", f"step is done = {short(step.done)}; expected True or False")
        if step.done:
            self._state = "done"
            return Step(None, reward, done=True)
        observation = _observation(step.observation)
        if observation is None and not last:
            raise EnvironmentFailure("contract", "step is not done and returned no observation; what should be read?")
        return Step(observation, reward)

    async def truncate(self) -> float:
        """Raises EnvironmentFailure, before `start` and after `done` too."""
        self._require("running", "truncate")
        self._state = "done"
        return _finite("truncate", await self._within("truncate", self._environment.truncate))

    async def close(self) -> None:
        """Raises EnvironmentFailure; a second call does nothing."""
        if self._state != "closed":
            self._state = "closed"
            await self._within("close", self._environment.close)

    def _require(self, state: str, name: str) -> None:
        if self._state != state:
            raise EnvironmentFailure(
                "contract", f"{name} of an environment that is {self._state}; it is used once: start, steps, close"
            )

    async def _within(self, name: str, call: Callable[[], Awaitable[T]]) -> T:
        # Not wait_for: it would wait for code that ignores its cancellation.
        task = asyncio.ensure_future(_called(name, call))
        try:
            done, _ = await asyncio.wait({task}, timeout=self._deadline_s)
        except asyncio.CancelledError:
            task.cancel()
            raise
        if not done:
            task.cancel()
            raise EnvironmentFailure("timeout", f"{name} took more than {self._deadline_s:g} s")
        try:
            return task.result()
        except asyncio.CancelledError as error:
            raise EnvironmentFailure("exception", f"{name} raised {describe_exception(error)}") from error


async def _called(name: str, call: Callable[[], Awaitable[T]]) -> T:
    """Raises EnvironmentFailure whatever the call raises: what ends a process (SystemExit) would end the event loop
    that all episodes share, and nobody would hear of it."""
    try:
        found = call()
        if not inspect.isawaitable(found):
            raise EnvironmentFailure("contract", f"{name} returned {short(found)} at once; define it with `async def`")
        return await found
    except (EnvironmentFailure, asyncio.CancelledError):
        raise
    except BaseException as error:
        raise EnvironmentFailure("exception", f"{name} raised {describe_exception(error)}") from error


def _finite(name: str, reward: object) -> float:
    if isinstance(reward, numbers.Real):
        with suppress(OverflowError):
            if math.isfinite(found := float(reward)):
                return found
    raise EnvironmentFailure("contract", f"{name} gave the reward {short(reward)}; expected a finite number")


def _observation(given: object) -> Observation | None:
    if given is None:
        return None
    found = Observation(given) if isinstance(given, str) else given
    if not isinstance(found, Observation) or not isinstance(found.text, str):
        raise EnvironmentFailure("contract", f"an observation is {short(given)}; expected text or an Observation")
    if not found.text:
        raise EnvironmentFailure("contract", "an observation is empty; there would be nothing to read")
    if found.role not in ROLES:
        raise EnvironmentFailure("contract", f"an observation's role is {found.role!r}; expected one of {ROLES}")
    try:
        found.text.encode()
    except UnicodeEncodeError as error:
        raise EnvironmentFailure("contract", f"an observation is no valid Unicode: {error}") from error
    return found
