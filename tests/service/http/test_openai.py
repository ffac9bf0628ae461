"""The official client against a real server: what it sends is understood, what comes back is what it expects."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from lockstep.models.tokenizer import Tokenizer
from lockstep.service.http.sampling import sample_seed

from .conftest import Running, Start
from .fake import FINGERPRINT, FakeService, logprob, version_of


def test_a_completion_has_text_usage_and_its_policy(server: Running) -> None:
    raw = server.openai().completions.with_raw_response.create(model="tiny", prompt="Hello", seed=3, max_tokens=7)
    done = raw.parse()
    (choice,) = done.choices
    assert done.object == "text_completion" and choice.finish_reason == "length" and choice.logprobs is None
    assert set(choice.text) <= set("Hello") and len(choice.text) == 7
    assert done.usage is not None
    assert (done.usage.prompt_tokens, done.usage.completion_tokens, done.usage.total_tokens) == (5, 7, 12)
    version, said = version_of(1), done.model_dump()["lockstep"]
    assert raw.headers["lockstep-policy-digest"] == version.digest and raw.headers["lockstep-policy-version"] == "1"
    assert (said["version"], said["digest"]) == (1, version.digest)
    assert said["request_id"] == raw.headers["x-request-id"]
    assert said["seed"] == 3 and said["seeds"] == [sample_seed(3, 0)]
    assert said["fingerprint"]["numerics"] == FINGERPRINT.numerics
    assert done.system_fingerprint == f"lockstep-1-{version.digest[:16]}"


def test_prompts_in_every_form_and_n(server: Running, tokenizer: Tokenizer) -> None:
    client = server.openai()
    ids = tokenizer.encode("abcd")
    forms: list[Any] = ["abcd", ["abcd", "wxyz"], ids, [ids, tokenizer.encode("wxyz")]]
    for form in forms:
        done = client.completions.create(model="tiny", prompt=form, n=2, seed=5, max_tokens=3)
        two = len(form) == 2
        assert [c.index for c in done.choices] == list(range(4 if two else 2))
        assert [set(c.text) <= set("abcd") for c in done.choices] == [True, True, False, False][: len(done.choices)]
        # A prompt's samples do not depend on what else is in the call.
        alone = client.completions.create(model="tiny", prompt="abcd", n=2, seed=5, max_tokens=3)
        assert [c.text for c in done.choices[:2]] == [c.text for c in alone.choices]


def test_seeds_repeat_and_a_random_one_is_reported(server: Running) -> None:
    client = server.openai()

    def ask(**more: Any) -> Any:
        return client.completions.create(model="tiny", prompt="abcdefgh", max_tokens=4, n=3, **more)

    first, again, other = ask(seed=1), ask(seed=1), ask(seed=2)
    assert [c.text for c in first.choices] == [c.text for c in again.choices] != [c.text for c in other.choices]
    random = ask()
    repeated = ask(seed=random.lockstep["seed"])
    assert [c.text for c in random.choices] == [c.text for c in repeated.choices]
    assert ask(seed=-5).lockstep["seed"] == -5


def test_parameters_arrive(server: Running, tokenizer: Tokenizer) -> None:
    server.openai().completions.create(
        model="tiny", prompt="ab", max_tokens=2, temperature=0.5, top_p=0.25, presence_penalty=1, frequency_penalty=-1,
        logit_bias={"7": 3, "5": -2.5}, stop=["ab", "<|im_end|>"], user="me",
        extra_body={
            "top_k": 9, "min_p": 0.125, "repetition_penalty": 1.5, "min_tokens": 1, "stop_token_ids": [3],
            "group": "g", "min_version": 1, "metadata": {"a": "b"},
        },
    )  # fmt: skip
    request = server.service.seen[-1]
    p = request.params
    assert (p.temperature, p.top_p, p.top_k, p.min_p, p.repetition_penalty) == (0.5, 0.25, 9, 0.125, 1.5)
    assert (p.presence_penalty, p.frequency_penalty, p.max_new_tokens, p.min_new_tokens) == (1, -1, 2, 1)
    assert p.logit_bias == ((5, -2.5), (7, 3.0)) and p.stop_strings == ("ab", "<|im_end|>")
    assert p.stop_ids == tokenizer.eos_ids | {3, tokenizer.single_id("<|im_end|>")}
    assert (request.group, request.min_version) == ("g", 1)
    server.openai().completions.create(model="tiny", prompt="ab", extra_body={"ignore_eos": True})
    p = server.service.seen[-1].params
    assert p.stop_ids == frozenset() and p.max_new_tokens == 16 and p.temperature == 1 and not p.truncates


def test_chat_uses_the_template_and_runs_up_to_the_context(start: Start, tokenizer: Tokenizer) -> None:
    script = [*tokenizer.encode("Hi there"), tokenizer.single_id("<|im_end|>")]
    with start(FakeService(script=lambda r, i: script)) as server:
        done = server.openai().chat.completions.create(
            model="tiny",
            messages=[
                {"role": "developer", "content": "Be brief."},
                {"role": "user", "content": [{"type": "text", "text": "He"}, {"type": "text", "text": "llo"}]},
            ],
        )
        (choice,) = done.choices
        assert done.object == "chat.completion" and choice.finish_reason == "stop"
        assert (choice.message.role, choice.message.content) == ("assistant", "Hi there")
        (request,) = server.service.seen
        text = tokenizer.decode(request.prompt.ids, skip_special=False)
        assert text == (
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
        )
        assert request.params.max_new_tokens == 4096 - len(request.prompt.ids)
        assert done.usage is not None and done.usage.completion_tokens == 9


def test_a_clients_own_answer_can_be_sent_back(server: Running) -> None:
    """`messages.append(answer.choices[0].message)`: with its empty fields."""
    client = server.openai()
    messages: list[Any] = [{"role": "user", "content": "A"}]
    first = client.chat.completions.create(model="tiny", messages=messages, max_tokens=3)
    messages += [first.choices[0].message, {"role": "user", "content": "B"}]
    assert client.chat.completions.create(model="tiny", messages=messages, max_tokens=3).choices


def test_logprobs_of_completions(server: Running, tokenizer: Tokenizer) -> None:
    done = server.openai().completions.create(
        model="tiny", prompt="abcd", max_tokens=3, logprobs=2, seed=0, extra_body={"return_token_ids": True}
    )
    choice: Any = done.choices[0]
    record = choice.logprobs
    assert choice.prompt_token_ids == tokenizer.encode("abcd")
    assert record.tokens == list(choice.text) and record.text_offset == [0, 1, 2]
    assert record.token_logprobs == [logprob(1, t, i) for i, t in enumerate(choice.token_ids)]
    assert [len(t) for t in record.top_logprobs] == [2, 2, 2]
    assert all(
        t[name] == p for t, name, p in zip(record.top_logprobs, record.tokens, record.token_logprobs, strict=True)
    )
    none = server.openai().completions.create(model="tiny", prompt="abcd", max_tokens=3, logprobs=0, seed=0)
    assert none.choices[0].logprobs is not None and none.choices[0].logprobs.top_logprobs is None


def test_an_echoed_prompt_is_scored(server: Running, tokenizer: Tokenizer) -> None:
    """With max_tokens 0, nothing but it."""
    ids = tokenizer.encode("abcd")
    for max_tokens in (0, 2):
        for stream in (False, True):
            done: Any = server.openai().completions.create(
                model="tiny", prompt="abcd", max_tokens=max_tokens, logprobs=0, echo=True, seed=0, stream=stream
            )
            chunks = list(done) if stream else [done]
            choices = [c.choices[0] for c in chunks]
            records = [c.logprobs for c in choices if c.logprobs is not None]
            assert "".join(c.text for c in choices)[:4] == "abcd"
            tokens = [t for r in records for t in r.tokens]
            scores = [p for r in records for p in r.token_logprobs]
            assert tokens[:4] == list("abcd") and len(tokens) == 4 + max_tokens
            assert scores[:4] == [None, *(logprob(1, t, i) for i, t in enumerate(ids[1:], 1))]
            assert [o for r in records for o in r.text_offset] == list(range(4 + max_tokens))
            assert choices[-1].finish_reason == "length"
            if not stream:
                assert done.usage.completion_tokens == max_tokens


def test_logprobs_of_chat(server: Running) -> None:
    done = server.openai().chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "abc"}], max_tokens=4, logprobs=True, top_logprobs=3,
        extra_body={"ignore_eos": True},  # no seed: an end may be drawn at any token
    )  # fmt: skip
    record = done.choices[0].logprobs
    assert record is not None and record.content is not None and len(record.content) == 4
    for token in record.content:
        assert len(token.top_logprobs) == 3 and token.top_logprobs[0].token == token.token
        assert token.bytes is None or bytes(token.bytes).decode() == token.token


def test_models(server: Running) -> None:
    client = server.openai()
    (model,) = client.models.list().data
    assert model.id == "tiny" and client.models.retrieve("tiny").id == "tiny"
    assert model.model_dump()["lockstep"]["digest"] == version_of(1).digest
    with pytest.raises(openai.NotFoundError, match="only 'tiny'"):
        client.models.retrieve("some/other")


WRONG: list[tuple[dict[str, Any], type[openai.APIStatusError], list[str]]] = [
    ({"model": "tinny"}, openai.NotFoundError, ["tinny", "did you mean 'tiny'"]),
    ({"extra_body": {"max_token": 3}}, openai.BadRequestError, ["'max_token'", "did you mean 'max_tokens'"]),
    ({"prompt": []}, openai.BadRequestError, ["empty list"]),
    ({"prompt": ""}, openai.BadRequestError, ["no tokens"]),
    ({"prompt": [5, 262]}, openai.BadRequestError, ["262", "vocabulary"]),
    ({"n": 0}, openai.BadRequestError, ["n:"]),
    ({"n": 513}, openai.BadRequestError, ["at most 512"]),
    ({"prompt": ["a"] * 257}, openai.BadRequestError, ["at most 256"]),
    ({"temperature": -1}, openai.BadRequestError, ["temperature"]),
    ({"temperature": 1e-5}, openai.BadRequestError, ["overflow"]),
    ({"top_p": 0}, openai.BadRequestError, ["top_p"]),
    ({"stop": ["a"] * 17}, openai.BadRequestError, ["at most 16"]),
    ({"stop": ""}, openai.BadRequestError, ["empty text"]),
    ({"stop": "x" * 257}, openai.BadRequestError, ["256"]),
    ({"logit_bias": {"x": 1}}, openai.BadRequestError, ["logit_bias"]),
    ({"logit_bias": {"262": 1}}, openai.BadRequestError, ["262"]),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, openai.BadRequestError, ["1024"]),
    ({"max_tokens": 5000}, openai.BadRequestError, ["5001 positions"]),
    ({"max_tokens": 0}, openai.BadRequestError, ["echo"]),
    ({"best_of": 3}, openai.BadRequestError, ["best_of"]),
    ({"seed": 10**400}, openai.BadRequestError, ["seed"]),
    ({"seed": True}, openai.BadRequestError, ["seed"]),
    ({"stream_options": {"include_usage": True}}, openai.BadRequestError, ["stream"]),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "error", "words"), WRONG)
def test_a_wrong_request_is_told_what_is_wrong(
    server: Running, fields: dict[str, Any], error: type[openai.APIStatusError], words: list[str]
) -> None:
    with pytest.raises(error) as caught:
        server.openai().completions.create(**{"model": "tiny", "prompt": "a", **fields})
    assert all(word in str(caught.value) for word in words), str(caught.value)
    body: Any = caught.value.body
    assert set(body) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]}, "role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "content"),
        ({"messages": [{"role": "user", "content": "x", "name": "me"}]}, "name"),
        ({"top_logprobs": 3}, "logprobs"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "differ"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"messages": [{"role": "user", "content": "x" * 4097}]}, "positions"),
    ],
)
def test_what_chat_cannot_do_is_said(server: Running, fields: dict[str, Any], word: str) -> None:
    with pytest.raises(openai.BadRequestError, match=word):
        server.openai().chat.completions.create(
            **{"model": "tiny", "messages": [{"role": "user", "content": "a"}], **fields}
        )


def test_the_services_refusals_have_their_status(start: Start) -> None:
    with start(FakeService(max_waiting=0)) as server, pytest.raises(openai.RateLimitError) as caught:
        server.openai().completions.create(model="tiny", prompt="a")
    assert caught.value.response.headers["retry-after"] == "1"
    with start() as server:
        server.service.fail_with = "its replica was lost"
        for stream in (False, True):
            with pytest.raises(openai.InternalServerError, match="its replica was lost") as failed:
                server.openai().completions.create(model="tiny", prompt="a", stream=stream)
            assert failed.value.status_code == 503 and failed.value.response.headers["retry-after"]
