"""One choice of an OpenAI answer as it is written: text, and a record of its tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from lockstep.errors import ServiceError
from lockstep.models.tokenizer import Tokenizer
from lockstep.service.http.detokenise import Detokeniser, StopCutter
from lockstep.service.requests import likeliest
from lockstep.types import Trajectory

Top = Sequence[tuple[int, float]]
LEAST_LOGPROB = -9999.0  # what OpenAI writes for what JSON has no number for


@dataclass(frozen=True)
class Entry:
    """A token's record. logprob: None where nothing predicts it. offset: characters of the text before it. echoed: it
    is one of the prompt's."""

    id: int
    logprob: float | None
    top: Top | None
    offset: int
    echoed: bool = False


class TokenTexts:
    """Texts of single tokens."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self._text = lru_cache(maxsize=1 << 16)(lambda i: tokenizer.decode([i], skip_special=False))

    def text(self, token: int) -> str:
        return self._text(token)

    def name(self, token: int) -> str:
        """Its text, or its id where it is only part of a character: several tokens would have one name."""
        text = self._text(token)
        return f"token_id:{token}" if "\ufffd" in text else text

    def utf8(self, token: int) -> list[int] | None:
        text = self._text(token)
        return None if "\ufffd" in text else list(text.encode())


class Choice:
    """What is known of one sample so far, and how much of it was taken to be sent. offset: characters before the
    completion (of a prompt that is echoed). deferred: nothing is pushed before its end."""

    def __init__(self, index: int, tokenizer: Tokenizer, prompt: Sequence[int], stops: Sequence[str], offset: int = 0):
        self.index = index
        self._made = tokenizer, prompt, stops, offset
        self.sent = False
        self.announced = False
        self.restart()

    def restart(self) -> None:
        """Forget everything: it is sampled anew under another version."""
        tokenizer, prompt, stops, offset = self._made
        self._detokeniser, self._cutter = Detokeniser(tokenizer, prompt), StopCutter(stops)
        self._text, self._entries = [""], list[Entry]()
        self._length, self._seen = offset, 0
        self.deferred = False
        self.trajectory: Trajectory | None = None

    def push(self, ids: Sequence[int], logprobs: Sequence[float], tops: Sequence[Top] | None) -> None:
        """New tokens, as sampled."""
        self._seen += len(ids)
        for at, (token, logprob) in enumerate(zip(ids, logprobs, strict=True)):
            if self._cutter.stopped:
                return
            self._entries.append(Entry(token, logprob, None if tops is None else tops[at], self._length))
            piece = self._detokeniser.push(token)
            self._length += len(piece)
            self._text.append(self._cutter.push(piece))

    def finish(self, trajectory: Trajectory, take: bool = True) -> None:
        """Its end, with tokens that were not pushed, and the prompt's scores where they are asked for. take: False
        where tokens are not wanted, only scores."""
        seen, ids, details = self._seen, trajectory.completion_ids.tolist(), trajectory.details
        if seen > len(ids):
            raise ServiceError(f"sample {self.index}: {seen} tokens were streamed, its record has {len(ids)}")
        self.trajectory = trajectory
        if details is not None and details.prompt_logprobs is not None:
            tokenizer, prompt, _, _ = self._made
            self._entries[:0] = prompt_entries(tokenizer, prompt, details.prompt_logprobs.tolist())
        if not take:
            return
        self.push(ids[seen:], trajectory.logprobs[seen:].tolist(), likeliest(trajectory, seen) or None)
        self._text.append(self._cutter.push(self._detokeniser.finish()))
        self._text.append(self._cutter.finish())

    @property
    def done(self) -> bool:
        return self.trajectory is not None

    @property
    def finish_reason(self) -> str:
        assert self.trajectory is not None
        return "stop" if self._cutter.stopped else self.trajectory.finish_reason

    def take(self) -> tuple[str, list[Entry]]:
        """Text and tokens that were not taken before."""
        text, entries = "".join(self._text), self._entries
        self._text, self._entries = [], []
        return text, entries


def number(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LEAST_LOGPROB


def completion_logprobs(entries: Sequence[Entry], texts: TokenTexts, top: int) -> dict[str, Any]:
    """The `logprobs` of a completion. top: how many of the likeliest."""

    def likeliest(e: Entry) -> dict[str, float] | None:
        if e.top is None or e.logprob is None:
            return None
        return {texts.name(i): number(p) for i, p in [*e.top, (e.id, e.logprob)]}

    return {
        "tokens": [texts.name(e.id) for e in entries],
        "token_logprobs": [None if e.logprob is None else number(e.logprob) for e in entries],
        "top_logprobs": [likeliest(e) for e in entries] if top else None,
        "text_offset": [e.offset for e in entries],
    }


def chat_logprobs(entries: Sequence[Entry], texts: TokenTexts, top: int) -> dict[str, Any]:
    def one(token: int, logprob: float) -> dict[str, Any]:
        return {"token": texts.text(token), "bytes": texts.utf8(token), "logprob": number(logprob)}

    content = [
        one(e.id, e.logprob or 0.0) | {"top_logprobs": [one(i, p) for i, p in (e.top or ())[:top]]} for e in entries
    ]
    return {"content": content, "refusal": None}


def prompt_entries(tokenizer: Tokenizer, ids: Sequence[int], logprobs: Sequence[float]) -> list[Entry]:
    """The record of an echoed prompt."""
    detokeniser, found, length = Detokeniser(tokenizer), [], 0
    for token, logprob in zip(ids, logprobs, strict=True):
        found.append(Entry(token, None if math.isnan(logprob) else logprob, None, length, echoed=True))
        length += len(detokeniser.push(token))
    return found
