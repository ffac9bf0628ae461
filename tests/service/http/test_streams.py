"""Streams say what whole answers say, piece by piece; and they end in a way that can be told from being cut off."""

from __future__ import annotations

import json
import threading
from typing import Any

import openai
import pytest

from lockstep.models.tokenizer import Tokenizer
from lockstep.service.requests import RolloutRequest

from .conftest import Running, Start
from .fake import FakeService, version_of


def events(server: Running, path: str, body: dict[str, Any]) -> list[Any]:
    """The data of every event; "[DONE]" as it is."""
    with server.http().stream("POST", path, json=body) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"] == "text/event-stream"
        lines = [line.removeprefix("data: ") for line in response.read().decode().split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines if not line.startswith(":")]


def test_the_client_reads_a_stream(server: Running) -> None:
    asked: dict[str, Any] = {"model": "tiny", "prompt": "abcdef", "n": 3, "seed": 4, "max_tokens": 9, "logprobs": 1}
    whole = server.openai().completions.create(**asked)
    texts, tokens, reasons = ["", "", ""], [[], [], []], [None] * 3  # type: ignore[var-annotated]
    usage = None
    for chunk in server.openai().completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for c in chunk.choices:
            texts[c.index] += c.text
            reasons[c.index] = c.finish_reason or reasons[c.index]
            if c.logprobs:
                tokens[c.index] += zip(c.logprobs.tokens, c.logprobs.token_logprobs, strict=True)
    assert texts == [c.text for c in whole.choices] and reasons == [c.finish_reason for c in whole.choices]
    assert usage == whole.usage
    assert tokens == [list(zip(c.logprobs.tokens, c.logprobs.token_logprobs, strict=True)) for c in whole.choices]


def test_the_order_of_a_chat_stream(server: Running) -> None:
    body = {
        "messages": [{"role": "user", "content": "abc"}], "stream": True, "max_tokens": 5, "seed": 1, "logprobs": True,
        "top_logprobs": 2, "stream_options": {"include_usage": True},
    }  # fmt: skip
    *chunks, last, done = events(server, "/v1/chat/completions", body)
    assert done == "[DONE]" and last["choices"] == [] and last["usage"]["completion_tokens"] == 5
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[0]["lockstep"]["digest"] == version_of(1).digest
    assert chunks[-1]["choices"][0] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "length"}
    assert "fingerprint" in chunks[-1]["lockstep"]
    assert all(set(c["choices"][0]["delta"]) == {"content"} for c in chunks[1:-1])
    assert all(c["usage"] is None and c["choices"][0]["finish_reason"] is None for c in chunks[:-1])
    assert len({(c["id"], c["created"], c["system_fingerprint"], c["object"]) for c in chunks}) == 1
    records = [t for c in chunks[1:-1] for t in c["choices"][0]["logprobs"]["content"]]
    whole = server.http().post("/v1/chat/completions", json={**body, "stream": False, "stream_options": None}).json()
    assert records == whole["choices"][0]["logprobs"]["content"] and len(records) == 5


def test_likeliest_tokens_that_are_known_at_the_end_only_are_not_left_out(start: Start) -> None:
    with start(FakeService(tops=False)) as server:
        body = {"prompt": "abc", "stream": True, "max_tokens": 4, "logprobs": 2, "seed": 1}
        chunks = events(server, "/v1/completions", body)[:-1]
        whole = server.http().post("/v1/completions", json={**body, "stream": False}).json()
    tops = [t for c in chunks if (r := c["choices"][0]["logprobs"]) for t in r["top_logprobs"]]
    assert tops == whole["choices"][0]["logprobs"]["top_logprobs"] and len(tops) == 4


class Gate:
    """Holds every sample at one of its tokens."""

    def __init__(self, at: int):
        self.at, self.reached, self.opened = at, threading.Event(), threading.Event()

    def __call__(self, request: RolloutRequest, index: int, at: int) -> None:
        if at == self.at and not self.opened.is_set():
            self.reached.set()
            assert self.opened.wait(20)


def test_a_stop_text_over_several_tokens_is_never_seen(start: Start, tokenizer: Tokenizer) -> None:
    script = tokenizer.encode("one STtwo STOP three")
    service = FakeService(script=lambda r, i: script, decode=lambda ids: tokenizer.decode(ids, skip_special=False))
    gate = service.before_token = Gate(len("one S"))
    asked: dict[str, Any] = {"model": "tiny", "prompt": "x", "max_tokens": 50, "stop": "STOP"}
    with start(service) as server:
        text, reason = "", None
        for chunk in server.openai().completions.create(**asked, stream=True):
            text += chunk.choices[0].text
            reason = chunk.choices[0].finish_reason
            if text == "one ":  # it is streamed, not kept back; an S is, it could begin the stop text
                gate.opened.set()
        assert gate.opened.is_set() and (text, reason) == ("one STtwo ", "stop")
        whole = server.openai().completions.create(**asked).choices[0]
        assert (whole.text, whole.finish_reason) == ("one STtwo ", "stop")


def test_a_version_that_is_replaced_ends_a_stream_that_has_sent_text(start: Start) -> None:
    with start() as server:
        gate = server.service.before_token = Gate(3)
        stream = server.openai().completions.create(model="tiny", prompt="abc", max_tokens=6, stream=True)
        text, reason = "", None
        with pytest.raises(openai.APIError, match="was replaced by"):
            for chunk in stream:
                text += chunk.choices[0].text
                reason = chunk.choices[0].finish_reason or reason
                if len(text) == 3:
                    server.service.version = version_of(2)
                    gate.opened.set()
        assert (len(text), reason) == (3, "abort")


@pytest.mark.parametrize("at", [0, 3])
def test_a_version_that_is_replaced_before_text_was_sent_is_nobodys_business(start: Start, at: int) -> None:
    """Also where there is text, but all of it could begin a stop text and was held back."""
    with start() as server:
        gate = server.service.before_token = Gate(at)
        found: list[Any] = []
        body = {"prompt": "aaa", "max_tokens": 6, "stream": True, "stop": "aaaaaa!"}
        asking = threading.Thread(target=lambda: found.extend(events(server, "/v1/completions", body)))
        asking.start()
        assert gate.reached.wait(20)
        server.service.version = version_of(2)
        gate.opened.set()
        asking.join(20)
        assert not asking.is_alive()
    assert found[-1] == "[DONE]" and found[-2]["lockstep"]["version"] == 2
    assert sum(len(c["choices"][0]["text"]) for c in found[:-1]) == 6
