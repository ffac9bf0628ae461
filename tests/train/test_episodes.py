"""Episodes on a rollout service that draws by a rule: requests made, ids kept, and every way to fail."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.config import EnvironmentConfig
from lockstep.envs.multi_turn import Environment, EnvironmentFailure, Guarded, Observation, Step, Turn
from lockstep.errors import QueueFullError
from lockstep.models.tokenizer import Tokenizer
from lockstep.service.requests import Ended, RolloutRequest
from lockstep.train.episodes import Episodes, turn_seed
from lockstep.types import Fingerprint, PolicyVersion, Prompt, SamplingParams, Trajectory

FINGERPRINT = Fingerprint("t", "c", "d", "n")


class Service:
    """Draws 'word' and a stop token, cut to what was asked for; remembers what it was asked."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.asked, self.cancelled = tokenizer, [], []
        self.refuse, self.lose, self.silent = 0, "", False

    def submit(self, request: RolloutRequest, on_event: Callable[[Any], None]) -> None:
        if self.refuse:
            self.refuse -= 1
            raise QueueFullError("full")
        self.asked.append(request)
        if self.silent:
            return
        if self.lose and request.id.endswith(self.lose):
            on_event(Ended("failed", reason="the replica is gone"))
            return
        word = [*self.tokenizer.encode("abc"), self.tokenizer.single_id("<|im_end|>")]
        ids = np.array(word[: request.params.max_new_tokens], np.int32)
        logprobs = np.array([-(request.seeds[0] % 97) - i for i in range(len(ids))], np.float32)
        reason = "stop" if len(ids) == len(word) else "length"
        drawn = Trajectory(
            np.array(request.prompt.ids, np.int32), ids, logprobs, np.full(len(ids), 4, np.int32), reason,
            request.seeds[0], request.id, 0, FINGERPRINT,
        )  # fmt: skip
        threading.Thread(target=on_event, args=(Ended("finished", (drawn,), policy=PolicyVersion(4, "d")),)).start()

    def cancel(self, request_id: str, reason: str) -> None:
        self.cancelled.append(request_id)


class Talk(Environment):
    """Answers twice, then is done; `what` may change one answer."""

    closed = 0

    def __init__(self, what: Callable[[Turn], Any] | None = None, turns: int = 3) -> None:
        self.what, self.turns = what, turns

    async def step(self, turn: Turn) -> Any:
        if self.what is not None and turn.number == 1:
            found = self.what(turn)
            return await found if asyncio.iscoroutine(found) else found
        if turn.number + 1 == self.turns:
            return Step(reward=1.0, done=True)
        return Step("hm<|im_end|>", 0.25)

    async def close(self) -> None:
        Talk.closed += 1


@pytest.fixture(scope="module")
def tokenizer(tiny_folder: Path) -> Tokenizer:
    return Tokenizer.from_hf(tiny_folder)


@contextmanager
def played(
    tokenizer: Tokenizer, service: Service, make: Any, messages: Any = (), samples: int = 2, **settings: Any
) -> Iterator[tuple[Episodes, threading.Event, list[Ended]]]:
    wanted = EnvironmentConfig(**({"function": "a:b", "max_total_tokens": 200, "step_deadline_s": 0.3} | settings))
    episodes, ended, heard = Episodes(service, tokenizer, make, wanted, FINGERPRINT), threading.Event(), []

    def hear(event: Any) -> None:
        if isinstance(event, Ended):
            heard.append(event)
            ended.set()

    ids = tokenizer.apply_template(list(messages)) if messages else tokenizer.encode("1+1=")
    prompt = Prompt("group", "", tuple(ids), {"n": [1]}, tuple(messages))
    seeds = tuple(range(10, 10 + samples))
    try:
        episodes.submit(RolloutRequest(prompt, seeds, SamplingParams(1.0, 8, tokenizer.eos_ids), min_version=3), hear)
        yield episodes, ended, heard
    finally:
        episodes.close()


def play(*args: Any, **more: Any) -> Ended:
    with played(*args, **more) as (_, ended, heard):
        assert ended.wait(20)
    (only,) = heard
    return only


def test_each_turn_continues_the_very_ids_of_those_before(tokenizer: Tokenizer) -> None:
    service = Service(tokenizer)
    service.refuse = 1  # a full queue is asked again
    ended = play(tokenizer, service, lambda row, seed: Talk())
    assert ended.outcome == "finished"
    for t in ended.trajectories:
        asked = [r for r in service.asked if r.id.startswith(f"group#{t.index}/")]
        assert [r.seeds for r in asked] == [(turn_seed(10 + t.index, k),) for k in range(3)]
        assert asked[0].seeds == (10 + t.index,) and all(r.min_version == 3 for r in asked)
        whole = (*t.prompt_ids.tolist(), *t.completion_ids.tolist())
        assert all(whole[: len(r.prompt.ids)] == r.prompt.ids for r in asked)
        said = t.completion_ids[~t.sampled].tolist()
        assert said == 2 * tokenizer.encode("hm<|im_end|>")  # text, not a token
        assert t.turn_rewards.tolist() == [0.25, 0.25, 1.0] and t.failed is None and t.finish_reason == "stop"
        assert t.group_id == "group" and t.seed == 10 + t.index and (t.versions == 4).all()
        assert t.num_sampled == 12 == len(t.sampled_ids)


