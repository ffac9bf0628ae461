"""Requests, events and status as the HTTP verbs' JSON values, and back to the very same values: samples and tokens as
`service.record` writes them. Both ends use it; imports no jax."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter

from lockstep.service import record
from lockstep.service.requests import ClientEvent, Ended, RolloutRequest, ServiceStatus, Started, Tokens
from lockstep.types import PolicyVersion, SamplingParams

STATUS: TypeAdapter[ServiceStatus] = TypeAdapter(ServiceStatus)


def policy(version: PolicyVersion) -> dict[str, Any]:
    return {"number": version.number, "digest": version.digest}


def event(value: ClientEvent) -> dict[str, Any]:
    if isinstance(value, Started):
        return {"event": "started", "policy": policy(value.version), "replica": value.replica}
    if isinstance(value, Tokens):
        return {"event": "tokens", **record.tokens(value)}
    return {
        "event": "ended",
        "policy": None if value.policy is None else policy(value.policy),
        "outcome": value.outcome,
        "reason": value.reason,
        "samples": [record.sample(t) for t in value.trajectories],
    }


def client_event(value: Mapping[str, Any], request: RolloutRequest) -> ClientEvent:
    """The inverse of `event`."""
    kind = value["event"]
    if kind == "started":
        return Started(PolicyVersion(**value["policy"]), value["replica"])
    if kind == "tokens":
        return record.tokens_from(value)
    assert kind == "ended", kind
    ran = value["policy"]
    return Ended(
        value["outcome"],
        tuple(record.trajectory(s, request.prompt.ids, request.id) for s in value["samples"]),
        value["reason"],
        None if ran is None else PolicyVersion(**ran),
    )


def sampling(params: SamplingParams) -> dict[str, Any]:
    """Fields of `GenerateRequest`."""
    return {
        "temperature": params.temperature,
        "max_new_tokens": params.max_new_tokens,
        "stop_ids": sorted(params.stop_ids),
        "stop_strings": list(params.stop_strings),
        "min_new_tokens": params.min_new_tokens,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "repetition_penalty": params.repetition_penalty,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "logit_bias": [list(pair) for pair in params.logit_bias],
        "allowed_ids": None if params.allowed_ids is None else sorted(params.allowed_ids),
        "forbidden_ids": sorted(params.forbidden_ids),
        "top_logprobs": params.top_logprobs,
        "prompt_logprobs": params.prompt_logprobs,
    }
