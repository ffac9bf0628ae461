"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import Any

from lockstep.errors import CapacityError
from lockstep.service.http.calls import Call, carry_out
from lockstep.service.http.choices import Choice, Entry, TokenTexts, chat_logprobs
from lockstep.service.http.errors import bad
from lockstep.service.http.exchange import Exchange
from lockstep.service.http.fields import ChatRequest
from lockstep.service.http.sampling import (
    chat_prompt,
    check_count,
    openai_params,
    request_seed,
    sample_seed,
    stop_texts,
)
from lockstep.service.http.surface import Surface
from lockstep.service.requests import RolloutRequest
from lockstep.types import Prompt


class ChatShape:
    prefix, whole, chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, body: ChatRequest, texts: TokenTexts, prompt: list[int]):
        self._body, self._texts, self._prompt = body, texts, prompt

    def _records(self, entries: list[Entry]) -> dict[str, Any]:
        found: dict[str, Any] = {"logprobs": None}
        if self._body.logprobs:
            found["logprobs"] = chat_logprobs(entries, self._texts, self._body.top_logprobs or 0)
        if self._body.return_token_ids:
            found["token_ids"] = [e.id for e in entries]
        return found

    def complete(self, choice: Choice, text: str, entries: list[Entry]) -> dict[str, Any]:
        found = {
            "index": choice.index,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "finish_reason": choice.finish_reason,
            **self._records(entries),
        }
        if self._body.return_token_ids:
            found["prompt_token_ids"] = self._prompt
        return found

    def opening(self, choice: Choice) -> dict[str, Any] | None:
        found: dict[str, Any] = self._chunk(choice, {"role": "assistant", "content": ""}, None)
        if self._body.return_token_ids:
            found["prompt_token_ids"] = self._prompt
        return found

    def delta(self, choice: Choice, text: str, entries: list[Entry]) -> dict[str, Any]:
        return self._chunk(choice, {"content": text}, None) | self._records(entries)

    def closing(self, choice: Choice, reason: str) -> dict[str, Any]:
        return self._chunk(choice, {}, reason)

    def _chunk(self, choice: Choice, delta: dict[str, Any], reason: str | None) -> dict[str, Any]:
        return {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": reason}


def prepare(surface: Surface, body: ChatRequest, exchange: Exchange) -> Call:
    served, limits = surface.served, surface.limits
    surface.check_model(body.model)
    n = body.n or 1
    check_count("samples in one call", n, limits.samples, "n")
    if body.stream_options is not None and not body.stream:
        raise bad("stream_options: only with stream", "stream_options")
    if body.top_logprobs is not None and not body.logprobs:
        raise bad("top_logprobs: only with logprobs", "top_logprobs")
    limit = _limit(body)
    ids = chat_prompt(body, served, limits)
    room = served.max_positions - len(ids)
    if room < 1:
        raise CapacityError(f"the messages are {len(ids)} tokens, this server has {served.max_positions} positions")
    top = body.top_logprobs or 0
    params = openai_params(body, limit or room, served, limits, top_logprobs=top, prompt_logprobs=False)
    seed = request_seed(body.seed, exchange.key)
    request = RolloutRequest(
        Prompt(f"chatcmpl-{exchange.id}", "", tuple(ids)),
        tuple(sample_seed(seed, i) for i in range(n)),
        params,
        group=body.group or "",
        min_version=body.min_version or 0,
        stream=bool(body.stream),
        key=exchange.key,
        queue_s=limits.queue_s,
    )
    stops = stop_texts(body)
    return Call(
        [request],
        [[Choice(i, served.tokenizer, ids, stops) for i in range(n)]],
        ChatShape(body, surface.texts, ids),
        seed,
        stream=bool(body.stream),
        usage=body.stream_options is not None and body.stream_options.include_usage,
        tops=top > 0,
        records=bool(body.logprobs) or bool(body.return_token_ids),
    )


def _limit(body: ChatRequest) -> int | None:
    given = {v for v in (body.max_tokens, body.max_completion_tokens) if v is not None}
    if len(given) > 1:
        raise bad("max_tokens and max_completion_tokens differ; give one", "max_tokens")
    return next(iter(given), None)


async def chat_completions(surface: Surface, body: ChatRequest, exchange: Exchange) -> None:
    call = await surface.workers.start(prepare, surface, body, exchange)
    await carry_out(surface, call, exchange)
