"""Checks of the loop's own steps and of a run directory: what was stored, against itself and against this machine.

A run directory is only read; a run that is still going may be audited.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np

from lockstep import checkpoint, store
from lockstep.audit.check import Finding, failed, not_applicable, passed
from lockstep.audit.diagnose import mismatch_words
from lockstep.audit.oracle import differences
from lockstep.audit.record import LEAST_ESS
from lockstep.audit.subject import QUANTISED_BOUND, Subject
from lockstep.audit.syncs import judge_receipts
from lockstep.config import Config
from lockstep.errors import CheckpointError
from lockstep.metrics import read_jsonl
from lockstep.store import StepRecord
from lockstep.sync.verify import leaf_digests, policy_digest
from lockstep.train.assembly import make_storage
from lockstep.train.trainer import ROUNDING, mismatch
from lockstep.types import Trajectory

STEPS = 40  # steps of a run whose trajectories are read, at most, evenly spread
SAMPLES = 16  # of a run's step that are recomputed


@dataclass
class StoredRun:
    """A run directory. Everything is read once."""

    path: Path
    config: Config

    @cached_property
    def records(self) -> dict[int, dict[str, Any]]:
        return {r["step"]: r for r in self._log("metrics")}

    @cached_property
    def receipts(self) -> tuple[dict[str, Any], ...]:
        return self._log("receipts")

    def _log(self, name: str) -> tuple[dict[str, Any], ...]:
        path = self.path / f"{name}.jsonl"
        return read_jsonl(path).records if path.is_file() else ()

    @cached_property
    def steps(self) -> list[StepRecord]:
        """Trajectories of at most STEPS steps that have metrics too, the first and the last among them."""
        have = [n for n in store.steps(self.path / "trajectories") if n in self.records]
        if len(have) > STEPS:
            have = [have[round(i * (len(have) - 1) / (STEPS - 1))] for i in range(STEPS)]
        return [store.read_step(self.path / "trajectories", n) for n in have]

    @property
    def none_stored(self) -> str:
        off = "" if self.config.train.save_trajectories else " (train.save_trajectories = false)"
        return f"{self.path} holds no trajectories{off}"


# ---------------------------------------------------------------- the audit's own steps


def lr_0_soak(subject: Subject) -> Finding:
    """The loop's first steps, at learning rate 0: no weight moves and no mismatch appears."""
    soak = subject.soak
    if soak.broke is not None and len(soak.records) < soak.still:
        return failed(
            f"the loop stopped in step {len(soak.records) + 1}: {soak.broke}",
            "what a run would meet in this step; if another check fails too, the same cause",
            "read the message; the other checks say more",
        )
    if soak.changed:
        return failed(
            f"{len(soak.changed)} leaves moved at learning rate 0: {', '.join(soak.changed[:3])}",
            "something besides the optimizer's step changes weights: decay that the rate does not scale, an average, a "
            "write into shared buffers",
            "scale every change by the learning rate, and never write in place",
        )
    if soak.broke is not None:
        return failed(
            f"the loop stopped in step {len(soak.records) + 1}, the first ones passed: {soak.broke}",
            "it breaks as soon as weights move: what is sampled with is not what was trained",
            "look at the checks of the sync",
        )
    off = [r["mismatch/max_abs"] for r in soak.records]
    if not max(off) <= subject.bound or (subject.exact and any(r["mismatch/unequal_tokens"] for r in soak.records)):
        return failed(
            f"max |d| per step {', '.join(f'{x:.3g}' for x in off)} nats ({soak.still} at rate 0)",
            "trainer and sampler disagree although nothing has moved"
            if max(off[: soak.still]) > subject.bound
            else "trainer and sampler disagree once weights move: a sync is missing or late",
            "see record-equals-recompute, which names the likely cause",
        )
    if soak.stayed:
        return failed(
            f"{len(soak.records) - soak.still} steps at a learning rate of 1e-3 did not change a single weight",
            "the gradient is zero, or the optimizer does not use it",
            "see policy-gradient, and which leaves train",
        )
    tokens = sum(int(r["tokens/trained"]) for r in soak.records)
    return passed(
        f"{soak.still} steps at rate 0 moved no weight, {len(soak.records) - soak.still} more moved them; mismatch "
        f"max |d| {max(off):.3g} over {tokens} tokens of all {len(soak.records)}"
    )


