"""A trajectory from a sample and the policy that it ran under; what its decoding is known by."""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import fields, replace

import numpy as np

from lockstep.rollout.work import Sequence
from lockstep.types import Details, Fingerprint, PolicyVersion, SamplingParams, Trajectory


def decoding_digest(sampling: SamplingParams) -> str:
    """Digest of everything that decides which distribution a token is drawn from, and where a completion ends."""
    base = {"temperature", "stop_ids", "max_new_tokens"}
    decoding: list[object] = [sampling.temperature, sorted(sampling.stop_ids), sampling.max_new_tokens]
    changed = {
        f.name: sorted(value) if isinstance(value := getattr(sampling, f.name), frozenset) else value
        for f in fields(sampling)
        if f.name not in base and getattr(sampling, f.name) != f.default
    }
    return json_digest([*decoding, changed] if changed else decoding)


def json_digest(value: object) -> str:
    """Digest (32 hex digits) of a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]


def make_trajectory(seq: Sequence, version: PolicyVersion, fingerprint: Fingerprint) -> Trajectory:
    """What is recorded of a sample that has ended, or of what there is of it where it was cancelled. fingerprint: the
    engine's; the decoding is the request's own."""
    request = seq.group.request
    params = request.params
    changed = (params.truncates or params.reshapes) and params.temperature > 0
    return Trajectory(
        prompt_ids=np.asarray(request.prompt.ids, np.int32),
        completion_ids=np.asarray(seq.tokens, np.int32),
        logprobs=np.asarray(seq.logprobs, np.float32),
        versions=np.full(len(seq.tokens), version.number, np.int32),
        finish_reason=seq.finish or "abort",
        seed=request.seeds[seq.index],
        group_id=request.prompt.id,
        index=seq.index,
        fingerprint=replace(fingerprint, decoding=decoding_digest(params)),
        kept_logmass=np.asarray(seq.kept, np.float32) if changed else None,
        details=_details(seq),
        generate_s=time.perf_counter() - seq.group.since,
    )


def _details(seq: Sequence) -> Details | None:
    params = seq.group.request.params
    if not (params.prompt_logprobs or params.top_logprobs):
        return None
    top: list[np.ndarray | None] = [None, None]
    if params.top_logprobs:
        kinds = (np.int32, np.float32)
        top = [np.asarray([t[i] for t in seq.top], k).reshape(-1, params.top_logprobs) for i, k in enumerate(kinds)]
    scores = seq.group.scores
    if scores is None and seq.group.prompt_length == 1:  # nothing predicts its one token: no pass scores it
        scores = np.full(1, np.nan, np.float32)
    return Details(scores if params.prompt_logprobs else None, *top)
