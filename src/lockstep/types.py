"""The nouns: what travels between the parts, with shapes, units, and who fills each field.

A run in one breath: a task yields `Prompt`s; the rollout engine turns each into `samples` `Trajectory`s under one
`PolicyVersion`; scoring adds rewards and reference log-probabilities; the trainer consumes them by group.

Everything is frozen. Token ids are never re-made from text: the ids in the loss are the ids that were sampled.
Masks come from lengths and spans, never from token values.

Imports numpy only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class Prompt:
    """One thing to complete, made by a task.

    id: unique within the run and stable across resumes (`task/epoch/index`); also the group's id.
    text: the prompt as text, for people and for rewards. ids: what the policy really sees.
    row: everything else the data row holds (gold answer, metadata); handed to the reward function unchanged.
    """

    id: str
    text: str
    ids: tuple[int, ...]
    row: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SamplingParams:
    """How a completion is drawn. The recorded log-probability is of exactly this distribution.

    temperature: > 0 samples from softmax(logits / temperature); 0 is greedy (log-probability then at temperature 1).
    max_new_tokens: completion tokens at most, the stop token included.
    stop_ids: sampling one of these ends the completion with reason "stop"; the id is kept as the last token.
    """

    temperature: float
    max_new_tokens: int
    stop_ids: frozenset[int]


@dataclass(frozen=True)
class PolicyVersion:
    """Which weights. number: agreed by all parties, grows by one per published update; not the training step and not
    the number of syncs. digest: content digest of every weight that the policy is made of (hex)."""

    number: int
    digest: str

    def __str__(self) -> str:
        return f"v{self.number}:{self.digest[:8]}"


@dataclass(frozen=True)
class Fingerprint:
    """Hashes (hex) of what besides the weights decides a trajectory's log-probabilities (mission M13)."""

    tokenizer: str
    template: str
    decoding: str
    numerics: str

    def difference(self, other: Fingerprint) -> list[str]:
        """Names of the fields in which the two differ."""
        return [k for k in ("tokenizer", "template", "decoding", "numerics") if getattr(self, k) != getattr(other, k)]


@dataclass(frozen=True)
class Trajectory:
    """One prompt, one completion, one identity. T = number of completion tokens (>= 1 unless aborted).

    Filled by the engine:
      prompt_ids [P] int32, completion_ids [T] int32 (a final stop token included), logprobs [T] float32 (nats, under
      the distribution sampled from), versions [T] int32 (policy number that computed each log-probability),
      finish_reason, seed (of this request), group_id (its prompt's id), index (0..samples-1 within the group),
      fingerprint, generate_s (seconds from submission to finish).
    Filled by the environment: text (completion decoded, special tokens skipped), rewards (by reward name) and
      reward (their weighted sum); `failed` says why there is no reward, then reward is NaN.
    Filled by scoring: reference_logprobs [T] float32 or None.
    """

    prompt_ids: np.ndarray
    completion_ids: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    finish_reason: FinishReason
    seed: int
    group_id: str
    index: int
    fingerprint: Fingerprint
    generate_s: float = 0.0
    text: str = ""
    rewards: Mapping[str, float] = field(default_factory=dict)
    reward: float = float("nan")
    failed: str | None = None
    reference_logprobs: np.ndarray | None = None

    def __post_init__(self) -> None:
        n = len(self.completion_ids)
        assert len(self.logprobs) == n == len(self.versions), (n, len(self.logprobs), len(self.versions))
        assert self.logprobs.dtype == np.float32 and self.completion_ids.dtype == np.int32