def metrics(subject: Subject) -> Finding:
    """Every number that the loop logged, again from its trajectories."""
    soak = subject.soak
    if not soak.steps:
        return not_applicable(f"no step finished: see lr-0-soak ({soak.broke})")
    return _judge_metrics(subject.config, soak.steps, {r["step"]: r for r in soak.records})


def _judge_metrics(config: Config, steps: Sequence[StepRecord], records: Mapping[int, Mapping[str, Any]]) -> Finding:
    wrong = [
        f"step {step.step}: {difference}"
        for step in steps
        for difference in differences(config, step, records[step.step])
    ]
    if wrong:
        return failed(
            f"{len(wrong)} numbers of {len(steps)} steps do not follow from their trajectories: {'; '.join(wrong[:3])}",
            "the number is made from other samples, other groups or another definition than it says",
            "docs/run-directory.md defines every metric; an advantage that is off means wrong groups",
        )
    count = sum(len(records[step.step]) for step in steps)
    return passed(f"{len(steps)} steps, {count} logged numbers: what trajectories decide follows from them")


# ---------------------------------------------------------------- a run directory


def run_metrics(run: StoredRun) -> Finding:
    """As `metrics`, of the run's steps."""
    if not run.steps:
        return not_applicable(run.none_stored)
    return _judge_metrics(run.config, run.steps, run.records)


def run_receipts(run: StoredRun) -> Finding:
    """Receipts among themselves, and against the steps' policy versions."""
    if not run.receipts:
        return not_applicable(f"{run.path} holds no receipts")
    by_step = {r["step"]: r["version"] for r in run.receipts}
    late = [n for n, r in run.records.items() if n - 1 in by_step and r["policy_version"] != by_step[n - 1]]
    if late:
        n = late[0]
        return failed(
            f"step {n} sampled with version {run.records[n]['policy_version']}, published before it was "
            f"{by_step[n - 1]} ({len(late)} such steps)",
            "the version label runs ahead of the weights, or behind them",
            "look at the sync of that step in receipts.jsonl",
        )
    return judge_receipts(run.receipts)


def run_versions(run: StoredRun) -> Finding:
    """Every stored token carries the version that its step says."""
    if not run.steps:
        return not_applicable(run.none_stored)
    for step in run.steps:
        wanted = run.records[step.step]["policy_version"]
        for t in step.trajectories:
            if len(t.versions) and (t.versions != wanted).any():
                return failed(
                    f"step {step.step} is of version {wanted}; sample {t.index} of {t.group_id} holds tokens of "
                    f"versions {sorted({int(v) for v in t.versions})}",
                    "a sample was made under other weights than were trained, or the policy changed within it",
                    "drain or abort samples before a new version is served",
                )
    return passed(f"{sum(len(t.versions) for s in run.steps for t in s.trajectories)} tokens of {len(run.steps)} steps")


def run_record(run: StoredRun) -> Finding:
    """Recorded log-probabilities against those that the trainer stored."""
    exact = run.config.numerics.mode == "exact"
    pairs = [
        (t.logprobs, lp)
        for step in run.steps
        for t, lp in zip(step.trajectories, step.extra["trainer_logprobs"], strict=True)
        if lp is not None and len(lp)
    ]
    if not pairs:
        return not_applicable(run.none_stored)
    values = mismatch(np.concatenate([a for a, _ in pairs]), np.concatenate([b for _, b in pairs]))
    figure = mismatch_words(values, sum(len(a) for a, _ in pairs))
    if values["mismatch/unequal_tokens"] if exact else not values["mismatch/ess"] >= LEAST_ESS:
        return failed(
            figure,
            "the run trained on records that the trainer did not compute"
            if exact
            else "the policies have drifted apart",
            "see record-equals-recompute for the likely cause; correct for it, or go back to exact mode",
        )
    return passed(figure)