def test_with_a_chat_template_an_episode_is_the_conversation(tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "1+1="}]
    ended = play(tokenizer, Service(tokenizer), lambda row, seed: Talk(turns=2), messages)
    turns = [{"role": "assistant", "content": "abc"}, {"role": "user", "content": "hm<|im_end|>"}]
    wanted = [
        *tokenizer.apply_template([*messages, *turns]),
        *tokenizer.encode("abc"),
        tokenizer.single_id("<|im_end|>"),
    ]
    for t in ended.trajectories:
        assert [*t.prompt_ids.tolist(), *t.completion_ids.tolist()] == wanted


@pytest.mark.parametrize(("settings", "turns"), [({"max_turns": 2}, 2), ({"max_total_tokens": 20}, 2)])
def test_turns_and_tokens_have_a_limit(tokenizer: Tokenizer, settings: dict[str, int], turns: int) -> None:
    for t in play(tokenizer, Service(tokenizer), lambda row, seed: Talk(turns=9), **settings).trajectories:
        assert t.finish_reason == "length" and len(t.turn_rewards) == turns and t.sampled[-1]
        assert len(t.completion_ids) <= settings.get("max_total_tokens", 99)


class Judged(Talk):
    """Would say how good it was only at the end."""

    def __init__(self, late: Any, done: bool = False, says: bool = True) -> None:
        super().__init__(turns=9)
        self.late, self.done, self.says = late, done, says

    async def step(self, turn: Turn) -> Step:
        needless = turn.number == 1 or turn.finish_reason == "length"
        return Step(None if needless and not self.says else "hm<|im_end|>", 0.25, done=self.done)

    async def truncate(self) -> float:
        return self.late


@pytest.mark.parametrize("settings", [{"max_turns": 2}, {"max_total_tokens": 20}])
def test_what_a_limit_cuts_off_is_still_judged(tokenizer: Tokenizer, settings: dict[str, int]) -> None:
    service = Service(tokenizer)
    for t in play(tokenizer, service, lambda row, seed: Judged(2.0), **settings).trajectories:
        assert t.failed is None and t.turn_rewards.tolist() == [0.25, 2.25]
    for t in play(tokenizer, service, lambda row, seed: Judged(2.0, done=True), **settings).trajectories:
        assert t.failed is None and t.turn_rewards.tolist() == [0.25]
    for t in play(tokenizer, service, lambda row, seed: Judged(None), **settings).trajectories:
        assert t.failed == "environment contract: truncate gave the reward None; expected a finite number"


@pytest.mark.parametrize(("settings", "rewards"), [({"max_turns": 2}, [0.25, 2.25]), ({"max_total_tokens": 2}, [2.25])])
def test_what_nobody_will_read_need_not_be_said(
    tokenizer: Tokenizer, settings: dict[str, int], rewards: list[float]
) -> None:
    """After the last turn, and after one that was cut."""
    for says in (True, False):
        found = play(tokenizer, Service(tokenizer), lambda row, seed: Judged(2.0, says=says), **settings)  # noqa: B023
        for t in found.trajectories:
            assert t.failed is None and t.turn_rewards.tolist() == rewards and t.finish_reason == "length"


