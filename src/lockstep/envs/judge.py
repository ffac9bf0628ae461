"""Judges (RLAIF, arXiv:2309.00267): a generative model reads a completion, by a rubric, and says a number.

    question = rubric filled with prompt, completion and the row's fields
    answer   = the judge's greedy completion of it, asked again where the server fails, never past its deadline
    reward   = (number - low) / (high - low), the number being the last match of `pattern` in the answer

An answer without a number, with one outside low..high, or that was cut, is a failure with its reason: it is not
clipped, and it is not 0. The completion is put into the rubric as text: it can try to talk the judge into a
verdict, but it can never be taken for one, as only the judge's answer is read.

Imports no jax.
"""

from __future__ import annotations

import asyncio
import random
import re
import threading
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from string import Formatter
from typing import TYPE_CHECKING, Any, TypeVar

from lockstep.envs.asking import Answer, Asker, AskError
from lockstep.envs.outcome import Outcome, short
from lockstep.envs.verdicts import Verdicts, digest
from lockstep.types import Prompt

if TYPE_CHECKING:
    from lockstep.config import RewardJudge

T = TypeVar("T")
FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 30.0  # between tries; doubled each time


class Background:
    """An event loop in a thread of its own: a caller may have a loop already (a notebook has)."""

    def __init__(self, name: str = "judges") -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`; where the caller is interrupted, it is cancelled."""
        future = self.begin(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def begin(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """`work`, under way."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        """A second call does nothing."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


class Judge:
    """One judge of a recipe; a `rewards.Scorer`. verdicts: what was answered before; `Reward.keep_verdicts` sets it."""

    def __init__(self, config: RewardJudge, asker: Asker, background: Background, verdicts: Verdicts) -> None:
        self.config, self._asker, self._background, self.verdicts = config, asker, background, verdicts
        self._pattern = re.compile(config.pattern)
        self._counts = dict.fromkeys(("asked", "retried", "cached"), 0)

    def outcomes(
        self, prompts: Sequence[Prompt], completions: Sequence[str], *, until_failure: bool
    ) -> list[Outcome | None]:
        return self._background.run(self._all(prompts, completions, until_failure))

    def counts(self) -> dict[str, int]:
        """Of the questions since the last call. judge/NAME/asked: tries, further ones included; retried: further ones;
        cached: answers that were known already."""
        found = {f"judge/{self.config.name}/{name}": count for name, count in self._counts.items()}
        self._counts = dict.fromkeys(self._counts, 0)
        return found

    def close(self) -> None:
        """Its connections. Not what it shares with other judges."""
        self._background.run(self._asker.close())

    async def _all(
        self, prompts: Sequence[Prompt], completions: Sequence[str], until_failure: bool
    ) -> list[Outcome | None]:
        identity = self._asker.identity()
        free = asyncio.Semaphore(self.config.concurrency)
        under_way: dict[str, asyncio.Task[Answer]] = {}
        stop = False

        async def one(prompt: Prompt, completion: str) -> Outcome | None:
            nonlocal stop
            async with free:
                if stop:
                    return None
                outcome = await self._one(identity, under_way, prompt, completion)
            stop = stop or (until_failure and outcome.kind is not None)
            return outcome

        pairs = zip(prompts, completions, strict=True)
        return await asyncio.gather(*(one(prompt, completion) for prompt, completion in pairs))

    async def _one(
        self, identity: str, under_way: dict[str, asyncio.Task[Answer]], prompt: Prompt, completion: str
    ) -> Outcome:
        config = self.config
        who = f"judge {config.name!r}"
        try:
            question = fill(config.rubric, prompt.text, completion, prompt.row)
        except KeyError as error:
            return Outcome(kind="exception", why=f"{who}: {error.args[0]}")
        key = digest(identity, config.template, config.system, config.max_tokens, question)
        task = under_way.get(key)
        if task is None:
            known = self.verdicts.get(key)
            if known is not None:
                self._counts["cached"] += 1
                return self.verdict(known)
            task = under_way[key] = asyncio.ensure_future(self._answer(key, question))
        else:
            self._counts["cached"] += 1  # the same text twice in a batch is asked once
        try:
            return self.verdict(await task)
        except TimeoutError:
            return Outcome(kind="timeout", why=f"{who} had not answered after {config.deadline_s:g} s (deadline_s)")
        except AskError as error:
            return Outcome(kind="no_answer", why=f"{who} did not answer: {error}")

    async def _answer(self, key: str, question: str) -> Answer:
        """Asked, again where that may help, and kept. Raises: AskError with the last try's reason, TimeoutError."""
        wait = FIRST_WAIT_S
        async with asyncio.timeout(self.config.deadline_s):
            for left in range(self.config.retries, -1, -1):
                self._counts["asked"] += 1
                try:
                    answer = await self._asker.ask(question)
                    break
                except AskError as error:
                    if not (error.retry and left):
                        raise
                    pause = wait * (0.5 + random.random() / 2) if error.after_s is None else error.after_s
                self._counts["retried"] += 1
                await asyncio.sleep(pause)  # jittered: those that failed together do not come back together
                wait = min(2 * wait, LONGEST_WAIT_S)
        self.verdicts.put(key, self.config.name, answer)
        return answer

    def verdict(self, answer: Answer) -> Outcome:
        """The reward that an answer means."""
        config = self.config

        def unparsed(problem: str) -> Outcome:
            return Outcome(kind="unparsed", why=f"judge {config.name!r} {problem}: {short(answer.text)}")

        if answer.cut:
            return unparsed(
                f"was cut at max_tokens = {config.max_tokens}, so its verdict may be missing or half a number"
            )
        found = [match[1] for match in self._pattern.finditer(answer.text) if match[1] is not None]
        if not found:
            return unparsed(f"gave no verdict, as nothing matches pattern = {config.pattern!r}")
        try:
            number = float(found[-1])
        except ValueError:
            return unparsed(f"gave {found[-1]!r} for a verdict, which is not a number")
        if not config.low <= number <= config.high:
            return unparsed(f"gave {number:g}, which is not within low..high = {config.low:g}..{config.high:g}")
        return Outcome((number - config.low) / (config.high - config.low))


def fill(rubric: str, prompt: str, completion: str, row: Mapping[str, Any]) -> str:
    """The rubric with `{prompt}`, `{completion}` and `{row.NAME}` in their places; braces in these are just text.

    Raises: KeyError for a field that the row does not have.
    """
    text = ""
    for literal, name, _, _ in Formatter().parse(rubric):
        text += literal
        if name is None:
            continue
        field = name.removeprefix("row.")
        if field == name:
            text += prompt if name == "prompt" else completion
        elif field in row:
            text += str(row[field])
        else:
            raise KeyError(f"its rubric names {{{name}}}; the data row has {', '.join(sorted(row)) or 'no fields'}")
    return text
