"""The training loop: the page to read first.

    rollout -> score -> batch -> step -> sync -> report

Three counters are kept apart: `step` (updates done), `version` (which weights the sampler serves), `syncs` (how often
weights moved). The weights that sampled a batch stay available as a snapshot until the batch is consumed.

Step k trains version k - 1 on a batch that no version before k - 1 - `rollout.staleness` sampled. That is said when the
batch is asked for, and looked at again when it is consumed. So many batches are asked for ahead; with none, the sampler
and the trainer take turns.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from rich.console import Console
from rich.text import Text

from lockstep import checkpoint, metrics, store
from lockstep.config import Config
from lockstep.errors import CheckpointError, LockstepError, NumericsError, SyncError
from lockstep.progress import Progress
from lockstep.report import write_report
from lockstep.rollout.pool_size import describe_pool
from lockstep.sync.receipt import Counters, SyncReceipt
from lockstep.sync.select import listed
from lockstep.sync.snapshot import Snapshot
from lockstep.text import sanitize
from lockstep.train import rundir
from lockstep.train.assembly import Cluster, build
from lockstep.train.clock import Clock
from lockstep.train.collect import Collector, Experience, rounds_busy
from lockstep.train.record import (
    engine_numbers,
    mean_kept_mass,
    mean_kl,
    rollout_numbers,
    sample_text,
    stored_rows,
)
from lockstep.train.rollouts import Batches
from lockstep.train.rundir import ResumePoint
from lockstep.train.scoring import under, under_snapshot
from lockstep.train.stale import Snapshots, staleness, versions_kept
from lockstep.train.trained_model import not_finite
from lockstep.train.trainer import StepResult
from lockstep.train.updates import Work, update
from lockstep.train.watchdog import Watchdog
from lockstep.types import Trajectory


def run(config: Config, *, resume: Path | None = None, console: Console | None = None) -> Path:
    """Train as the recipe says; returns the run directory.

    resume: a run directory to continue from its newest checkpoint, bit for bit. console: where progress is shown.
    Raises a LockstepError for anything the user can mend. A recipe that does not work leaves no directory behind; what
    a run wrote before it stopped stays readable and resumable.
    """
    rundir.keep_compiled_programs()
    console = console or Console()
    with ExitStack() as stack:
        point = None
        if resume is not None:
            stack.enter_context(rundir.held(resume))
            point = rundir.resume_point(resume, config)
        with console.status(Text(f"loading {sanitize(config.model.name)}")):
            cluster = build(config, say=lambda line: console.print(Text(sanitize(line))))
        stack.callback(cluster.close)
        run_dir = resume
        if run_dir is None:
            run_dir = rundir.claim_run_dir(config.run)
            config = cluster.config = config.model_copy(update={"run": rundir.named(config.run, run_dir)})
            stack.enter_context(rundir.held(run_dir))
        progress = stack.enter_context(Progress(config, run_dir, console, history=point.history if point else ()))
        loop = stack.enter_context(Loop(cluster, run_dir, progress))
        loop.start(point)
        while loop.counters.step < config.run.steps:
            loop.step()
        report = write_report(run_dir)
        progress.close()
        progress.event(f"report: {report}")
    return run_dir


class Loop:
    """One run's state between steps. `step()` is one turn of the picture above."""

    def __init__(self, cluster: Cluster, run_dir: Path, progress: Progress) -> None:
        self.config, self.cluster, self.run_dir, self.progress = cluster.config, cluster, run_dir, progress
        self.counters = Counters()
        self.cursor = 0
        rollout = self.config.rollout
        self.snapshots = Snapshots(versions_kept(rollout))
        self.batches = Batches(
            cluster.episodes or cluster.rollouts,
            cluster.sampling,
            seed=self.config.run.seed,
            samples=rollout.samples,
            together=nullcontext if cluster.local is None else cluster.local.worker.together,
        )
        self.watchdog = Watchdog(lambda line: progress.event(line, warning=True), rollout.patience_s)
        self.collector = Collector(cluster, self.batches, progress, self.watchdog, run_dir)
        self._first_version = 0  # that this process published; what it published before a resume is not kept
        self._begun = time.perf_counter()
        # Taken now: what a task says about itself may come to include what it met on the way.
        self._data = cluster.task.describe()
        self._ended: float | None = None
        self._flat_steps = 0
        self._warm_up: dict[str, float] = {}  # for the record of the step that follows it
        self._logs = ExitStack()

    def start(self, point: ResumePoint | None = None) -> None:
        """Publish the weights to begin with: fresh ones as version 0, or a checkpoint's under the version it had."""
        if point is not None:
            self._restore(point)
            rundir.cut_back(self.run_dir, point.step)
        rundir.write_head(self.run_dir, self.config, self.cluster)
        self.cluster.reward.keep_verdicts(self.run_dir)
        self._metrics = self._logs.enter_context(metrics.StepLog(self.run_dir / "metrics.jsonl"))
        self._receipts = self._logs.enter_context(metrics.StepLog(self.run_dir / "receipts.jsonl", once_per_step=False))
        self._timeline = self._logs.enter_context(metrics.StepLog(self.run_dir / "timeline.jsonl"))
        if point is None:
            self._log_receipt(self._publish(0))
        self.progress.event(self._data)
        self._first_version = self.counters.version
        if self.cluster.local is None:
            self.progress.event(f"completions are sampled by {self.config.rollout.url}")
            return
        engine, page = self.cluster.engine, self.config.rollout.page_size
        held = engine.kv_bytes_per_device()
        self.progress.event(describe_pool(engine.num_pages, page, engine.max_positions, held))
        if self.config.rollout.warm_up:
            made = self.cluster.local.worker.call(lambda engine: engine.warm_up(self.cluster.sampling))
            self._warm_up = {"warmup/seconds": made.seconds, "warmup/programs": made.programs}
            self.progress.event(str(made))
        self._engine_stats = replace(engine.stats)

    def _restore(self, point: ResumePoint) -> None:
        """Weights, optimizer and counters of a checkpoint, and its policy put back into the sampler."""
        meta = point.meta
        warning = rundir.require_same_world(self.run_dir, point, self.cluster, self._data)
        arrays, _ = checkpoint.restore(self.run_dir, point.step, rundir.state_of(self.cluster))
        rundir.put_state(self.cluster, arrays)
        policy = self._publish(meta["version"]).policy
        # Every array is what was saved and the model is the run's, so the number in the checkpoint was changed.
        if policy.digest != meta["digest"]:
            raise CheckpointError(
                f"checkpoint {point.step} of {self.run_dir} says that policy version {meta['version']} has digest "
                f"{meta['digest']}, its arrays have {policy.digest}; its checkpoint.json is damaged: restore it from a "
                "copy or resume an earlier checkpoint"
            )
        self.cursor = meta["cursor"]
        # Putting the same version back after a restart is not another sync of the run.
        self.counters = Counters(meta["step"], meta["version"], meta["syncs"])
        if warning is not None:
            self.progress.event(warning, warning=True)
        self.progress.event(f"resumed at step {meta['step']}, policy version {meta['version']}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        """Cancel what is under way and close the logs. After an error, say in `log.txt` what stopped the run, and how
        to go on."""
        with nullcontext() if value is None else suppress(LockstepError):  # what stopped the run is said, not this
            self.batches.close()
        self._logs.close()
        if value is None:
            return
        newest = checkpoint.latest(self.run_dir)
        resume = f"lockstep run --resume {self.run_dir} goes on from step {newest}" if newest else "no checkpoint yet"
        cause = f"{type(value).__name__}: {value}".removesuffix(": ")  # an interrupt has no message
        # What stopped the run may be what keeps this line from being written (a full disk): the first error counts.
        with suppress(OSError):
            self.progress.event(f"stopped ({resume}) by {cause}", warning=True)

    # -- the step ----------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """One turn of the picture: afterwards its record is on disk, and its checkpoint where one is due."""
        # From the end of the last record: a checkpoint written in between shows as waiting, not as nothing.
        clock = Clock(self.progress, self._ended or time.perf_counter(), self._begun)
        number = self.counters.step + 1
        found = self.collector.collect(number, self.counters.version, self.cursor, self._first_version, clock)
        clock.enter("train")
        stale = self.snapshots.recomputed(found.batch, self.counters.version, self._logprobs_under)
        cluster = self.cluster
        work = Work(
            number,
            found.batch,
            found.advantages,
            lambda batch: under(cluster, cluster.trainer.params, batch),
            stale,
            found.trunks,
            found.returns,
            found.silent,
        )
        result = update(self.config, cluster.trainer, cluster.critic, cluster.geometry, work)
        self._require_finite(result)
        self._move_reference(number)
        self.counters = self.counters.stepped()
        behind = staleness(found.batch, self.counters.version)
        clock.enter("sync")
        overlaps = self.batches.open > 0
        receipt = self._publish(self.counters.version + 1)
        clock.enter(None)
        if overlaps:
            clock.waited(receipt.seconds.get("flip", 0.0))
        self.cursor += len(found.prompts)
        record = self._record(number, found, result) | behind | found.counts
        self._warn_flat(record, found)
        self._store(number, found, result)
        self._log_receipt(receipt)
        busy = rounds_busy(self.batches, found.asked)
        clock.generated(busy)
        times, line = clock.record()
        if number in busy:
            first, last = busy[number]
            times["time/rollout_s"] = last - first
        record |= times | self._warm_up
        self._warm_up = {}
        self._ended = time.perf_counter()
        # The metrics line first: a checkpoint must never be newer than the record of the step it was taken after.
        self._timeline.write({"step": number, **line})
        self._metrics.write(record)
        every = self.config.run.checkpoint_every
        if (every and number % every == 0) or number == self.config.run.steps:
            rundir.save_checkpoint(self.run_dir, self.config, self.cluster, self.counters, self.cursor, self._data)
        self.progress.step(record, sample_text(found.prompts, found.everything))

    def _require_finite(self, result: StepResult) -> None:
        """Wait for the update. Weights that it destroyed are neither published nor saved."""
        if broken := not_finite(self.cluster.trainer.trainable):
            raise NumericsError(
                f"the update made {listed(broken)} NaN or infinite (gradient norm {result.metrics['grad_norm']:.3g}, "
                f"learning rate {result.metrics['lr']:.3g}); nothing was published. Use a lower optim.lr or "
                "optim.max_grad_norm"
            )

    def _move_reference(self, number: int) -> None:
        settings, reference = self.config.algorithm, self.cluster.reference
        if reference is not None and settings.reference_every and number % settings.reference_every == 0:
            reference.follow(self.cluster.trainer.trainable, settings.reference_mix)

    def _publish(self, version: int) -> SyncReceipt:
        """New weights to the sampler: staged, verified where they landed, then served. The snapshot follows them."""
        cluster = self.cluster
        if cluster.remote is not None:
            for name in cluster.remote.take_back(cluster.sync):
                self.progress.event(f"replica {name} is there again: it gets version {version}")
        with self.watchdog.watching(
            lambda: (
                f"version {version} is not served yet: {self.batches.open} groups of later steps are under way; "
                f"{self.batches.service_says()}"
            )
        ):
            receipt = cluster.sync.push(version, cluster.trainer.trainable)
        served = cluster.rollouts.status().published
        if served is None or served.number < version:
            raise SyncError(
                f"version {version} was published, but the rollout service serves {served or 'nothing'}: the "
                "weights went somewhere else than to the replicas that sample; check the sync's routes"
            )
        for name, why in receipt.evicted.items():
            self.progress.event(f"version {version}: replica {name} was dropped: {why}", warning=True)
        self.counters = self.counters.published(receipt)
        self.snapshots.keep(cluster.trainer.trainable, receipt.policy)
        return receipt

    @property
    def snapshot(self) -> Snapshot | None:
        """Of the version that is served."""
        return self.snapshots.newest

    def old_policy_logprobs(self, batch: Sequence[Trajectory]) -> list[np.ndarray | None]:
        """Log-probabilities of a batch under the newest snapshot: the weights that are served, whatever was trained
        since."""
        assert self.snapshot is not None, "nothing has been published yet"
        return self._logprobs_under(self.snapshot, batch)

    def _logprobs_under(self, snapshot: Snapshot, batch: Sequence[Trajectory]) -> list[np.ndarray | None]:
        return under_snapshot(self.cluster, snapshot, batch)

    # -- the record --------------------------------------------------------------------------------------------------

    def _record(self, number: int, found: Experience, result: StepResult) -> dict[str, Any]:
        record: dict[str, Any] = {
            "step": number,
            "policy_version": self.counters.version - 1,
            "syncs": self.counters.syncs,
            "groups/total": found.groups.groups,
            "groups/zero_variance": found.groups.zero_variance,
            "prompts/skipped": self.cluster.task.skipped,
            **rollout_numbers(found.everything),
            **mean_kept_mass(found.batch),
            **result.metrics,
        }
        if self.cluster.local is not None:
            before, self._engine_stats = self._engine_stats, replace(self.cluster.engine.stats)
            record |= engine_numbers(before, self._engine_stats)
        if self.cluster.reference is not None:
            name = self.config.algorithm.kl_estimator
            record[f"kl/{name}"] = mean_kl(name, result.logprobs, found.batch)
            if every := self.config.algorithm.reference_every:
                record["reference/step"] = (number - 1) // every * every
        return record

    def _warn_flat(self, record: Mapping[str, Any], found: Experience) -> None:
        """Say so when no group of the step has two different rewards, and nothing can be learned from it therefore."""
        if record["groups/zero_variance"] < record["groups/total"] or any(np.any(a) for a in found.advantages):
            return
        self._flat_steps += 1
        if self._flat_steps in (1, 10, 100, 1000):  # said, not repeated until it is worth it
            self.progress.event(
                f"step {record['step']}: in all {record['groups/total']} groups every sample has the same reward: "
                f"nothing to learn from ({self._flat_steps} such steps since the start). The tasks are too easy or too "
                "hard for the model, or rollout.samples is too low; groups/zero_variance in metrics.jsonl counts on",
                warning=True,
            )

    def _store(self, number: int, found: Experience, result: StepResult) -> None:
        if not self.config.train.save_trajectories:
            return
        rows, extra = stored_rows(found.everything, found.batch, found.advantages, result.logprobs)
        store.write_step(self.run_dir / "trajectories", number, rows, extra, prompts=found.prompts)

    def _log_receipt(self, receipt: SyncReceipt) -> None:
        # The run's count of syncs, which a resume carries on, not that of the process.
        count = {"step": self.counters.step, "syncs": self.counters.syncs}
        self._receipts.write({**json.loads(receipt.to_json()), **count})
