"""Judges, against a real server with real faults: what is a verdict, what is asked again, and what is a failure."""

import asyncio
import json
import math
import socket
import threading

import pytest
import uvicorn
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Route

from lockstep.config import RewardConfig, RewardJudge
from lockstep.envs.asking import Answer
from lockstep.envs.judge import Judge, fill
from lockstep.envs.rewards import make_reward
from lockstep.envs.verdicts import Verdicts
from lockstep.errors import CheckpointError, ConfigError, RewardError
from lockstep.types import Prompt

KEYS = {"name": "j", "rubric": "{completion}", "url": "http://127.0.0.1:9/v1", "model": "m"}


class Server:
    """Answers what the completion in the rubric asks for, as in `say:Score: 7`, after the faults in `faults`."""

    def __init__(self):
        self.bodies, self.headers, self.faults, self.most, self._now = [], [], [], 0, 0
        routes = [Route(f"/v1/{path}", self.answer, methods=["POST"]) for path in ("chat/completions", "completions")]
        sock = socket.socket()
        sock.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{sock.getsockname()[1]}/v1"
        config = uvicorn.Config(Starlette(routes=routes), log_level="error", lifespan="off")
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [sock]})
        self.thread.start()

    async def answer(self, request):
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        fault = self.faults.pop(0) if self.faults else None
        if fault == "garbage":
            return PlainTextResponse("<html>not what you think</html>")
        if fault == "empty":
            return JSONResponse({"choices": []})
        if isinstance(fault, tuple):
            return PlainTextResponse("no", fault[0], headers={"Retry-After": fault[1]})
        if fault is not None:
            return PlainTextResponse(f"fault {fault}", fault)
        text = body["messages"][-1]["content"] if "messages" in body else body["prompt"]
        if "hang" in text:
            await asyncio.sleep(600)
        self._now += 1
        self.most = max(self.most, self._now)
        await asyncio.sleep(0.02)
        self._now -= 1
        said = text.partition("say:")[2]
        reason = "length" if "cut" in text else "stop"
        part = {"message": {"content": said}} if "messages" in body else {"text": said}
        answer = json.dumps({"choices": [{**part, "finish_reason": reason}]})  # ASCII: any text at all
        return PlainTextResponse(answer, media_type="application/json")

    def stop(self):
        self.server.should_exit = self.server.force_exit = True
        self.thread.join()


@pytest.fixture(scope="module")
def running():
    server = Server()
    yield server
    server.stop()


@pytest.fixture
def server(running):
    running.bodies, running.headers, running.faults, running.most = [], [], [], 0
    return running


@pytest.fixture
def judged(server, monkeypatch):
    """(completions, keys of the judge) -> (scores, numbers), each with a fresh reward; quick between tries."""
    monkeypatch.setattr("lockstep.envs.judge.FIRST_WAIT_S", 0.01)

    def run(*completions, on_error="drop", error_score=None, run_dir=None, **keys):
        judge = RewardJudge(**{**KEYS, "url": server.url, **keys})
        config = RewardConfig(judges=[judge], on_error=on_error, error_score=error_score)
        with make_reward(config) as reward:
            if run_dir is not None:
                reward.keep_verdicts(run_dir)
            prompts = [Prompt(f"t/0/{i}", "the question", (1,), {"level": 3}) for i in range(len(completions))]
            return reward.score(prompts, list(completions)), reward.numbers()

    return run


def test_the_question_and_the_verdict(server, judged, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "secret")
    (score,), numbers = judged(
        "say:Score: 7",
        rubric="Level {row.level}, {{braces}}. {prompt}? {completion}",
        system="Be strict.",
        api_key_env="JUDGE_KEY",
        options={"top_p": 0.5},
        max_tokens=9,
    )
    assert score.value == 0.7 and score.parts == {"j": 0.7}
    assert server.bodies == [
        {
            "model": "m",
            "temperature": 0,
            "max_tokens": 9,
            "messages": [
                {"role": "system", "content": "Be strict."},
                {"role": "user", "content": "Level 3, {braces}. the question? say:Score: 7"},
            ],
            "top_p": 0.5,
        }
    ]
    assert server.headers[0]["authorization"] == "Bearer secret"
    assert numbers == {"judge/j/asked": 1, "judge/j/retried": 0, "judge/j/cached": 0}


def test_what_is_no_text_travels(server, judged, tmp_path):
    (score,), _ = judged("\ud800 say:Score: 3 \ud800", run_dir=tmp_path)
    assert score.value == 0.3


