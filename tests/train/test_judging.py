"""The rollout role as a judge, over a service that does what it is told."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest

from lockstep.config import RewardConfig, RewardJudge, load_config
from lockstep.envs.rewards import Function, Reward, make_reward
from lockstep.errors import CapacityError, ConfigError, QueueFullError
from lockstep.rollout.pool_size import longest_sequence
from lockstep.service.requests import Ended, ServiceStatus, Started
from lockstep.train.judging import RolloutAskers
from lockstep.train.rewarding import rewarded
from lockstep.train.rundir import fixed_keys
from lockstep.types import Fingerprint, PolicyVersion, Prompt, Trajectory

V1, V2 = PolicyVersion(1, "aa"), PolicyVersion(2, "bb")
KEYS = {"name": "self", "rubric": "{completion}", "engine": "rollout", "max_tokens": 8, "max_prompt_tokens": 30}


class Letters:
    """A tokenizer with a token per character."""

    eos_ids, bos_id, adds_bos, has_template = frozenset({0}), 1, True, True

    def encode(self, text):
        return [ord(c) for c in text]

    def encode_prompt(self, text):
        return [self.bos_id, *self.encode(text)]

    def decode(self, ids):
        return "".join(chr(i) for i in ids if i > 1)

    def apply_template(self, messages):
        return self.encode("".join(f"<{m['role']}>{m['content']}" for m in messages))


def trajectory(ids, text="", reason="stop", index=0):
    ids = np.array(ids, np.int32)
    nothing = np.zeros(len(ids), np.float32)
    prints = Fingerprint("t", "c", "d", "n")
    return Trajectory(ids[:0], ids, nothing, ids * 0, reason, 0, "p", index, prints, text=text)


class Service:
    """Implements `requests.Rollouts`: repeats the prompt, as a version says it; told to do otherwise by `faults`."""

    def __init__(self):
        self.requests, self.cancelled, self.faults, self.policy = [], [], [], V1

    def status(self):
        return ServiceStatus(self.policy, False, False, 0, 0, {}, {}, 0, "", ())

    def cancel(self, request_id, reason):
        self.cancelled.append(request_id)

    def submit(self, request, on_event):
        self.requests.append(request)
        fault = self.faults.pop(0) if self.faults else None
        if isinstance(fault, Exception):
            raise fault
        if fault == "hang":
            return
        reason = "length" if fault == "cut" else "stop"
        end = Ended("finished", (trajectory([*request.prompt.ids, 0], reason=reason),), policy=self.policy)
        if fault == "lost":
            end = Ended("failed", reason="the replica went away")
        if fault == "another version":
            end = replace(end, policy=V2)

        def answer():
            on_event(Started(self.policy, "r0"))
            on_event(end)

        threading.Thread(target=answer).start()


@pytest.fixture
def run(monkeypatch):
    """(completions, faults, keys) -> (scores, numbers, service)."""
    monkeypatch.setattr("lockstep.envs.judge.FIRST_WAIT_S", 0.01)

    def score(*completions, faults=(), service=None, **keys):
        askers, service = RolloutAskers(), service or Service()
        service.faults = list(faults)
        config = RewardConfig(judges=[{**KEYS, **keys}], on_error="drop")
        with make_reward(config, None, askers.asker) as reward:
            askers.connect(service, Letters())
            scores = reward.score([Prompt("p", "q", (1,))] * len(completions), list(completions))
            return scores, reward.numbers(), service

    return score


def test_it_asks_greedily_and_reads_the_answer(run):
    (score,), numbers, service = run("Score: 4", system="s")
    (request,) = service.requests
    assert score.value == 0.4 and numbers["judge/self/asked"] == 1
    assert request.prompt.ids == tuple(map(ord, "<system>s<user>Score: 4"))
    assert (request.params.temperature, request.params.max_new_tokens, request.params.stop_ids) == (0.0, 8, {0})
    assert request.min_version == 1 and len(request.seeds) == 1


def test_plain_text_begins_as_the_model_expects(run):
    (score,), _, service = run("Score: 4", template="plain")
    assert service.requests[0].prompt.ids == (1, *map(ord, "Score: 4")) and score.value == 0.4


@pytest.mark.parametrize("fault", [QueueFullError("full"), "lost", "another version"])
def test_what_may_pass_is_asked_again(run, fault):
    (score,), numbers, service = run("Score: 4", faults=[fault])
    assert score.value == 0.4 and numbers["judge/self/retried"] == 1
    assert len({r.id for r in service.requests}) == 2


@pytest.mark.parametrize(
    ("completion", "faults", "why"),
    [
        ("x" * 30, [], "the filled rubric has 36 tokens, max_prompt_tokens is 30"),
        ("Score: 4", [CapacityError("too few pages")], "too few pages"),
        ("Score: 4", ["cut"], "was cut at max_tokens = 8"),
        ("Score: 4", ["lost"] * 4, "its request failed: the replica went away"),
    ],
)
def test_what_cannot_be_answered_is_a_failure(run, completion, faults, why):
    (score,), _, _ = run(completion, faults=faults)
    assert why in score.failed


def test_a_question_that_takes_too_long_is_cancelled(run):
    (score,), numbers, service = run("Score: 4", faults=["hang"], deadline_s=0.3)
    assert "had not answered after 0.3 s" in score.failed and numbers["failures/self/timeout"] == 1
    assert service.cancelled == [service.requests[0].id]


def test_verdicts_are_those_of_a_version(run, tmp_path):
    askers, service = RolloutAskers(), Service()
    with make_reward(RewardConfig(judges=[KEYS]), None, askers.asker) as reward:
        askers.connect(service, Letters())
        reward.keep_verdicts(tmp_path)
        for policy, asked in [(V1, 1), (V1, 1), (V2, 2), (V1, 2)]:
            service.policy = policy
            reward.score([Prompt("p", "q", (1,))], ["Score: 4"])
            assert len(service.requests) == asked


def test_a_model_without_a_template_cannot_chat():
    askers, letters = RolloutAskers(), Letters()
    letters.has_template = False
    askers.asker(RewardJudge(**KEYS, template="plain"))
    askers.connect(Service(), letters)
    askers.asker(RewardJudge(**KEYS))
    with pytest.raises(ConfigError, match=r"judge 'self' has template = .chat., but the model has no chat template"):
        askers.connect(Service(), letters)


def test_the_sampler_is_made_for_the_judges_questions(tiny_spec):
    judge = '[{name = "j", rubric = "{completion}", engine = "rollout", max_tokens = 100, max_prompt_tokens = %d}]'
    words = ["--run.name=x", "--reward.judges"]
    config = load_config("recipes/addition.toml", [*words, judge % 300])
    assert longest_sequence(config, tiny_spec) == 400
    with pytest.raises(ConfigError, match=r"max_prompt_tokens \+ max_tokens of judge 'j' = 600, but"):
        longest_sequence(load_config("recipes/addition.toml", [*words, judge % 500]), tiny_spec)


# ---------------------------------------------------------------- from trajectories to rewards


def told(prompts, completions, rows):
    return [{"a": 1.0, "b": 0.5}[text] for text in completions]


def reward_of(on_error, error_score=None):
    return Reward({"told": Function("told", told)}, {"told": 2.0}, on_error, error_score)


def test_failures_are_said_and_counted():
    sampled = [trajectory([ord(c)], index=i) for i, c in enumerate("axb")]
    prompts, warnings = [Prompt("p", "q", (1,))], []
    done, numbers = rewarded(reward_of("drop"), Letters(), prompts, sampled, warnings.append)
    assert [t.text for t in done] == ["a", "x", "b"] and [t.reward for t in done if not t.failed] == [2.0, 1.0]
    assert numbers == {"failures/told/exception": 1}
    assert warnings[0].startswith("1 of 3 samples dropped: reward 'told' raised KeyError: 'x'")
    assert warnings.pop().endswith("; failures: told/exception 1")

    done, numbers = rewarded(reward_of("score", -1.0), Letters(), prompts, sampled, warnings.append)
    assert [t.reward for t in done] == [2.0, -2.0, 1.0] and all(t.failed is None for t in done)
    assert numbers == {"failures/told/exception": 1, "rewards/error_scored": 1}
    assert warnings.pop().startswith("1 of 3 samples have reward.error_score for what failed: reward 'told' raised")

    assert rewarded(reward_of("drop"), Letters(), prompts, [], warnings.append) == ([], {}) and not warnings


def test_a_resume_may_find_the_judge_elsewhere_but_not_another_judge():
    judge = '[{name = "j", rubric = "%s", url = "%s", model = "m", retries = %d}]'
    asked = [
        ("{completion}", "http://a/v1", 3),
        ("{completion}", "http://b/v1", 9),
        ("? {completion}", "http://a/v1", 3),
    ]
    words = [["--run.name=x", "--reward.judges", judge % keys, f"--reward.workers={keys[2]}"] for keys in asked]
    first, moved, other = (fixed_keys(load_config("recipes/addition.toml", w)) for w in words)
    assert first == moved
    assert {k for k in first if first[k] != other[k]} == {"reward.judges"}
