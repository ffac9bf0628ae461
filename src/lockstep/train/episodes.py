"""Rollouts of several turns: an environment between the loop and the rollout service.

    rollouts = Episodes(service, tokenizer, make, environment, fingerprint)
    Batches(rollouts, ...)                     # asks for groups as it would ask the service

Each turn is a request of one sample whose prompt is the whole sequence so far, ids as they were sampled: nothing is
tokenised twice, and the prefix cache has all but what is new. What the environment says is tokenised once. The first
turn has the sample's own seed, so an episode of one turn is the completion that there would be without an environment.
"""

from __future__ import annotations

import asyncio
import copy
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from lockstep.environment_section import EnvironmentConfig
from lockstep.envs.judge import Background
from lockstep.envs.multi_turn import EnvironmentFailure, Guarded, MakeEnvironment, Observation, Turn
from lockstep.envs.outcome import short
from lockstep.errors import LockstepError, QueueFullError, TokenizerError
from lockstep.loading import describe_exception, load_function
from lockstep.models.tokenizer import Tokenizer
from lockstep.rollout.engine import request_seed
from lockstep.service.blocking import ended
from lockstep.service.requests import (
    ClientEvent,
    Ended,
    OnEvent,
    Outcome,
    RolloutRequest,
    Rollouts,
    ServiceStatus,
    Started,
)
from lockstep.types import Fingerprint, FinishReason, PolicyVersion, Prompt, Trajectory

FULL_S = 0.25  # how long to wait before a turn is sent again that a full queue refused
CLOSE_S = 5.0  # what environments have to end in when the run does


class TurnLost(Exception):
    """A turn's request did not finish, so its group cannot."""

    def __init__(self, outcome: Outcome, reason: str) -> None:
        super().__init__(reason)
        self.outcome = outcome


@dataclass
class Story:
    """An episode so far. pieces: turns, and between them what was said, as ids."""

    prompt: Prompt
    messages: list[Mapping[str, Any]]
    pieces: list[Trajectory | tuple[int, ...]] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)

    @property
    def turns(self) -> list[Trajectory]:
        return [p for p in self.pieces if isinstance(p, Trajectory)]

    @property
    def ids(self) -> tuple[int, ...]:
        """After the prompt."""
        found: list[int] = []
        for piece in self.pieces:
            found += piece.completion_ids.tolist() if isinstance(piece, Trajectory) else piece
        return tuple(found)

    def trajectory(
        self, index: int, seed: int, reason: FinishReason, fingerprint: Fingerprint, failed: str | None
    ) -> Trajectory:
        """All of it as one. fingerprint: for one that failed before its first turn."""
        turns, pieces = self.turns, list(self.pieces)
        while pieces and not isinstance(pieces[-1], Trajectory):
            pieces.pop()  # read by nothing
        rewards = self.rewards + [float("nan")] * (len(turns) - len(self.rewards))
        spans = [np.ones(p.num_sampled, bool) if isinstance(p, Trajectory) else np.zeros(len(p), bool) for p in pieces]
        masses = [t.kept_logmass for t in turns if t.kept_logmass is not None]
        assert len(masses) in (0, len(turns)), "turns drawn under different decoding rules"
        return Trajectory(
            prompt_ids=np.array(self.prompt.ids, np.int32),
            completion_ids=np.array(self.ids[: sum(map(len, spans))], np.int32),
            logprobs=_joined([t.logprobs for t in turns], np.float32),
            versions=_joined([t.versions for t in turns], np.int32),
            finish_reason=reason,
            seed=seed,
            group_id=self.prompt.id,
            index=index,
            fingerprint=turns[0].fingerprint if turns else fingerprint,
            generate_s=sum(t.generate_s for t in turns),
            failed=failed,
            kept_logmass=_joined(masses, np.float32) if masses else None,
            sampled=None if len(pieces) < 2 else np.concatenate(spans),
            turn_rewards=np.array(rewards, np.float64),
        )


def _joined(arrays: Sequence[np.ndarray], dtype: Any) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *arrays]).astype(dtype)