def run_fingerprints(subject: Subject, run: StoredRun) -> Finding:
    """One identity throughout the run, and what differs from it here."""
    if not run.steps:
        return not_applicable(run.none_stored)
    found = {t.fingerprint: step.step for step in reversed(run.steps) for t in step.trajectories}
    if len(found) > 1:
        (a, first), (b, other) = sorted(found.items(), key=lambda item: item[1])[:2]
        wrong = a.difference(b)
        if wrong != ["numerics"]:  # of which a resume elsewhere is told, and allowed
            return failed(
                f"samples of step {first} and of step {other} differ in {', '.join(wrong)}",
                "the tokenizer, the template or the decoding parameters changed during the run",
                "one run, one identity: start a new run for another",
            )
    (newest, step) = max(found.items(), key=lambda item: item[1])
    here = subject.full_fingerprint
    wrong = [name for name in here.difference(newest) if name != "numerics"]
    if wrong:
        return failed(
            f"step {step} was sampled under another {', '.join(wrong)} than this recipe and model make here",
            "the model's files (tokenizer, template, end-of-sequence ids) or the recipe have changed since",
            "put the files back, or compare them with the run's environment.json",
        )
    same = "numerics as here" if not here.difference(newest) else "numerics of another machine or version"
    return passed(f"one identity in {len(run.steps)} steps: tokenizer, template, decoding as here, {same}")


def run_checkpoint(subject: Subject, run: StoredRun) -> Finding:
    """The newest checkpoint: whole, and the weights that its version was published with."""
    step = checkpoint.latest(run.path)
    if step is None:
        return not_applicable(f"{run.path} has no checkpoint")
    try:
        tree, meta = _restored(subject, run, step)
    except CheckpointError as error:
        return failed(
            f"the checkpoint of step {step} cannot be used: {error}", "it is damaged, or of another recipe",
            "resume from an earlier one",
        )  # fmt: skip
    digest = policy_digest(leaf_digests(subject.cluster.trainer.frozen), leaf_digests(tree))
    published = {r["version"]: r["digest"] for r in run.receipts}.get(meta["version"], meta["digest"])
    if not digest == meta["digest"] == published:
        return failed(
            f"the weights of checkpoint {step} have digest {digest[:8]}, its version {meta['version']} was "
            f"published as {published[:8]}",
            "the model's files have changed since, or the checkpoint is not of the weights that were served",
            "compare the model with the run's; resume from an earlier checkpoint",
        )
    return passed(f"step {step}: {len(tree)} leaves, version {meta['version']} {digest[:8]}, as published")


def _restored(subject: Subject, run: StoredRun, step: int) -> tuple[dict[str, jax.Array], dict[str, Any]]:
    trainer = subject.built
    arrays, meta = checkpoint.restore(
        run.path, step, {"trainable": trainer.trainable, "optimizer": trainer.optimizer_state}, partial=True
    )
    return arrays["trainable"], meta


def _producing(subject: Subject, run: StoredRun) -> Iterator[tuple[str, Mapping[str, jax.Array], StepRecord]]:
    """(words, weights, the step that was sampled with them), newest first: checkpoints, then the initial weights."""
    folder = run.path / "trajectories"
    have = set(store.steps(folder))
    for step in reversed(checkpoint.steps(run.path)):
        if step + 1 in have:
            yield f"checkpoint {step}", _restored(subject, run, step)[0], store.read_step(folder, step + 1)
    if 1 in have:
        yield "the initial weights", subject.initial, store.read_step(folder, 1)


def run_recompute(subject: Subject, run: StoredRun) -> Finding:
    """Stored samples under the weights that made them, computed again here."""
    source = next(_producing(subject, run), None)
    if source is None:
        return not_applicable(f"{run.none_stored} of a step whose weights are kept")
    words, tree, step = source
    chosen: list[Trajectory] = [t for t in step.trajectories if len(t.completion_ids)][:SAMPLES]
    recomputed = subject.scored(chosen, tree)
    values = mismatch(np.concatenate([t.logprobs for t in chosen]), np.concatenate(recomputed))
    figure = f"step {step.step} under {words}: {mismatch_words(values, sum(map(len, recomputed)))}"
    here = "numerics" not in subject.full_fingerprint.difference(chosen[0].fingerprint)
    same_world = here and run.config.numerics.mode == "exact"
    right = values["mismatch/unequal_tokens"] == 0 if same_world else values["mismatch/max_abs"] <= _far(run)
    if not right or math.isnan(values["mismatch/max_abs"]):
        return failed(
            figure,
            "the samples were made with other weights than are kept, or are not the ones that were sampled",
            "compare the model's files with the run's, then the digests in receipts.jsonl",
        )
    return passed(figure + ("" if same_world else f" (bound {_far(run):g}: another machine, or fast mode)"))


def _far(run: StoredRun) -> float:
    if make_storage(run.config).quantised:
        return QUANTISED_BOUND
    return ROUNDING if run.config.model.dtype == "float32" else 0.25
