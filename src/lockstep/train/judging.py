"""The rollout role as a judge: the policy in training reads completions by a rubric, on the run's own sampler."""

from __future__ import annotations

import itertools

from lockstep.config import RewardJudge
from lockstep.envs.asking import Answer, AskError
from lockstep.errors import ConfigError, LockstepError, QueueFullError
from lockstep.models.tokenizer import Tokenizer
from lockstep.service.blocking import ended
from lockstep.service.requests import Ended, RolloutRequest, Rollouts
from lockstep.types import PolicyVersion, Prompt, SamplingParams


class RolloutAskers:
    """Makes askers before there is a sampler, so that a recipe's reward is checked before anything is loaded."""

    def __init__(self) -> None:
        self._judges: list[RewardJudge] = []
        self._seat: tuple[Rollouts, Tokenizer] | None = None

    def asker(self, judge: RewardJudge) -> RolloutAsker:
        self._judges.append(judge)
        return RolloutAsker(self, judge)

    def connect(self, rollouts: Rollouts, tokenizer: Tokenizer) -> None:
        """From now on they can ask. Raises ConfigError for a judge that needs a chat template where there is none."""
        for judge in self._judges:
            if judge.template == "chat" and not tokenizer.has_template:
                raise ConfigError(
                    f'judge {judge.name!r} has template = "chat", but the model has no chat template; use template = '
                    '"plain", where it continues the rubric'
                )
        self._seat = rollouts, tokenizer

    @property
    def seat(self) -> tuple[Rollouts, Tokenizer]:
        assert self._seat is not None, "asked before there was a sampler"
        return self._seat


class RolloutAsker:
    """Implements `asking.Asker`. Its model is the version that is served, which does not change while a batch is
    scored: the loop publishes the next one afterwards."""

    def __init__(self, askers: RolloutAskers, judge: RewardJudge) -> None:
        self._askers, self._judge = askers, judge
        self._numbers = itertools.count()

    def identity(self) -> str:
        return f"policy {self._published().digest}"

    async def ask(self, text: str) -> Answer:
        judge = self._judge
        rollouts, tokenizer = self._askers.seat
        ids = self._ids(tokenizer, text)
        if len(ids) > judge.max_prompt_tokens:
            raise AskError(
                f"the filled rubric has {len(ids)} tokens, max_prompt_tokens is {judge.max_prompt_tokens}", retry=False
            )
        policy = self._published()
        params = SamplingParams(0.0, judge.max_tokens, tokenizer.eos_ids)
        prompt = Prompt(f"judge/{judge.name}/{next(self._numbers)}", text, tuple(ids))
        request = RolloutRequest(prompt, (0,), params, min_version=policy.number)
        end = await self._ended(rollouts, request)
        if end.outcome != "finished":
            raise AskError(f"its request {end.outcome}: {end.reason}", retry=True)
        if end.policy != policy:
            raise AskError(f"{end.policy} answered instead of {policy}", retry=True)
        (answer,) = end.trajectories
        return Answer(tokenizer.decode(answer.completion_ids.tolist()), answer.finish_reason == "length")

    async def close(self) -> None:
        """Nothing: the sampler is the cluster's."""

    async def _ended(self, rollouts: Rollouts, request: RolloutRequest) -> Ended:
        try:
            return await ended(rollouts, request, "the judge's deadline passed")
        except QueueFullError as error:
            raise AskError(str(error), retry=True) from error
        except LockstepError as error:
            raise AskError(str(error), retry=False) from error

    def _ids(self, tokenizer: Tokenizer, text: str) -> list[int]:
        judge = self._judge
        if judge.template == "chat":
            system = [] if judge.system is None else [{"role": "system", "content": judge.system}]
            return tokenizer.apply_template([*system, {"role": "user", "content": text}])
        return tokenizer.encode_prompt(text)

    def _published(self) -> PolicyVersion:
        published = self._askers.seat[0].status().published
        assert published is not None, "the loop publishes before it samples"
        return published