def turn_seed(seed: int, turn: int) -> int:
    """Of a sample's turn: its own seed, and after the first what follows from it."""
    return seed if turn == 0 else request_seed(seed, turn, "turn", 0)


def load_environment(environment: EnvironmentConfig) -> MakeEnvironment:
    """What `environment.function` names. Raises ConfigError where there is no such function."""
    return load_function(environment.function, environment.folder, ("row", "seed"))


@dataclass
class _Group:
    """One that is under way. cancelled: why, if it was."""

    future: Future[None] | None = None
    cancelled: str = "the run stopped"


async def _cancel_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=CLOSE_S)


class Episodes:
    """Implements `Rollouts`. A request's samples are episodes; it ends when all of them have, or one was lost."""

    def __init__(
        self,
        rollouts: Rollouts,
        tokenizer: Tokenizer,
        make: MakeEnvironment,
        environment: EnvironmentConfig,
        fingerprint: Fingerprint,
    ) -> None:
        """fingerprint: of what the rollouts sample with."""
        self._rollouts, self._tokenizer, self._make = rollouts, tokenizer, make
        self.environment, self._fingerprint = environment, fingerprint
        self._background, self._closed = Background("episodes"), False
        self._groups: dict[str, _Group] = {}

    def submit(self, request: RolloutRequest, on_event: OnEvent) -> None:
        """What can never run, or is refused, ends as failed: episodes ask the service as they go."""
        group = self._groups[request.id] = _Group()
        group.future = self._background.begin(self._group(request, on_event, group))

    def cancel(self, request_id: str, reason: str) -> None:
        group = self._groups.get(request_id)
        if group is not None and group.future is not None:
            group.cancelled = reason
            group.future.cancel()

    def score(self, sequences: Sequence[Sequence[int]], temperature: float) -> list[tuple[PolicyVersion, list[float]]]:
        return self._rollouts.score(sequences, temperature)

    def status(self) -> ServiceStatus:
        return self._rollouts.status()

    def close(self) -> None:
        """End what is under way; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        try:
            self._background.begin(_cancel_all()).result(2 * CLOSE_S)
        except TimeoutError:
            return  # an environment blocks the loop, and nothing but the end of the process ends that
        self._background.close()

    async def _group(self, request: RolloutRequest, on_event: OnEvent, group: _Group) -> None:
        episodes = [
            asyncio.ensure_future(self._episode(request, i, seed, on_event)) for i, seed in enumerate(request.seeds)
        ]
        try:
            found = await asyncio.gather(*episodes)
            ended = Ended("finished", tuple(found))
        except TurnLost as error:
            ended = Ended(error.outcome, reason=str(error))
        except asyncio.CancelledError:
            ended = Ended("aborted", reason=group.cancelled)
        except Exception as error:  # of ours: whoever waits for the group must hear of it
            ended = Ended("failed", reason=describe_exception(error))
        for episode in episodes:
            episode.cancel()
        await asyncio.gather(*episodes, return_exceptions=True)
        self._groups.pop(request.id, None)
        on_event(ended)

    async def _episode(self, request: RolloutRequest, index: int, seed: int, on_event: OnEvent) -> Trajectory:
        """One sample's. Raises TurnLost where the service did not finish a turn."""
        story = Story(request.prompt, list(request.prompt.messages))
        reason: FinishReason = "abort"
        failed: str | None = None
        guarded: Guarded | None = None
        try:
            guarded = self._made(request.prompt, seed)
            await self._begin(story, guarded)
            reason, done = await self._play(story, guarded, request, index, seed, on_event)
            if not done:
                story.rewards[-1] += await guarded.truncate()
            if not math.isfinite(total := sum(story.rewards)):
                raise EnvironmentFailure("contract", f"the turns' rewards add up to {total}; they are too large")
        except EnvironmentFailure as error:
            failed = str(error)
        finally:
            if guarded is not None:
                try:
                    await guarded.close()
                except EnvironmentFailure as error:
                    failed = failed or str(error)
        return story.trajectory(index, seed, reason, self._fingerprint, failed)

    def _made(self, prompt: Prompt, seed: int) -> Guarded:
        try:
            made = self._make(copy.deepcopy(dict(prompt.row)), seed)
        except (Exception, SystemExit) as error:  # the user's code: any
            raise EnvironmentFailure(
                "exception", f"{self.environment.function} raised {describe_exception(error)}"
            ) from error
        methods = ("start", "step", "truncate", "close")
        if missing := [name for name in methods if not callable(getattr(made, name, None))]:
            raise EnvironmentFailure(
                "contract",
                f"{self.environment.function} returned {short(made)}, which has no {', '.join(missing)}; expected an "
                "Environment",
            )
        return Guarded(made, self.environment.step_deadline_s)

    async def _begin(self, story: Story, guarded: Guarded) -> None:
        first = await guarded.start()
        if first is None:
            return
        if story.messages:
            raise EnvironmentFailure(
                "contract",
                'start returned an observation, but with task.template = "chat" the prompt ends where the assistant '
                "is to answer; put it into the data row's prompt, and return None",
            )
        story.pieces.append(tuple(self._tokenizer.encode(first.text)))

    async def _play(
        self, story: Story, guarded: Guarded, request: RolloutRequest, index: int, seed: int, on_event: OnEvent
    ) -> tuple[FinishReason, bool]:
        """Turns until the environment is done ("stop"), or turns or tokens are used up ("length"). Also whether it is
        done, which it can be with a turn that was cut."""
        for number in range(self.environment.max_turns):
            left = self.environment.max_total_tokens - len(story.ids)
            if left < 1:
                if not story.turns:
                    raise EnvironmentFailure(
                        "contract",
                        f"what start returned leaves no room for a turn in environment.max_total_tokens = "
                        f"{self.environment.max_total_tokens}",
                    )
                return "length", False
            params = replace(request.params, max_new_tokens=min(request.params.max_new_tokens, left))
            prompt = Prompt(f"{request.id}#{index}/{number}", "", (*request.prompt.ids, *story.ids))
            asked = replace(request, prompt=prompt, seeds=(turn_seed(seed, number),), params=params)
            drawn = await self._turn(asked, on_event)
            story.pieces.append(drawn)
            ids = drawn.completion_ids.tolist()
            turn = Turn(self._tokenizer.decode(ids), tuple(ids), drawn.finish_reason, number)
            cut = drawn.finish_reason == "length"
            step = await guarded.step(turn, last=cut or number + 1 == self.environment.max_turns)
            story.rewards.append(step.reward)
            if step.done or cut:
                return drawn.finish_reason, step.done
            if number + 1 < self.environment.max_turns:
                assert isinstance(step.observation, Observation)
                story.pieces.append(self._said(story, ids, step.observation))
        return "length", False

    def _said(self, story: Story, ids: Sequence[int], observation: Observation) -> tuple[int, ...]:
        """Ids of an observation, behind the turn of these ids. Raises TurnLost where the template rewrites history."""
        try:
            if not story.messages:
                return tuple(self._tokenizer.encode(observation.text))
            stopped = ids[-1] in self._tokenizer.eos_ids
            reply = self._tokenizer.decode(ids[:-1] if stopped else ids, skip_special=False)
            ended = self._tokenizer.decode(ids[-1:], skip_special=False) if stopped else ""
            after = {"role": observation.role, "content": observation.text}
            said, _ = self._tokenizer.continuation(story.messages, reply, [after], ended)
            story.messages += [{"role": "assistant", "content": reply}, after]
            return tuple(said)
        except TokenizerError as error:
            raise TurnLost("failed", str(error)) from error

    async def _turn(self, request: RolloutRequest, on_event: OnEvent) -> Trajectory:
        def hear(event: ClientEvent) -> None:
            if isinstance(event, Started):
                on_event(event)

        while True:
            try:
                found = await ended(self._rollouts, request, "its group ended", hear)
                break
            except QueueFullError:
                await asyncio.sleep(FULL_S)
            except LockstepError as error:
                raise TurnLost("failed", str(error)) from error
        if found.outcome != "finished":
            raise TurnLost(found.outcome, found.reason)
        (drawn,) = found.trajectories
        return drawn
