"""From the fields of a request to `SamplingParams`, prompts and seeds. Runs in a thread: tokenising takes its time."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from typing import Any

from lockstep.rollout.stops import split_stops
from lockstep.service.http.errors import bad
from lockstep.service.http.fields import ChatRequest, Completing, CompletionRequest, Sampling
from lockstep.service.http.settings import Limits, Served
from lockstep.types import SamplingParams, temperature_problems

MOST_CHARS_PER_TOKEN = 128


def sample_seed(seed: int, index: int) -> int:
    """64-bit seed of sample `index` of a request with this seed: a hash of both, so it depends on nothing else."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest(), "little")


def request_seed(given: int | None, key: str) -> int:
    """The seed of a request. Without one it is random; with an idempotency key it derives from that, so that the same
    request made again is the same request. Below 2^53: every JSON reader keeps it."""
    if given is not None:
        return given
    if key:
        return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=6).digest(), "little")
    return secrets.randbits(53)


def check_temperature(temperature: float) -> None:
    if problems := temperature_problems(temperature):
        raise bad(problems[0], "temperature")


def check_top_p(top_p: float) -> None:
    if top_p <= 0:
        raise bad("top_p: expected a number > 0 and <= 1, got 0; temperature 0 is greedy", "top_p")


def check_stops(stops: Sequence[str], limits: Limits, param: str) -> None:
    if len(stops) > limits.stops:
        raise bad(f"{param}: at most {limits.stops} stop texts, got {len(stops)}", param)
    if "" in stops:
        raise bad(f"{param}: an empty text ends nothing; leave it out", param)
    if long := [s for s in stops if len(s) > limits.stop_chars]:
        raise bad(f"{param}: a stop text has at most {limits.stop_chars} characters, got {len(long[0])}", param)


def check_count(what: str, count: int, most: int, param: str) -> None:
    if count > most:
        raise bad(f"{param}: at most {most} {what}, got {count}", param)


def check_prompt(count: int, served: Served, limits: Limits, param: str) -> None:
    """So many tokens, against the context and the limit that was set."""
    if count > served.max_positions:
        raise bad(
            f"{param}: {count} tokens do not fit into the context of {served.max_positions} positions; shorten it",
            param, "context_length_exceeded",
        )  # fmt: skip
    check_count("tokens in a prompt", count, limits.prompt_tokens, param)


def stop_texts(body: Completing) -> list[str]:
    return [body.stop] if isinstance(body.stop, str) else list(body.stop or [])


def openai_params(
    body: Completing, max_new_tokens: int, served: Served, limits: Limits, *, top_logprobs: int, prompt_logprobs: bool
) -> SamplingParams:
    """A stop text ends a completion wherever it is completed, also where it is a token of its own (that token's id ends
    it too: a special token's text is never written)."""
    stops, bias = stop_texts(body), body.logit_bias or {}
    check_stops(stops, limits, "stop")
    check_count("entries", len(bias), limits.bias, "logit_bias")
    check_temperature(temperature := _default(body.temperature, 1.0))
    check_top_p(top_p := _default(body.top_p, 1.0))
    stop_ids, _ = split_stops(served.tokenizer, stops)
    stop_ids |= frozenset(body.stop_token_ids or ())
    if not body.ignore_eos:
        stop_ids |= served.tokenizer.eos_ids
    return SamplingParams(
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        stop_ids=stop_ids,
        stop_strings=tuple(dict.fromkeys(stops)),
        min_new_tokens=body.min_tokens or 0,
        top_k=body.top_k or 0,
        top_p=top_p,
        min_p=body.min_p or 0.0,
        repetition_penalty=_default(body.repetition_penalty, 1.0),
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias=tuple(sorted({int(i): b for i, b in bias.items()}.items())),
        top_logprobs=top_logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def rl_params(body: Sampling, served: Served, limits: Limits) -> SamplingParams:
    check_stops(body.stop_strings, limits, "stop_strings")
    check_temperature(body.temperature)
    check_top_p(body.top_p)
    check_count("entries", len(body.logit_bias), limits.bias, "logit_bias")
    check_count("ids", len(body.forbidden_ids), limits.ids, "forbidden_ids")
    check_count("ids", len(body.allowed_ids or ()), limits.ids, "allowed_ids")
    values: dict[str, Any] = {name: getattr(body, name) for name in Sampling.model_fields}
    stop_ids = body.stop_ids if body.stop_ids is not None else served.tokenizer.eos_ids
    return SamplingParams(
        **values
        | {
            "stop_ids": frozenset(stop_ids),
            "stop_strings": tuple(body.stop_strings),
            "logit_bias": tuple(body.logit_bias),
            "allowed_ids": None if body.allowed_ids is None else frozenset(body.allowed_ids),
            "forbidden_ids": frozenset(body.forbidden_ids),
        }
    )


def completion_prompts(body: CompletionRequest, served: Served, limits: Limits) -> list[tuple[str, list[int]]]:
    """(text, ids) of every prompt."""
    given: Any = body.prompt
    if isinstance(given, str) or (given and isinstance(given[0], int)):
        given = [given]
    if not given:
        raise bad("prompt: expected a text, token ids, or a list of either, got an empty list", "prompt")
    check_count("prompts in one call", len(given), limits.prompts, "prompt")
    found = []
    for prompt in given:
        if isinstance(prompt, str):
            _check_text(prompt, limits, "prompt")
            ids = served.tokenizer.encode_prompt(prompt, allow_special=bool(body.allow_special))
            found.append((prompt, ids))
        else:
            check_prompt(len(prompt), served, limits, "prompt")
            check_ids(prompt, served, "prompt")
            found.append(("", list(prompt)))
    for _, ids in found:
        check_prompt(len(ids), served, limits, "prompt")
        if not ids:
            raise bad("prompt: it has no tokens; there is nothing to complete", "prompt")
    return found


def chat_prompt(body: ChatRequest, served: Served, limits: Limits) -> list[int]:
    messages = []
    for message in body.messages:
        content = message.content
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        messages.append({"role": "system" if message.role == "developer" else message.role, "content": text})
    _check_text("".join(m["content"] for m in messages), limits, "messages")
    ids = served.tokenizer.apply_template(messages)
    check_prompt(len(ids), served, limits, "messages")
    return ids


def check_ids(ids: Sequence[int], served: Served, param: str) -> None:
    if ids and max(ids) >= served.vocab_size:
        raise bad(f"{param}: token id {max(ids)} is not in the vocabulary of {served.vocab_size}", param)


def _check_text(text: str, limits: Limits, param: str) -> None:
    """Before it is tokenised: what cannot be few enough tokens."""
    most = limits.prompt_tokens * MOST_CHARS_PER_TOKEN
    if len(text) > most:
        raise bad(f"{param}: a text of {len(text)} characters is over the limit of {most}", param)


def _default(value: float | None, default: float) -> float:
    return default if value is None else value
