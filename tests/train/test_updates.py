"""A step's updates: what each of them is given, of every epoch and every mini-batch; and the weights that make up for
other sampling weights."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.audit import definitions
from lockstep.config import AlgorithmConfig, Config, parse_config
from lockstep.train.batching import Geometry
from lockstep.train.trainer import StepResult
from lockstep.train.updates import Work, correction, update
from lockstep.types import Fingerprint, Trajectory

KINDS = ("token_truncated", "token_masked", "sequence_truncated", "sequence_masked")
GEOMETRY = Geometry(1, 64, 0, 16)
RECIPE = """
run = { name = "r", dir = "runs", steps = 3, seed = 5 }
model = { name = "smollm2-135m" }
task = { kind = "reasoning_gym", dataset = "chain_sum" }
reward = { functions = [{ name = "first_line_exact" }] }
"""


# -- the correction --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "weights", "capped"),
    [
        # Probabilities of three tokens went up to 3 times, down to a quarter, up to 1.5 times; together 1.125.
        ("token_truncated", [2.0, 0.25, 1.5], [True, False, False]),
        ("token_masked", [0.0, 0.0, 1.5], [True, True, False]),
        ("sequence_truncated", [1.125] * 3, [False] * 3),
        ("sequence_masked", [1.125] * 3, [False] * 3),
    ],
)
def test_a_correction_in_numbers(kind: Any, weights: list[float], capped: list[bool]) -> None:
    settings = AlgorithmConfig(correction=kind, correction_cap=2.0)
    recorded = np.log(np.float32([0.1, 0.4, 0.2]))
    found, at_cap = correction(settings, recorded, np.log(np.float32([0.3, 0.1, 0.3])))
    np.testing.assert_allclose(found, weights, rtol=1e-5)
    assert at_cap.tolist() == capped


def test_a_whole_sequence_meets_its_cap() -> None:
    recorded = np.log(np.float32([0.1, 0.1]))
    for kind, up, down in (("sequence_truncated", 2.0, 0.25), ("sequence_masked", 0.0, 0.0)):
        settings = AlgorithmConfig(correction=kind, correction_cap=2.0)
        for now, wanted in (([0.2, 0.2], up), ([0.05, 0.05], down)):
            found, _ = correction(settings, recorded, np.log(np.float32(now)))
            np.testing.assert_allclose(found, [wanted] * 2, rtol=1e-5)


LOGP = st.floats(-6, 0, width=32)


@given(
    st.sampled_from(KINDS), st.lists(st.tuples(LOGP, LOGP), min_size=1, max_size=5), st.sampled_from([1.5, 2.0, 5.0])
)
def test_it_is_its_definition(kind: Any, pairs: list[tuple[float, float]], cap: float) -> None:
    settings = AlgorithmConfig(correction=kind, correction_cap=cap)
    recorded, now = (np.float32(x) for x in zip(*pairs, strict=True))
    # At the cap itself rounding decides.
    sums = np.append(now.astype(float) - recorded, (now.astype(float) - recorded).sum())
    if (np.abs(np.abs(sums) - np.log(cap)) < 1e-6).any():
        return
    found, at_cap = correction(settings, recorded, now)
    weights, capped = definitions.correction(settings, recorded.astype(float), now.astype(float))
    np.testing.assert_allclose(found, weights, rtol=1e-9)
    assert at_cap.tolist() == capped


# -- the updates -----------------------------------------------------------------------------------------------------


class Recorder:
    """A trainer that keeps what it is given; its weights move by 1 in every log-probability at each update."""

    def __init__(self) -> None:
        self.optimizer_state: dict[str, Any] = {}
        self.seen: list[dict[int, tuple[float, float, float, float]]] = []
        self.held: list[dict[int, Any]] = []
        self.numbers: list[int] = []

    def step(self, micro: Any, chosen: Any, number: int, trunks: Any, held: Any) -> StepResult:
        found: dict[int, tuple[float, float, float, float]] = {}
        for batch in micro:
            t = batch.tokens
            for i, start, stop in batch.spans:
                # One token each: its sample's number is in the record.
                assert stop - start == 1
                found[chosen[i].index] = tuple(float(x[start]) for x in (t.advantage, t.old_logp, t.weight, t.ref_logp))  # type: ignore[assignment]
        self.seen.append(found)
        self.held.append({chosen[place].index: lp for place, lp in held.items()})
        self.numbers.append(number)
        logprobs: list[np.ndarray | None] = [t.logprobs + np.float32(len(self.seen) - 1) for t in chosen]
        return StepResult({"loss": float(len(self.seen)), "lr": 0.1 * len(self.seen)}, logprobs)


def samples(count: int) -> list[Trajectory]:
    return [
        Trajectory(
            np.array([1, 2], np.int32), np.array([7], np.int32), np.array([-(1 + i) / 8], np.float32),
            np.zeros(1, np.int32), "stop", i, "g", i, Fingerprint("t", "t", "d", "n"),
            reference_logprobs=np.array([-2 - i], np.float32),
        )
        for i in range(count)
    ]  # fmt: skip


def config_of(*words: str) -> Config:
    return parse_config(RECIPE, overrides=list(words), folder=Path(), where="recipe")


def run(config: Config, batch: list[Trajectory], shift: float = 0.0) -> tuple[Recorder, StepResult]:
    """shift: by how much the trainer's log-probabilities differ from the record before the first update."""
    trainer = Recorder()
    advantages = [i - 2.5 for i in range(len(batch))]

    def recompute(asked: Any) -> list[np.ndarray]:
        assert not trainer.seen, "asked for after an update"
        return [t.logprobs + np.float32(shift) for t in asked]

    result = update(config, trainer, None, GEOMETRY, Work(2, batch, advantages, recompute, {}))  # type: ignore[arg-type]
    return trainer, result


