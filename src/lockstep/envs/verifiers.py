"""Environments of the library `verifiers` (its `Environment` classes: versions 0.1.14 to 0.3), played by lockstep.

    # guess.py, next to the recipe
    import verifiers as vf
    from lockstep.envs.verifiers import Adapted

    adapted = Adapted(lambda: vf.load_environment("wordle"))
    rows, make = adapted.rows, adapted.make

The environment's own rollout runs as it is; its model client is the policy. A request of that client is a turn, what it
holds beyond the request before it is the observation, and the rubric's reward is earned by the last turn. Imports
verifiers late, and jax never.
"""

from __future__ import annotations

import asyncio
import random
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from lockstep.envs.multi_turn import ROLES, Environment, Observation, Step, Turn
from lockstep.envs.sources import derive_seed
from lockstep.errors import ConfigError

VERSIONS = ">=0.1.14,<0.4"


class Adapted:
    """An environment of verifiers, as a recipe's `task.function` (`rows`) and `environment.function` (`make`)."""

    def __init__(self, build: Callable[[], Any]) -> None:
        """build: makes the `verifiers.Environment`; called once, when rows or samples are first asked for."""
        self._build = build
        self._order: tuple[tuple[int, int], list[int]] = ((-1, 0), [])

    @cached_property
    def environment(self) -> Any:
        """Raises ConfigError where verifiers is missing or of another version, or an environment cannot be played."""
        _client_class()
        with _signals_kept():
            made = self._build()
        if not callable(getattr(made, "run_rollout", None)):
            raise ConfigError(f"expected an environment of verifiers, got {type(made).__name__}")
        if getattr(made, "requires_group_rollouts", False):
            raise ConfigError(
                f"{type(made).__name__} rewards whole groups at once; here every sample is an environment of its own. "
                "Give its rubric functions of one rollout"
            )
        return made

    def rows(self, index: int, seed: int) -> dict[str, Any]:
        """Rows of its data set without end, each epoch in an order of its own: `prompt`, the messages, and `example`,
        the row itself."""
        dataset = self.environment.get_dataset()
        size = len(dataset)
        epoch, at = divmod(index, size)
        if self._order[0] != (epoch, seed):
            drawn = random.Random(derive_seed(seed, "verifiers", epoch)).sample(range(size), size)
            self._order = (epoch, seed), drawn
        example = dict(dataset[self._order[1][at]])
        return {"prompt": example["prompt"], "example": example}

    def make(self, row: Mapping[str, Any], seed: int) -> Environment:
        """One rollout of it. row: as `rows` gives it. seed: unused; the library's environments take none."""
        if "example" not in row:
            raise ConfigError(f"the row has {sorted(row)} and no `example`; take the rows from `Adapted.rows`")
        return _Rollout(self.environment, row)


class _Rollout(Environment):
    def __init__(self, environment: Any, row: Mapping[str, Any]) -> None:
        self._environment, self._example = environment, dict(row["example"])
        self._client = _client_class()()
        self._seen: list[dict[str, Any]] = []
        self._task: asyncio.Task[Any] | None = None

    async def start(self) -> None:
        """Raises ValueError where it begins with other messages than the row's prompt."""
        run = self._environment.run_rollout(self._example, self._client, "lockstep", {})
        self._task = asyncio.ensure_future(run)
        asked = await self._next()
        wanted = _plain(self._example["prompt"])
        if asked != wanted:
            began = "ended before a turn" if asked is None else f"begins with {asked}"
            raise ValueError(f"the rollout {began}; the policy has read the row's prompt {wanted}")
        self._seen = wanted

    async def step(self, turn: Turn) -> Step:
        """Raises ValueError where the conversation is not continued by one message, RuntimeError as the rollout."""
        self._client.answer(turn)
        asked = await self._next()
        if asked is None:
            return Step(reward=self._reward(), done=True)
        self._seen.append({"role": "assistant", "content": turn.text})
        known = len(self._seen)
        if asked[:known] != self._seen:
            raise ValueError(f"the environment rewrites the conversation: {self._seen} became {asked}")
        if len(asked) != known + 1 or asked[-1]["role"] not in ROLES:
            raise ValueError(f"expected one message after a turn, of {' or '.join(ROLES)}; got {asked[known:]}")
        self._seen = asked
        return Step(Observation(asked[-1]["content"], asked[-1]["role"]))

    async def truncate(self) -> float:
        """The rubric judges what there is, as it does where the library's own limits end a rollout."""
        self._client.refuse()
        if await self._next() is not None:
            raise RuntimeError("the rollout goes on after its prompt was refused as too long")
        return self._reward()

    async def close(self) -> None:
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _next(self) -> list[dict[str, Any]] | None:
        """The messages of the next request; None when the rollout has ended. Raises what ended it."""
        assert self._task is not None
        asked = asyncio.ensure_future(self._client.asked.get())
        done, _ = await asyncio.wait({asked, self._task}, return_when=asyncio.FIRST_COMPLETED)
        if asked in done:
            return _plain(asked.result())
        asked.cancel()
        if error := self._task.result().get("error"):
            raise RuntimeError(f"the rollout failed: {error}")
        return None

    def _reward(self) -> float:
        assert self._task is not None
        return float(self._task.result()["reward"])


