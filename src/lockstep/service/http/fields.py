"""The fields of requests that more than one verb has. Strict: no value is turned into another kind of value."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr

MAX_INT32 = 2**31 - 1
MAX_SEED = 2**64 - 1

TokenId = Annotated[StrictInt, Field(ge=0, le=MAX_INT32)]
Count = Annotated[StrictInt, Field(ge=1, le=MAX_INT32)]
CountOrNone = Annotated[StrictInt, Field(ge=0, le=MAX_INT32)]
Seed = Annotated[StrictInt, Field(ge=0, le=MAX_SEED)]
Name = Annotated[StrictStr, Field(max_length=256)]


def real(low: float, high: float, **more: Any) -> Any:
    """A finite number within limits; whole ones may be written without a point."""
    return Field(ge=low, le=high, allow_inf_nan=False, strict=True, **more)


Temperature = Annotated[
    float, real(0, 100, description="0 is greedy; anything between 0 and 0.001 is refused: logits would overflow")
]
Share = Annotated[float, real(0, 1)]
Penalty = Annotated[float, real(-2, 2)]
WidePenalty = Annotated[float, real(-100, 100)]
Repetition = Annotated[float, real(0.01, 100)]
Bias = Annotated[float, real(-100, 100)]


class Body(BaseModel):
    """A field that is not known is an error: ignoring it would be answering another question."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class StreamOptions(Body):
    include_usage: StrictBool = False
    include_obfuscation: Literal[False] = False


class Completing(Body):
    """What both OpenAI verbs take. The fields of the last paragraph are OpenAI's that change no answer: accepted."""

    model: Name | None = Field(None, description="must be the served model, where it is given")
    n: Annotated[StrictInt, Field(ge=1, le=MAX_INT32)] | None = 1
    temperature: Temperature | None = 1.0
    top_p: Annotated[float, real(0, 1, description="> 0")] | None = 1.0
    stop: StrictStr | list[StrictStr] | None = Field(None, description="texts that end a completion; cut off the text")
    seed: Annotated[StrictInt, Field(ge=-(2**63), le=2**63 - 1)] | None = Field(
        None, description="sample i's own seed derives from (seed, i); without one it is random, and reported"
    )
    presence_penalty: Penalty | None = 0.0
    frequency_penalty: Penalty | None = 0.0
    logit_bias: dict[Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], Bias] | None = None
    stream: StrictBool | None = False
    stream_options: StreamOptions | None = None

    top_k: CountOrNone | None = Field(None, description="0 keeps all")
    min_p: Share | None = None
    repetition_penalty: Repetition | None = None
    min_tokens: CountOrNone | None = None
    ignore_eos: StrictBool | None = Field(False, description="the model's end tokens do not stop")
    stop_token_ids: list[TokenId] | None = None
    return_token_ids: StrictBool | None = False
    group: Name | None = Field(None, description="requests that name one group come from one policy version")
    min_version: CountOrNone | None = Field(None, description="wait for a replica that serves at least this version")

    user: StrictStr | None = None
    metadata: dict[StrictStr, StrictStr] | None = None
    store: StrictBool | None = None
    service_tier: StrictStr | None = None
    safety_identifier: StrictStr | None = None
    prompt_cache_key: StrictStr | None = None


class CompletionRequest(Completing):
    """POST /v1/completions"""

    prompt: StrictStr | list[TokenId] | list[StrictStr] | list[list[TokenId]] = Field(
        description="a text, token ids, or a list of either: each is completed"
    )
    max_tokens: CountOrNone | None = Field(16, description="0 only with echo: the prompt is scored")
    logprobs: Annotated[StrictInt, Field(ge=0, le=20)] | None = Field(
        None, description="log-probabilities of the tokens, and of so many of the likeliest"
    )
    echo: StrictBool | None = Field(False, description="the prompt before the completion, scored with logprobs")
    best_of: Annotated[StrictInt, Field(ge=1, le=MAX_INT32)] | None = Field(None, description="n, or not given")
    suffix: Literal[""] | None = None
    allow_special: StrictBool | None = Field(
        False, description="texts of special tokens in a prompt are tokens; only for text that you wrote yourself"
    )


