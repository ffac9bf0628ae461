"""The nouns: what travels between the parts, with shapes, units, and who fills each field.

A run in one breath: a task yields `Prompt`s; the rollout engine turns each into `samples` `Trajectory`s under one
`PolicyVersion`; scoring adds rewards and reference log-probabilities; the trainer consumes them by group.

Everything is frozen. Token ids are never re-made from text: the ids in the loss are the ids that were sampled.
Masks come from lengths and spans, never from token values.

Imports numpy only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

FinishReason = Literal["stop", "length", "abort"]
LEAST_TEMPERATURE = 0.001


@dataclass(frozen=True)
class Prompt:
    """One thing to complete, made by a task.

    id: unique within the run and stable across resumes (`task/epoch/index`); also the group's id.
    text: the prompt as text, for people and for rewards. ids: what the policy really sees.
    row: everything else the data row holds (gold answer, metadata); handed to the reward function unchanged.
    messages: the turns that a chat template made `text` from, for what comes after it; stays in this process.
    """

    id: str
    text: str
    ids: tuple[int, ...]
    row: Mapping[str, Any] = field(default_factory=dict)
    messages: tuple[Mapping[str, Any], ...] = ()


def temperature_problems(temperature: float) -> list[str]:
    """What has no meaning about a temperature; none if it is right."""
    if not math.isfinite(temperature) or temperature < 0:
        return [f"temperature {temperature} is not a finite number >= 0 (0 is greedy)"]
    if 0 < temperature < LEAST_TEMPERATURE:
        return [f"temperature {temperature} is below {LEAST_TEMPERATURE}: logits would overflow; 0 is greedy"]
    return []


@dataclass(frozen=True)
class SamplingParams:
    """How a completion is drawn.

    The distribution is made in this order: logits; penalties; `logit_bias`; only `allowed_ids`, no `forbidden_ids`,
    before `min_new_tokens` no stop id; temperature; the `top_k` likeliest; of these the fewest likeliest that together
    have at least `top_p`; of these those at least `min_p` times as likely as the likeliest. Equally likely ids: the
    lowest first.

    temperature: >= LEAST_TEMPERATURE samples from softmax(logits / temperature); 0 is greedy (log-probability then at
    temperature 1). max_new_tokens: completion tokens at most, the stop token included; 0, with prompt_logprobs: the
    prompt is scored and nothing drawn. min_new_tokens: completion tokens at least.
    stop_ids: sampling one of these ends the completion with reason "stop"; the id is kept as the last token.
    stop_strings: so does a token that completes one of these texts, wherever tokens begin and end; all tokens are kept.
    top_k: 0 keeps all; top_p: 1 keeps all; min_p: 0 keeps all. repetition_penalty: > 0; logits of ids seen (prompt and
    completion) are divided by it if positive, else multiplied (arXiv:1909.05858). presence_penalty, frequency_penalty:
    taken off the logits of ids in the completion, once, and per occurrence. logit_bias: (id, what is added to its
    logit). top_logprobs: so many of the likeliest ids are recorded with each token. prompt_logprobs: the prompt's ids
    are scored too (a prompt then is computed anew, not taken from the prefix cache).
    """

    temperature: float
    max_new_tokens: int
    stop_ids: frozenset[int]
    stop_strings: tuple[str, ...] = ()
    min_new_tokens: int = 0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_ids: frozenset[int] | None = None
    forbidden_ids: frozenset[int] = frozenset()
    top_logprobs: int = 0
    prompt_logprobs: bool = False

    @property
    def truncates(self) -> bool:
        """Whether ids are cut off, so that the log-mass of those kept is recorded."""
        cut = self.top_k > 0 or self.top_p < 1 or self.min_p > 0
        return cut or self.allowed_ids is not None or bool(self.forbidden_ids) or self.min_new_tokens > 0

    @property
    def reshapes(self) -> bool:
        """Whether the odds between ids are changed: then no trainer can use the record, and none does."""
        penalties = self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0
        return penalties or bool(self.logit_bias)

    @property
    def plain(self) -> bool:
        """Whether the draw is from the whole softmax and nothing more is asked for."""
        return not (self.truncates or self.reshapes or self.top_logprobs)

    def problems(self, vocab_size: int) -> list[str]:
        """What has no meaning, as in "top_p 0 is not > 0 and <= 1"; none if all is right."""

        def within(name: str, low: float, high: float, words: str, open_low: bool = False) -> list[str]:
            value = getattr(self, name)
            right = math.isfinite(value) and low <= value <= high and not (open_low and value == low)
            return [] if right else [f"{name} {value} is not {words}"]

        found = temperature_problems(self.temperature)
        found += within("top_k", 0, math.inf, ">= 0 (0 keeps all)")
        found += within("top_p", 0, 1, "> 0 and <= 1 (1 keeps all)", open_low=True)
        found += within("min_p", 0, 1, ">= 0 and <= 1 (0 keeps all)")
        found += within("repetition_penalty", 0, math.inf, "a finite number > 0 (1 changes nothing)", open_low=True)
        for name in ("presence_penalty", "frequency_penalty"):
            found += within(name, -math.inf, math.inf, "a finite number (0 changes nothing)")
        found += within("min_new_tokens", 0, self.max_new_tokens, f"in 0..max_new_tokens = {self.max_new_tokens}")
        found += within("top_logprobs", 0, vocab_size, f"in 0..{vocab_size}, the size of the vocabulary")
        named = {*self.forbidden_ids, *(self.allowed_ids or ()), *(i for i, _ in self.logit_bias)}
        found += [
            f"token id {i} is not in the vocabulary of {vocab_size}" for i in sorted(named) if not 0 <= i < vocab_size
        ]
        if len({i for i, _ in self.logit_bias}) < len(self.logit_bias):
            found.append("logit_bias names an id twice")
        if not all(math.isfinite(b) for _, b in self.logit_bias):
            found.append("logit_bias is not finite everywhere; use forbidden_ids to rule an id out")
        if "" in self.stop_strings:
            found.append("stop_strings holds an empty text, which ends nothing")
        ruled_out = self.forbidden_ids | (self.stop_ids if self.min_new_tokens else frozenset())
        every = self.allowed_ids if self.allowed_ids is not None else range(vocab_size)
        if len(ruled_out) >= len(every) and all(i in ruled_out for i in every):
            found.append("allowed_ids, forbidden_ids and min_new_tokens leave no id to draw")
        return found


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
class Details:
    """What a request may ask for besides its completion; for people, kept in memory only.

    prompt_logprobs [P] float32: of the prompt's ids, at the request's temperature; the first, which nothing predicts,
    is NaN. top_ids [T, n] int32, top_logprobs [T, n] float32: the likeliest ids under the whole softmax, likeliest
    first.
    """

    prompt_logprobs: np.ndarray | None
    top_ids: np.ndarray | None
    top_logprobs: np.ndarray | None


@dataclass(frozen=True)
class Trajectory:
    """One prompt, one completion, one identity. T = number of sampled tokens (>= 1 unless aborted).

    A completion of several turns is one sequence, [C] tokens, of which `sampled` [C] bool says which T the policy drew;
    the others are what its environment said. None: all of it was sampled, C = T. What the others are has no place in
    any array of tokens' numbers: only sampled tokens have a log-probability, a version, a value, an advantage.

    Filled by the engine:
      prompt_ids [P] int32, completion_ids [C] int32 (a final stop token included), logprobs [T] float32 (nats, under
      the whole softmax at the temperature: what a trainer computes), kept_logmass [T] float32, or None where the whole
      softmax was sampled from: logprobs less the log-probability under the distribution that was; where ids were only
      cut off (top-k, top-p, min-p, ids ruled out) the log of the mass that was kept, versions [T] int32 (policy number
      that computed each log-probability), finish_reason, seed (of this request), group_id (its prompt's id), index
      (0..samples-1 within the group), fingerprint, generate_s (seconds from submission to finish). details: what else
      was asked for.
    Filled by the environment: text (completion decoded, special tokens skipped), rewards (by reward name) and
      reward (their weighted sum); `failed` says why there is no reward, then reward is NaN. sampled; turn_rewards [K]
      float64, where there are turns: what each earned, K runs of sampled tokens, parts of `reward`.
    Filled by scoring: reference_logprobs [T] float32 or None; values [T] float32, the critic's of the state before each
      token is drawn (the value that predicts token t has seen the prompt and tokens 0..t-1), or None.
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
    kept_logmass: np.ndarray | None = None
    details: Details | None = None
    values: np.ndarray | None = None
    sampled: np.ndarray | None = None
    turn_rewards: np.ndarray | None = None

    @property
    def num_sampled(self) -> int:
        """T: tokens that the policy drew."""
        return len(self.logprobs)

    @property
    def sampled_ids(self) -> np.ndarray:
        """[T] int32, the ids that the policy drew."""
        return self.completion_ids if self.sampled is None else self.completion_ids[self.sampled]

    @property
    def turn_ends(self) -> np.ndarray:
        """[K] of each turn's last token, its number among the sampled ones. A turn is a run of them."""
        n = self.num_sampled
        if self.sampled is None:
            return np.array([n - 1] if n else [], np.int64)
        last = self.sampled & ~np.append(self.sampled[1:], False)
        return np.flatnonzero(last[self.sampled])

    @property
    def earned(self) -> np.ndarray:
        """[T] float64 of `reward`, what the environment gave for each token: a turn's reward, for its last one."""
        found = np.zeros(self.num_sampled)
        if self.turn_rewards is not None:
            found[self.turn_ends] = self.turn_rewards
        return found

    @property
    def sampled_logprobs(self) -> np.ndarray:
        """[T] float32 log-probabilities under the distribution that the tokens were drawn from."""
        return self.logprobs if self.kept_logmass is None else self.logprobs - self.kept_logmass

    def __post_init__(self) -> None:
        n = len(self.completion_ids)
        if self.sampled is not None:
            assert self.sampled.dtype == np.bool_ and self.sampled.shape == (n,), (self.sampled.shape, n)
            assert not n or self.sampled[-1], "nothing is drawn after the last observation, which so has no place"
            n = int(self.sampled.sum())
        assert len(self.logprobs) == n == len(self.versions), (n, len(self.logprobs), len(self.versions))
        assert self.turn_rewards is None or len(self.turn_rewards) == len(self.turn_ends)
        assert self.kept_logmass is None or len(self.kept_logmass) == n
        assert self.values is None or (len(self.values) == n and self.values.dtype == np.float32)
        assert self.logprobs.dtype == np.float32 and self.completion_ids.dtype == np.int32