def _plain(messages: Any) -> list[dict[str, Any]]:
    """Role and text of each. Raises ValueError for what is no text (images, sounds)."""
    found = []
    for message in messages:
        role = message["role"] if isinstance(message, Mapping) else message.role
        content = message["content"] if isinstance(message, Mapping) else message.content
        if not isinstance(content, str):
            raise ValueError(f"a message of {role} has content that is not text: {content!r:.120}")
        found.append({"role": role, "content": content})
    return found


@contextmanager
def _signals_kept() -> Iterator[None]:
    """An environment of verifiers takes SIGINT and SIGTERM over when it is made; a run's own handling must stay."""
    if threading.current_thread() is not threading.main_thread():
        yield  # there it fails by itself: Python allows handlers in the main thread only
        return
    # Python allows handlers in the main thread only.
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _client_class() -> type[Any]:
    """Of a model client that is the policy. Raises ConfigError where verifiers is missing or of another version."""
    try:
        from verifiers.clients import Client
        from verifiers.errors import OverlongPromptError
        from verifiers.types import Response, ResponseMessage
    except ImportError as error:
        try:
            found = f"verifiers {version('verifiers')} is installed, which has no such classes ({error})"
        except PackageNotFoundError:
            found = "it is not installed"
        raise ConfigError(
            f"an environment of verifiers needs verifiers{VERSIONS}; {found}. Install it with: "
            "pip install 'lockstep-rl[verifiers]'"
        ) from error

    class Policy(Client):
        """asked: the messages of requests; each waits for its answer, or is refused."""

        def __init__(self) -> None:
            super().__init__(None)
            self.asked: asyncio.Queue[Any] = asyncio.Queue()
            self._answer: asyncio.Future[Turn | None] | None = None

        async def get_response(
            self, prompt: Any, model: str, sampling_args: Any, tools: Sequence[Any] | None = None, **_: Any
        ) -> Any:
            if tools:
                raise ValueError(
                    "it calls tools by an API of their own, and a policy writes text; see lockstep.envs.tools"
                )
            self._answer = asyncio.get_running_loop().create_future()
            self.asked.put_nowait(prompt)
            turn = await self._answer
            if turn is None:
                raise OverlongPromptError("a limit of the recipe's [environment] ends the episode")
            cut = turn.finish_reason == "length"
            message = ResponseMessage(
                content=turn.text, finish_reason="length" if cut else "stop", is_truncated=cut, tokens=None
            )
            return Response(id=f"turn-{turn.number}", created=0, model=model, usage=None, message=message)

        def answer(self, turn: Turn) -> None:
            assert self._answer is not None
            self._answer.set_result(turn)

        def refuse(self) -> None:
            """End the rollout where it waits: it is scored as it is."""
            assert self._answer is not None
            self._answer.set_result(None)

        async def close(self) -> None:
            """There is nothing to close."""

        # What translates for a server: there is none.
        setup_client = to_native_tool = to_native_prompt = get_native_response = None
        raise_from_native_response = from_native_response = None

    return Policy