class TextPart(Body):
    type: Literal["text"]
    text: StrictStr


class ChatMessage(Body):
    """One message. developer is system. Fields that clients send back empty are accepted empty."""

    role: Literal["system", "developer", "user", "assistant"]
    content: StrictStr | list[TextPart]
    name: None = None
    refusal: None = None
    audio: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    function_call: None = None
    tool_calls: Annotated[list[Any], Field(max_length=0)] | None = None


class ResponseFormat(Body):
    type: Literal["text"]


class ChatRequest(Completing):
    """POST /v1/chat/completions"""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=4096)]
    max_tokens: Count | None = Field(None, description="up to the context where neither limit is given")
    max_completion_tokens: Count | None = None
    logprobs: StrictBool | None = False
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=20)] | None = Field(None, description="with logprobs only")
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = Field(None, description="not supported")
    tool_choice: Literal["none"] | None = None
    functions: Annotated[list[Any], Field(max_length=0)] | None = Field(None, description="not supported")
    function_call: Literal["none"] | None = None
    parallel_tool_calls: StrictBool | None = None
    modalities: list[Literal["text"]] | None = None


class Sampling(Body):
    """Every field of `SamplingParams`, by its own name."""

    temperature: Temperature = 1.0
    max_new_tokens: Annotated[
        StrictInt, Field(ge=0, le=MAX_INT32, description="0 only with prompt_logprobs: the prompt is scored")
    ]
    stop_ids: list[TokenId] | None = Field(None, description="default: the model's end tokens; [] for none")
    stop_strings: list[StrictStr] = []
    min_new_tokens: CountOrNone = 0
    top_k: CountOrNone = 0
    top_p: Annotated[float, real(0, 1, description="> 0")] = 1.0
    min_p: Share = 0.0
    repetition_penalty: Repetition = 1.0
    presence_penalty: WidePenalty = 0.0
    frequency_penalty: WidePenalty = 0.0
    logit_bias: list[tuple[TokenId, Bias]] = []
    allowed_ids: list[TokenId] | None = None
    forbidden_ids: list[TokenId] = []
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=1024)] = 0
    prompt_logprobs: StrictBool = False


class GenerateRequest(Sampling):
    """POST /v1/rl/generate"""

    prompt_ids: Annotated[list[TokenId], Field(min_length=1)]
    seeds: Annotated[list[Seed], Field(min_length=1, description="one sample each")]
    id: Name = Field("", description="the caller's own name for it; comes back as it is")
    group: Name = ""
    min_version: CountOrNone = 0
    queue_s: Annotated[float, real(0, 86400)] | None = Field(
        None, description="seconds it may wait for a replica; not given: as long as its caller does"
    )
    stream: StrictBool = False


class CancelRequest(Body):
    """POST /v1/rl/cancel"""

    request_id: Name
    reason: Name = "cancelled by the client"


class ScoreRequest(Body):
    """POST /v1/rl/score"""

    sequences: Annotated[list[Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1)]
    temperature: Temperature = 1.0


class SourceField(Body):
    """files: a folder inside the server's --weights-dir; shared_memory: a segment's name; transfer: host:port of an
    offer, with its token and the digest of its weights."""

    kind: Literal["files", "shared_memory", "transfer"]
    place: Annotated[StrictStr, Field(min_length=1, max_length=4096)]
    token: Annotated[StrictStr, Field(min_length=16, max_length=256)] | None = None
    digest: Annotated[StrictStr, Field(pattern=r"^[0-9a-f]{32}$")] | None = None


class StageRequest(Body):
    """POST /v1/rl/versions/stage"""

    source: SourceField
    number: Annotated[StrictInt, Field(ge=1, le=MAX_INT32)]


class CommitRequest(Body):
    """POST /v1/rl/versions/commit"""

    number: Annotated[StrictInt, Field(ge=1, le=MAX_INT32)]
    policy: Literal["drain", "abort", "dual"] | None = None


class AbortRequest(Body):
    """POST /v1/rl/versions/abort"""

    number: Annotated[StrictInt, Field(ge=1, le=MAX_INT32)]


class NothingRequest(Body):
    """POST without a question: {} or no body."""
