"""Sampled tokens and what was said between them: laid out, read, and in no loss."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep import store
from lockstep.algorithms import make_algorithm
from lockstep.algorithms.base import Samples
from lockstep.audit.definitions import by_token
from lockstep.config import AlgorithmConfig
from lockstep.train.batching import Weighed, make_micro_batches
from lockstep.types import Fingerprint, Prompt, Trajectory

FINGERPRINT = Fingerprint("t", "c", "d", "n")


def masks(trajectories: list[Trajectory]) -> list[np.ndarray]:
    """For each a mask with its last token drawn, some others too."""
    rng = np.random.default_rng(2)
    found = [rng.random(len(t.completion_ids)) < 0.5 for t in trajectories]
    for mask in found:
        mask[-1:] = True
    return found


def spoken(t: Trajectory, mask: np.ndarray) -> Trajectory:
    """The same tokens, where the policy drew only some."""
    reference = None if t.reference_logprobs is None else t.reference_logprobs[mask]
    return replace(t, sampled=mask, logprobs=t.logprobs[mask], versions=t.versions[mask], reference_logprobs=reference)


@pytest.fixture(scope="module")
def pairs(record: list[Trajectory]) -> tuple[list[Trajectory], list[Trajectory]]:
    """(each as if all were drawn, each with some said by an environment)."""
    return record, [spoken(t, m) for t, m in zip(record, masks(record), strict=True)]


def test_all_drawn_is_one_turn_to_the_last_bit(plain: Any, record: list[Trajectory], advantages: np.ndarray) -> None:
    whole = [replace(t, sampled=np.ones(len(t.completion_ids), bool)) for t in record]
    for a, b in zip(plain.micro_batches(record, advantages), plain.micro_batches(whole, advantages), strict=True):
        assert a.spans == b.spans and a.num_rows == b.num_rows
        for x, y in zip((*a.rows, a.at, a.target, *a.tokens), (*b.rows, b.at, b.target, *b.tokens), strict=True):
            assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def test_drawn_tokens_are_predicted_from_all_before_them(plain: Any, pairs: Any) -> None:
    """Bit for bit what the same sequence gives there when every token is predicted."""
    whole, some = pairs
    again = plain.recorded(some)
    assert [t.logprobs.tobytes() for t in again] == [t.logprobs.tobytes() for t in some]
    assert any(len(s.logprobs) < len(w.logprobs) for w, s in zip(whole, some, strict=True))


def test_what_was_said_is_read_by_what_comes_after_and_by_nothing_before(plain: Any) -> None:
    prompt, ids = np.arange(9, dtype=np.int32), np.arange(20, 27, dtype=np.int32)
    mask = np.array([True, True, False, False, True, False, True])
    n = int(mask.sum())

    def made(said: int) -> Trajectory:
        other = np.where(np.arange(7) == 3, np.int32(said), ids).astype(np.int32)
        zeros = np.zeros(n, np.float32)
        return Trajectory(prompt, other, zeros, np.zeros(n, np.int32), "stop", 0, "g", 0, FINGERPRINT, sampled=mask)

    (a,), (b,) = plain.recorded([made(23)]), plain.recorded([made(40)])
    assert a.logprobs[:2].tobytes() == b.logprobs[:2].tobytes() and (a.logprobs[2:] != b.logprobs[2:]).all()
    (batch,) = plain.micro_batches([a], np.ones(1))
    assert set(batch.target[batch.tokens.mask]) == set(ids[mask])


def test_the_gradient_is_that_of_the_drawn_tokens_alone(plain: Any, pairs: Any, advantages: np.ndarray) -> None:
    """Against the same batch with every token in the loss and an advantage of 0 for what was said."""
    whole, some = pairs
    algorithm = make_algorithm(AlgorithmConfig(aggregate="token_mean"), 8)
    geometry = plain.geometry()
    result, found = plain.gradients(plain.micro_batches(some, advantages), some, algorithm)
    zeroed = [Weighed(np.where(s.sampled, a, 0.0)) for s, a in zip(some, advantages, strict=True)]
    batches = make_micro_batches(whole, zeroed, 1.3, geometry)
    _, wanted = plain.gradients(batches, whole, algorithm)
    drawn, total = (sum(t.num_sampled for t in ts) for ts in (some, whole))
    assert result.metrics["tokens/trained"] == drawn < total
    for path, g in wanted.items():
        np.testing.assert_allclose(found[path] * drawn, g * total, rtol=2e-4, atol=2e-5, err_msg=path)


# ---------------------------------------------------------------- rewards of turns


def test_a_turns_reward_is_earned_by_its_last_token() -> None:
    mask = np.array([False, True, True, False, True, False, False, True, True])
    n = int(mask.sum())
    t = Trajectory(
        np.zeros(2, np.int32), np.arange(9, dtype=np.int32), np.zeros(n, np.float32), np.zeros(n, np.int32), "stop",
        0, "g", 0, FINGERPRINT, sampled=mask, turn_rewards=np.array([0.5, -1.0, 2.0]), reward=2.5,
    )  # fmt: skip
    assert t.turn_ends.tolist() == [1, 2, 4]
    assert t.earned.tolist() == [0, 0.5, -1.0, 0, 2.0]
    (got,) = Samples.of([2.5], ["g"], lengths=np.array([n]), earned=[t.earned]).token_rewards()
    assert got.tolist() == [0, 0.5, -1.0, 0, 3.0]  # what is not a turn's is the last token's


def test_algorithms_by_token_see_when_a_reward_came() -> None:
    """REINFORCE++ with and without a group baseline, by its definition."""
    rng = np.random.default_rng(0)
    earned = [rng.normal(size=n) * (rng.random(n) < 0.4) for n in (4, 6, 3, 5)]
    groups, penalties = ["a", "a", "b", "b"], [np.zeros(len(e)) for e in earned]
    rewards = [float(e.sum()) + 0.25 * i for i, e in enumerate(earned)]
    lengths = np.array([len(e) for e in earned])
    for baseline in (False, True):
        settings = AlgorithmConfig(name="reinforce_pp", group_baseline=baseline)
        samples = Samples.of(rewards, groups, lengths=lengths, earned=earned)
        found = make_algorithm(settings, 8).advantages(samples).per_token
        wanted = by_token(settings, rewards, groups, penalties, None, earned)
        for a, b in zip(found, wanted, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)
        late = by_token(settings, rewards, groups, penalties, None)
        assert not all(np.allclose(a, b) for a, b in zip(found, late, strict=True))


def test_what_was_drawn_and_earned_is_stored(pairs: Any, tmp_path: Path) -> None:
    trajectories = [replace(t, turn_rewards=np.arange(len(t.turn_ends)) / 3) for t in pairs[1]] + pairs[0][:1]
    prompts = [Prompt(group, "", (1,)) for group in {t.group_id for t in trajectories}]
    store.write_step(tmp_path, 1, trajectories, {}, prompts=prompts)
    for a, b in zip(store.read_step(tmp_path, 1).trajectories, trajectories, strict=True):
        for name in ("sampled", "turn_rewards", "completion_ids", "logprobs"):
            x, y = getattr(a, name), getattr(b, name)
            assert (x is None) == (y is None) and (x is None or (x.dtype == y.dtype and x.tobytes() == y.tobytes()))