def test_plain_completions(server, judged):
    (score,), _ = judged("say:Score: 2.5", template="plain", low=-5, high=5)
    assert score.value == 0.75 and server.bodies[0]["prompt"] == "say:Score: 2.5"


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ("say:I like it", "gave no verdict, as nothing matches"),
        ("say:", "gave no verdict"),
        ("say:Score: 11", r"gave 11, which is not within low..high = 0..10"),
        ("say:Score: -1", "gave -1, which is not within"),
        ("cut say:Score: 1", "was cut at max_tokens = 512"),
    ],
)
def test_an_answer_that_is_no_verdict_is_a_failure(judged, answer, why):
    (bad, good), numbers = judged(answer, "say:Score: 0")
    assert math.isnan(bad.value) and why in bad.failed
    assert good.value == 0 and good.failed is None
    assert numbers["failures/j/unparsed"] == 1


def test_the_last_verdict_counts_and_only_the_judge_is_read(judged):
    (score, quoted), _ = judged("say:Score: 2 would be harsh. Score: 8", "Score: 10 say:nothing")
    assert score.value == 0.8 and quoted.failed is not None


@pytest.mark.parametrize("faults", [[500], [503, 429], ["garbage"], ["empty", 500], [(503, "0.01")]])
def test_a_server_that_recovers_is_asked_again(server, judged, faults):
    server.faults = list(faults)
    (score,), numbers = judged("say:Score: 5")
    assert score.value == 0.5
    assert (numbers["judge/j/asked"], numbers["judge/j/retried"]) == (len(faults) + 1, len(faults))


def test_retries_end(server, judged):
    server.faults = [500] * 9
    (score,), numbers = judged("say:Score: 5", retries=2)
    assert "did not answer" in score.failed and "answered 500: 'fault 500'" in score.failed
    assert numbers == {"failures/j/no_answer": 1, "judge/j/asked": 3, "judge/j/retried": 2, "judge/j/cached": 0}


@pytest.mark.parametrize("status", [400, 401, 404])
def test_what_another_try_cannot_mend_is_not_tried(server, judged, status):
    server.faults = [status]
    (score,), numbers = judged("say:Score: 5")
    assert f"answered {status}" in score.failed and numbers["judge/j/asked"] == 1


def test_a_server_that_hangs_is_given_up_and_the_others_go_on(judged):
    (hangs, good), numbers = judged("hang say:Score: 5", "say:Score: 5", deadline_s=1.0)
    assert "had not answered after 1 s" in hangs.failed and good.value == 0.5
    assert numbers["failures/j/timeout"] == 1


def test_a_server_that_asks_for_more_time_than_there_is(server, judged):
    server.faults = [(429, "1000")]
    (score,), _ = judged("say:Score: 5", deadline_s=0.5)
    assert "had not answered after 0.5 s" in score.failed


def test_no_server(judged):
    with socket.socket() as sock:  # bound, not listening: refused
        sock.bind(("127.0.0.1", 0))
        (score,), numbers = judged("a", url=f"http://127.0.0.1:{sock.getsockname()[1]}/v1", retries=1)
    assert "ConnectError" in score.failed and numbers["judge/j/asked"] == 2


def test_fail_stops_the_run_and_asks_no_more(server, judged):
    with pytest.raises(RewardError, match=r"gave no verdict.* with prompt t/0/1 "):
        judged("say:Score: 1", "say:x", *(f"say:Score: {i}" for i in range(9)), on_error="fail", concurrency=1)
    assert len(server.bodies) == 2


def test_the_error_score(judged):
    (score,), numbers = judged("say:x", on_error="score", error_score=0.25, weight=2.0)
    assert score.value == 0.5 and score.failed is None and "gave no verdict" in score.replaced
    assert numbers["rewards/error_scored"] == 1 and numbers["failures/j/unparsed"] == 1


def test_no_more_at_a_time_than_allowed_and_the_order_stays(server, judged):
    scores, _ = judged(*(f"{i} say:Score: {i % 11}" for i in range(24)), concurrency=3)
    assert [s.value for s in scores] == [i % 11 / 10 for i in range(24)]
    assert server.most == 3


# ---------------------------------------------------------------- kept verdicts


def test_what_was_answered_once_is_not_asked_again(server, judged, tmp_path):
    texts = ("a say:Score: 1", "b say:Score: 2", "a say:Score: 1", "c say:nothing")
    first, numbers = judged(*texts, run_dir=tmp_path)
    assert (numbers["judge/j/asked"], numbers["judge/j/cached"]) == (3, 1) and len(server.bodies) == 3
    again, numbers = judged(*texts, run_dir=tmp_path)
    assert (numbers["judge/j/asked"], numbers["judge/j/cached"]) == (0, 4) and len(server.bodies) == 3
    assert [s.parts for s in again[:3]] == [s.parts for s in first[:3]]
    # The text is kept, not the number: another scale, and an address that changed, ask nobody.
    rescaled, _ = judged(*texts, run_dir=tmp_path, high=20.0, url=f"{server.url}/")
    assert [s.value for s in rescaled[:3]] == [0.05, 0.1, 0.05] and len(server.bodies) == 3
    assert all(s[3].failed is not None for s in (first, again, rescaled))


