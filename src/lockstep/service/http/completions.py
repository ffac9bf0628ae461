"""POST /v1/completions."""

from __future__ import annotations

from typing import Any

from lockstep.service.http.calls import Call, carry_out
from lockstep.service.http.choices import Choice, Entry, TokenTexts, completion_logprobs
from lockstep.service.http.errors import bad
from lockstep.service.http.exchange import Exchange
from lockstep.service.http.fields import CompletionRequest
from lockstep.service.http.sampling import (
    check_count,
    completion_prompts,
    openai_params,
    request_seed,
    sample_seed,
    stop_texts,
)
from lockstep.service.http.surface import Surface
from lockstep.service.requests import RolloutRequest
from lockstep.types import Prompt


class CompletionShape:
    prefix, whole, chunk = "cmpl", "text_completion", "text_completion"

    def __init__(self, body: CompletionRequest, texts: TokenTexts, prompts: list[tuple[str, list[int]]], n: int):
        self._body, self._texts, self._prompts, self._n = body, texts, prompts, n

    def _prompt(self, choice: Choice) -> tuple[str, list[int]]:
        return self._prompts[choice.index // self._n]

    def _choice(
        self, choice: Choice, text: str, entries: list[Entry], reason: str | None, ids: bool = True
    ) -> dict[str, Any]:
        found: dict[str, Any] = {"index": choice.index, "text": text, "logprobs": None, "finish_reason": reason}
        if self._body.logprobs is not None and ids:
            found["logprobs"] = completion_logprobs(entries, self._texts, self._body.logprobs)
        if self._body.return_token_ids and ids:
            found["token_ids"] = [e.id for e in entries if not e.echoed]
        return found

    def complete(self, choice: Choice, text: str, entries: list[Entry]) -> dict[str, Any]:
        before = self._prompt(choice)[0] if self._body.echo else ""
        found = self._choice(choice, before + text, entries, choice.finish_reason)
        if self._body.return_token_ids:
            found["prompt_token_ids"] = self._prompt(choice)[1]
        return found

    def opening(self, choice: Choice) -> dict[str, Any] | None:
        found = self._choice(choice, self._prompt(choice)[0] if self._body.echo else "", [], None, ids=False)
        if self._body.return_token_ids:
            found["prompt_token_ids"] = self._prompt(choice)[1]
        return found

    def delta(self, choice: Choice, text: str, entries: list[Entry]) -> dict[str, Any]:
        return self._choice(choice, text, entries, None)

    def closing(self, choice: Choice, reason: str) -> dict[str, Any]:
        return self._choice(choice, "", [], reason, ids=False)


def prepare(surface: Surface, body: CompletionRequest, exchange: Exchange) -> Call:
    served, limits = surface.served, surface.limits
    surface.check_model(body.model)
    n = body.n or 1
    if body.best_of is not None and body.best_of != n:
        raise bad(f"best_of: only n ({n}) is supported, got {body.best_of}; ask for n and choose", "best_of")
    if body.stream_options is not None and not body.stream:
        raise bad("stream_options: only with stream", "stream_options")
    max_tokens = 16 if body.max_tokens is None else body.max_tokens
    if max_tokens == 0 and not body.echo:
        raise bad("max_tokens: 0 leaves nothing to answer without echo", "max_tokens")
    prompts = completion_prompts(body, served, limits)
    check_count("samples (prompts x n) in one call", len(prompts) * n, limits.samples, "n")
    if body.echo:
        prompts = [(text or served.tokenizer.decode(ids), ids) for text, ids in prompts]
    scored = bool(body.echo) and body.logprobs is not None
    params = openai_params(
        body, max_tokens, served, limits, top_logprobs=body.logprobs or 0, prompt_logprobs=scored or not max_tokens
    )
    seed = request_seed(body.seed, exchange.key)
    requests = [
        RolloutRequest(
            Prompt(f"cmpl-{exchange.id}/{i}", text, tuple(ids)),
            tuple(sample_seed(seed, j) for j in range(n)),
            params,
            # One call has one version.
            group=body.group or f"cmpl-{exchange.id}",
            min_version=body.min_version or 0,
            stream=bool(body.stream) and not scored,
            key=exchange.key and f"{exchange.key}/{i}",
            queue_s=limits.queue_s,
        )
        for i, (text, ids) in enumerate(prompts)
    ]
    stops = stop_texts(body)
    choices = [
        [
            Choice(p * n + j, served.tokenizer, ids, stops, len(text) if body.echo else 0)
            for j in range(n)
        ]
        for p, (text, ids) in enumerate(prompts)
    ]  # fmt: skip
    return Call(
        requests,
        choices,
        CompletionShape(body, surface.texts, prompts, n),
        seed,
        stream=bool(body.stream),
        usage=body.stream_options is not None and body.stream_options.include_usage,
        wanted=max_tokens > 0,
        deferred=scored or max_tokens == 0,
        tops=bool(body.logprobs),
        records=body.logprobs is not None or bool(body.return_token_ids),
    )


async def completions(surface: Surface, body: CompletionRequest, exchange: Exchange) -> None:
    call = await surface.workers.start(prepare, surface, body, exchange)
    await carry_out(surface, call, exchange)