@pytest.mark.parametrize("mini_batches", [1, 2, 4])
@pytest.mark.parametrize("epochs", [1, 3])
def test_every_sample_takes_part_once_an_epoch_with_its_own_advantage_and_record(
    epochs: int, mini_batches: int
) -> None:
    batch = samples(6)
    trainer, result = run(config_of(f"--train.epochs={epochs}", f"--train.mini_batches={mini_batches}"), batch)
    assert len(trainer.seen) == epochs * mini_batches == result.metrics["updates"]
    for epoch in range(epochs):
        parts = trainer.seen[epoch * mini_batches : (epoch + 1) * mini_batches]
        assert Counter(i for part in parts for i in part) == Counter(range(6))
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
        for part in parts:
            for i, seen in part.items():
                # The ratio of every update is to the record, whatever was updated before.
                assert seen == (i - 2.5, float(batch[i].logprobs[0]), 1.0, -2.0 - i)
    if mini_batches > 1 and epochs > 1:
        assert [set(p) for p in trainer.seen[:mini_batches]] != [
            set(p) for p in trainer.seen[mini_batches:][:mini_batches]
        ]
    assert trainer.numbers == [1] * len(trainer.seen), "it keeps no count of its own, so the step's number stands"
    if len(trainer.seen) > 1:
        assert result.metrics["lr"] == pytest.approx(0.1 * len(trainer.seen)), "the last one's"
        assert result.metrics["loss"] == pytest.approx((1 + len(trainer.seen)) / 2), "the mean"


def test_a_record_is_held_against_the_weights_before_the_first_update_once() -> None:
    batch = samples(6)
    trainer, result = run(config_of("--train.epochs=2", "--train.mini_batches=2"), batch)
    first, second, third, fourth = trainer.held
    assert first == {}, "what the update itself computes"
    assert {i: lp.tolist() for i, lp in second.items()} == {i: batch[i].logprobs.tolist() for i in trainer.seen[1]}
    assert set(third.values()) | set(fourth.values()) == {None}
    for t, lp in zip(batch, result.logprobs, strict=True):
        assert lp is not None and lp.tobytes() == t.logprobs.tobytes()
    assert result.metrics["mismatch/unequal_tokens"] == 0


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_correction_weighs_it_weighs_in_every_update(kind: str) -> None:
    batch, shift = samples(4), float(np.log(1.5))
    words = ["--train.epochs=2", "--train.mini_batches=2", f"--algorithm.correction={kind}", "--numerics.mode=fast"]
    trainer, result = run(config_of(*words), batch, shift)
    assert len(trainer.seen) == 4
    for part in trainer.seen:
        for i, (advantage, old, weight, _) in part.items():
            assert weight == pytest.approx(1.5, rel=1e-5)
            assert advantage == pytest.approx(1.5 * (i - 2.5), rel=1e-5)
            assert old == pytest.approx(float(batch[i].logprobs[0]) + shift, rel=1e-6), "the ratio is to the trainer's"
    assert result.metrics["correction/mean"] == pytest.approx(1.5, rel=1e-5)
    capped, _ = run(config_of(*words, "--algorithm.correction_cap=1.2"), batch, shift)
    expected = 1.2 if kind.endswith("truncated") else 0.0
    weights = [w for part in capped.seen for _, _, w, _ in part.values()]
    assert weights == pytest.approx([expected] * 8, rel=1e-5)