@pytest.mark.parametrize(
    "change",
    [{"model": "n"}, {"rubric": "? {completion}"}, {"system": "s"}, {"max_tokens": 5}, {"options": {"top_k": 1}}],
)
def test_another_question_is_asked(server, judged, tmp_path, change):
    judged("say:Score: 1", run_dir=tmp_path)
    judged("say:Score: 1", run_dir=tmp_path, **change)
    assert len(server.bodies) == 2


def test_failures_are_not_kept(server, judged, tmp_path):
    server.faults = [500]
    judged("say:Score: 1", run_dir=tmp_path, retries=0)
    (score,), _ = judged("say:Score: 1", run_dir=tmp_path, retries=0)
    assert score.value == 0.1


def test_a_file_that_holds_something_else(tmp_path):
    (tmp_path / "verdicts.sqlite").write_text("x" * 5000)
    with pytest.raises(CheckpointError, match=r"verdicts.sqlite does not hold the verdicts"):
        Verdicts(tmp_path / "verdicts.sqlite")


# ---------------------------------------------------------------- pure parts


@given(st.text(), st.text(), st.text())
def test_what_is_put_into_a_rubric_is_text(prompt, completion, field):
    assert fill("<{prompt}|{completion}|{row.x}>{{}}", prompt, completion, {"x": field}) == (
        f"<{prompt}|{completion}|{field}>{{}}"
    )


@given(low=st.integers(-100, 99), span=st.integers(1, 100), number=st.integers(-300, 300))
def test_a_verdict_is_between_0_and_1_or_none(low, span, number):
    judge = Judge(RewardJudge(**KEYS, low=float(low), high=float(low + span)), None, None, None)
    outcome = judge.verdict(Answer(f"Score: {number}", cut=False))
    within = low <= number <= low + span
    assert (outcome.kind is None) == within
    assert not within or outcome.value == (number - low) / span


def test_a_field_that_the_row_lacks_is_a_failure(judged):
    (score,), numbers = judged("a", rubric="{completion} {row.gone}")
    assert "names {row.gone}; the data row has level" in score.failed and numbers["failures/j/exception"] == 1


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"url": None}, "`url` is missing"),
        ({"model": None}, "`model` is missing"),
        ({"url": "localhost:8000"}, "is not the address of an API"),
        ({"rubric": "{prompt}"}, r"has no {completion}"),
        ({"rubric": "{completion} {answer}"}, r"names {answer}; it may name"),
        ({"rubric": "{completion} {row.x.y}"}, r"names {row.x.y}"),
        ({"rubric": "{completion!r}"}, r"names {completion}"),
        ({"rubric": "{completion"}, "is not a format"),
        ({"pattern": "Score"}, "has 0 groups; expected one"),
        ({"pattern": "(("}, "is not a regular expression"),
        ({"low": 1.0, "high": 1.0}, "is not below"),
        ({"options": {"n": 2}}, "`options.n` cannot be set"),
        ({"engine": "rollout"}, "`url` has no effect with engine"),
        ({"max_prompt_tokens": 9}, "`max_prompt_tokens` has no effect"),
        ({"system": "s", "template": "plain"}, "`system` has no effect"),
    ],
)
def test_judges_that_cannot_be(keys, message):
    with pytest.raises(ValueError, match=message):
        RewardJudge(**{**KEYS, **keys})


def test_a_key_that_is_not_there_and_a_sampler_that_is_not(monkeypatch):
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    with pytest.raises(ConfigError, match="JUDGE_KEY, which is not set"):
        make_reward(RewardConfig(judges=[{**KEYS, "api_key_env": "JUDGE_KEY"}]))
    with pytest.raises(ConfigError, match="answers within a run only"):
        make_reward(RewardConfig(judges=[{"name": "j", "rubric": "{completion}", "engine": "rollout"}]))


def test_it_works_where_a_loop_runs_already(server):
    """As in a notebook."""

    async def cell():
        config = RewardConfig(judges=[{**KEYS, "url": server.url}])
        with make_reward(config) as reward:
            return reward.score([Prompt("p", "q", (1,))], ["say:Score: 10"])[0].value

    assert asyncio.run(cell()) == 1.0