class Plain(Talk):
    """Who forgot that it is asynchronous, or ends the process."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.wrong = what

    def step(self, turn: Turn) -> Any:
        if self.wrong == "raises":
            raise ValueError("boom")
        return Step("hm")


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda row, seed: Plain("returns"), "environment contract: step returned Step(observation='hm', reward=0"),
        (lambda row, seed: Plain("raises"), "environment exception: step raised ValueError: boom"),
        (lambda row, seed: None, "environment contract: a:b returned None, which has no start, step, truncate, close"),
        (lambda row, seed: sys.exit(2), "environment exception: a:b raised SystemExit: 2"),
    ],
)
def test_what_is_wrong_with_a_class_is_the_sample_s_failure_too(tokenizer: Tokenizer, make: Any, why: str) -> None:
    ended = play(tokenizer, Service(tokenizer), make)
    assert ended.outcome == "finished" and [t.failed.startswith(why) for t in ended.trajectories] == [True, True]


def test_an_environment_that_ends_the_process_ends_its_sample(tokenizer: Tokenizer) -> None:
    class Closes(Talk):
        async def close(self) -> None:
            raise SystemExit(4)

    for t in play(tokenizer, Service(tokenizer), lambda row, seed: Closes()).trajectories:
        assert t.failed.startswith("environment exception: close raised SystemExit: 4")


def test_rewards_that_add_up_to_infinity_are_no_reward(tokenizer: Tokenizer) -> None:
    class Rich(Talk):
        async def step(self, turn: Turn) -> Step:
            return Step("hm<|im_end|>", np.float64(1.5e308), done=turn.number == 1)

    for t in play(tokenizer, Service(tokenizer), lambda row, seed: Rich()).trajectories:
        assert t.failed == "environment contract: the turns' rewards add up to inf; they are too large"


async def forever() -> Step:
    await asyncio.sleep(3600)
    return Step()


async def stubborn() -> Step:
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            await asyncio.sleep(0.5)
            raise


def boom(turn: Turn) -> Step:
    raise ValueError("no idea")


FAILURES = [
    (boom, "environment exception: step raised ValueError: no idea"),
    (lambda turn: forever(), "environment timeout: step took more than 0.3 s"),
    (lambda turn: stubborn(), "environment timeout: step took more than 0.3 s"),
    (lambda turn: Step(""), "environment contract: an observation is empty"),
    (lambda turn: Step(), "environment contract: step is not done and returned no observation"),
    (lambda turn: None, "environment contract: step returned None"),
    (lambda turn: Step("x", float("nan")), "environment contract: step gave the reward nan"),
    (lambda turn: Step("x", 10**400), "environment contract: step gave the reward 1000"),
    (lambda turn: Step("x", "1"), "environment contract: step gave the reward '1'"),
    (lambda turn: Step("x", done="no"), "environment contract: step is done = 'no'; expected True or False"),
    (lambda turn: Step("\ud800"), "environment contract: an observation is no valid Unicode"),
    (lambda turn: Step(Observation("x", "assistant")), "environment contract: an observation's role is 'assistant'"),
    (lambda turn: sys.exit(3), "environment exception: step raised SystemExit: 3"),
    (lambda turn: Step(Observation(3)), "environment contract: an observation is Observation(text=3"),
]


@pytest.mark.parametrize(("what", "why"), FAILURES)
def test_a_failure_is_the_samples_own_with_its_reason(tokenizer: Tokenizer, what: Any, why: str) -> None:
    """And never a number: the other sample of the group is whole."""
    before = Talk.closed
    ended = play(tokenizer, Service(tokenizer), lambda row, seed: Talk(what if seed == 10 else None))
    bad, good = ended.trajectories
    assert bad.failed is not None and bad.failed.startswith(why)
    assert np.isnan(bad.turn_rewards[-1]) and np.isnan(bad.reward) and len(bad.turn_rewards) == 2
    assert good.failed is None and len(good.turn_rewards) == 3
    assert Talk.closed == before + 2


def test_a_factory_that_fails_and_a_row_that_is_changed(tokenizer: Tokenizer) -> None:
    def make(row: dict[str, Any], seed: int) -> Talk:
        assert row == {"n": [1]}, "each sample has a copy"
        row["n"].append(2)
        if seed == 10:
            raise KeyError("x")
        return Talk()

    bad, good = play(tokenizer, Service(tokenizer), make).trajectories
    assert bad.failed.startswith("environment exception: a:b raised KeyError") and not len(bad.completion_ids)
    assert good.failed is None


def test_a_lost_turn_ends_the_group(tokenizer: Tokenizer) -> None:
    service = Service(tokenizer)
    service.lose = "#1/1"
    ended = play(tokenizer, service, lambda row, seed: Talk())
    assert (ended.outcome, ended.reason, ended.trajectories) == ("failed", "the replica is gone", ())


def test_a_template_that_rewrites_history_is_refused(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    render = tokenizer.render

    def stripped(messages: Any, *more: Any) -> str:
        return render([{**m, "content": m["content"].replace("b", "")} for m in messages], *more)

    monkeypatch.setattr(tokenizer, "render", stripped)
    ended = play(tokenizer, Service(tokenizer), lambda row, seed: Talk(), [{"role": "user", "content": "1"}])
    assert ended.outcome == "failed" and "rewrites the conversation" in ended.reason


def test_cancelling_ends_the_turn_and_the_group(tokenizer: Tokenizer) -> None:
    service = Service(tokenizer)
    service.silent = True
    with played(tokenizer, service, lambda row, seed: Talk(), samples=1) as (episodes, ended, heard):
        for _ in range(200):
            if service.asked:
                break
            threading.Event().wait(0.02)
        episodes.cancel("group", "enough")
        assert ended.wait(20)
    assert (heard[0].outcome, heard[0].reason) == ("aborted", "enough") and service.cancelled == ["group#0/0"]


def test_an_environment_is_used_once() -> None:
    async def use() -> None:
        turn = Turn("x", (1,), "stop", 0)
        guarded = Guarded(Talk(turns=1), 5.0)
        with pytest.raises(EnvironmentFailure, match="step of an environment that is new; it is used once"):
            await guarded.step(turn)
        await guarded.start()
        with pytest.raises(EnvironmentFailure, match="start of an environment that is running"):
            await guarded.start()
        assert (await guarded.step(turn)).done
        with pytest.raises(EnvironmentFailure, match="step of an environment that is done"):
            await guarded.step(turn)
        await guarded.close()

    asyncio.run(use())
