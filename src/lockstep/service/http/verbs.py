"""Every verb, once: the application's routes and the OpenAPI document are made from this table."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, TypeAdapter

from lockstep.service.http import answers, chat, completions, fields, info, metrics, rl, wire
from lockstep.service.http.calls import EVENTS
from lockstep.service.http.exchange import JSON, Exchange
from lockstep.service.http.settings import Access
from lockstep.service.http.surface import Surface

Handle = Callable[[Surface, Any, Exchange], Awaitable[None]]


@dataclass(frozen=True)
class Verb:
    """access: the token it needs. body: of its requests; answer: of status 200, and its media type; streams: the media
    type of a streamed answer. errors: statuses besides those that any verb with its access and body can answer. works:
    it samples or scores, so it is limited in number and stops when the server closes. keyed: an idempotency key is
    heeded."""

    method: Literal["GET", "POST"]
    path: str
    handle: Handle
    summary: str
    access: Access
    answer: type[BaseModel] | TypeAdapter[Any] | None
    body: type[BaseModel] | None = None
    media: str = JSON
    streams: str = ""
    errors: tuple[int, ...] = ()
    works: bool = False
    keyed: bool = False


VERBS = (
    Verb(
        "POST", "/v1/completions", completions.completions, "Complete prompts (OpenAI)", "inference",
        answers.Completion, fields.CompletionRequest, streams=EVENTS, errors=(404, 409), works=True, keyed=True,
    ),
    Verb(
        "POST", "/v1/chat/completions", chat.chat_completions, "Answer a conversation (OpenAI)", "inference",
        answers.ChatCompletion, fields.ChatRequest, streams=EVENTS, errors=(404, 409), works=True, keyed=True,
    ),
    Verb("GET", "/v1/models", info.models, "The served model", "inference", answers.Models),
    Verb("GET", "/v1/models/{id}", info.model, "The served model", "inference", answers.Model, errors=(404,)),
    Verb(
        "POST", "/v1/rl/generate", rl.generate, "Tokens in, tokens out, with their record", "inference",
        answers.Generated, fields.GenerateRequest, streams=rl.LINES, errors=(409,), works=True, keyed=True,
    ),
    Verb(
        "POST", "/v1/rl/score", rl.score, "Log-probabilities of given tokens", "inference",
        answers.Scored, fields.ScoreRequest, works=True,
    ),
    Verb(
        "POST", "/v1/rl/cancel", rl.cancel, "Cancel a request under way", "inference",
        answers.CancelledAnswer, fields.CancelRequest,
    ),
    Verb(
        "POST", "/v1/rl/versions/stage", rl.stage, "Bring a version beside the active one, verified", "control",
        answers.Done, fields.StageRequest, errors=(404, 409, 503),
    ),
    Verb(
        "POST", "/v1/rl/versions/commit", rl.commit, "Serve the staged version", "control",
        answers.Done, fields.CommitRequest, errors=(409, 503),
    ),
    Verb(
        "POST", "/v1/rl/versions/abort", rl.abort_version, "Forget the staged version", "control",
        answers.Done, fields.AbortRequest, errors=(409, 503),
    ),
    Verb("POST", "/v1/rl/pause", rl.pause, "Send nothing more to replicas", "control", answers.Paused,
         fields.NothingRequest, errors=(503,)),
    Verb("POST", "/v1/rl/resume", rl.resume, "Go on", "control", answers.Paused, fields.NothingRequest, errors=(503,)),
    Verb("GET", "/v1/rl/status", rl.status, "Replicas, versions, queues", "inference", wire.STATUS),
    Verb("GET", "/metrics", info.metrics, "Figures for Prometheus", "inference", None, media=metrics.MEDIA),
    Verb("GET", "/health", info.health, "The process lives", "open", answers.State),
    Verb("GET", "/ready", info.ready, "A replica serves", "open", answers.State, errors=(503,)),
)  # fmt: skip
