"""What comes back, for the OpenAPI document. The answers themselves are written as plain values, for speed; the tests
hold them against these."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

FinishReason = Literal["stop", "length", "abort"]
Real = float | Literal["inf", "-inf"] | None


class Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ErrorDetail(Answer):
    """code: for programs. param: the field that is wrong."""

    message: str
    type: str
    param: str | None
    code: str


class Error(Answer):
    error: ErrorDetail


class FingerprintAnswer(Answer):
    """Hashes of what besides the weights decides a log-probability."""

    tokenizer: str
    template: str
    decoding: str
    numerics: str


class Identity(Answer):
    """Which policy made it. version, digest: of the weights. seed: of the call; seeds: of its samples, in order."""

    version: int
    digest: str
    request_id: str
    seed: int
    fingerprint: FingerprintAnswer
    seeds: list[int]


class Usage(Answer):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionLogprobs(Answer):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(Answer):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class OpenAIAnswer(Answer):
    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: Usage
    lockstep: Identity


class Completion(OpenAIAnswer):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class TokenLogprob(Answer):
    token: str
    bytes: list[int] | None
    logprob: float


class ChatTokenLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(Answer):
    content: list[ChatTokenLogprob]
    refusal: None


class ChatAnswerMessage(Answer):
    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(Answer):
    index: int
    message: ChatAnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class ChatCompletion(OpenAIAnswer):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class ModelDetails(Answer):
    """version, digest: of the newest policy that a replica serves."""

    version: int | None
    digest: str | None
    max_positions: int
    vocab_size: int
    tokenizer: str
    template: str


class Model(Answer):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    lockstep: ModelDetails


class Models(Answer):
    object: Literal["list"]
    data: list[Model]


class Policy(Answer):
    number: int
    digest: str


class SampleDetails(Answer):
    prompt_logprobs: list[Real] | None
    top_ids: list[list[int]] | None
    top_logprobs: list[list[Real]] | None


class Sample(Answer):
    """logprobs, kept_logmass: float32, written so that they read back as the very same; NaN is null. versions: per
    token, the policy that computed its log-probability."""

    index: int
    ids: list[int]
    logprobs: list[Real]
    kept_logmass: list[Real] | None
    versions: list[int]
    finish_reason: FinishReason
    seed: int
    fingerprint: FingerprintAnswer
    generate_s: float
    details: SampleDetails | None = None


class Generated(Answer):
    """id: the caller's own. policy, replica: null where it was aborted before it started."""

    request_id: str
    id: str
    policy: Policy | None
    replica: str | None
    outcome: Literal["finished", "aborted"]
    reason: str
    samples: list[Sample]


class Score(Answer):
    """logprobs: one per token, the first null."""

    policy: Policy
    logprobs: list[Real]


class Scored(Answer):
    results: list[Score]


class CancelledAnswer(Answer):
    request_id: str


class Paused(Answer):
    paused: bool


class State(Answer):
    status: Literal["ok", "ready"]


class Done(BaseModel):
    """What was done, by replica."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Any]
