"""The table of checks, and the audit that asks them."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from lockstep.audit import record, runs, syncs, tokens, training
from lockstep.audit.check import Check, Finding, Report, failed, not_applicable
from lockstep.audit.runs import StoredRun
from lockstep.audit.subject import Subject, in_small
from lockstep.config import Config
from lockstep.loading import describe_exception
from lockstep.train.assembly import build

OfRecipe = Callable[[Subject], Finding]

# In this order: the loop's steps come first, because its versions start at 0.
RECIPE_CHECKS: dict[str, OfRecipe] = {
    "lr-0-soak": runs.lr_0_soak,
    "version-tags": record.version_tags,
    "metrics": runs.metrics,
    "receipts": syncs.receipts,
    "snapshot": syncs.snapshot,
    "checkpoint-round-trip": syncs.checkpoint_round_trip,
    "kl-at-step-0": training.kl_at_step_0,
    "dtypes": record.dtypes,
    "fingerprint": record.fingerprint,
    "tokenizer-identity": tokens.tokenizer_identity,
    "template-identity": tokens.template_identity,
    "eos-ids": tokens.eos_ids,
    "seeds": tokens.seeds,
    "identity-sync": syncs.identity_sync,
    "randomise-then-sync": syncs.randomise_then_sync,
    "skipped-sync": syncs.skipped_sync,
    "adapter-reaches-sampler": syncs.adapter_reaches_sampler,
    "record-equals-recompute": record.record_equals_recompute,
    "temperature": record.temperature,
    "truncation": record.truncation,
    "record-guard": record.record_guard,
    "masked-garbage": training.masked_garbage,
    "group-permutation": training.group_permutation,
    "ragged-groups": training.ragged_groups,
    "equal-rewards": training.equal_rewards,
    "split-invariance": training.split_invariance,
    "policy-gradient": training.policy_gradient,
    "kl-gradient": training.kl_gradient,
}
RUN_CHECKS: dict[str, Callable[[Subject, StoredRun], Finding]] = {
    "run-metrics": lambda subject, run: runs.run_metrics(run),
    "run-receipts": lambda subject, run: runs.run_receipts(run),
    "run-versions": lambda subject, run: runs.run_versions(run),
    "run-record": lambda subject, run: runs.run_record(run),
    "run-fingerprints": runs.run_fingerprints,
    "run-checkpoint": runs.run_checkpoint,
    "run-recompute": runs.run_recompute,
}
NAMES = (*RECIPE_CHECKS, *RUN_CHECKS)

Each = Callable[[Check], None]


@dataclass(frozen=True)
class Watch:
    """Who hears of an audit under way. say: what takes long. head: subject and sizes, before the first check. each:
    every check as it is answered."""

    say: Callable[[str], None] = lambda line: None
    head: Callable[[str], None] = lambda line: None
    each: Each = lambda check: None


def audit(config: Config, run: Path | None = None, watch: Watch | None = None) -> Report:
    """Ask every question about a recipe; about a run too, where its directory is given (config: its recipe).

    Builds the recipe's cluster with small batches, in this process; writes to a temporary folder only. Raises a
    LockstepError where the recipe's model, data or devices cannot be had: then there is nothing to audit.
    """
    watch = watch or Watch()
    started = time.perf_counter()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lockstep-audit-")))
        cluster = build(in_small(config, folder), watch.say)
        stack.callback(cluster.close)
        subject = Subject(cluster, folder, config)
        what = f"audit of {run if run is not None else f'recipe {config.run.name}'}: {subject.cluster.source}"
        watch.head(f"{what}\n{subject.sizes()}")
        checks = examine(subject, None if run is None else StoredRun(run, config), watch.each)
    return Report(what, subject.sizes(), checks, time.perf_counter() - started)


def examine(subject: Subject, run: StoredRun | None, each: Each) -> tuple[Check, ...]:
    """All checks, in order; each: told every one of them."""
    asked: list[tuple[str, Callable[[], Finding]]] = [
        (name, lambda check=check: check(subject))  # type: ignore[misc]
        for name, check in RECIPE_CHECKS.items()
    ]
    for name, check in RUN_CHECKS.items():
        if run is None:
            asked.append((name, lambda: not_applicable("a recipe was given, not a run")))
        else:
            asked.append((name, lambda check=check: check(subject, run)))  # type: ignore[misc]
    found = []
    for name, ask in asked:
        found.append(Check.of(name, _answer(ask)))
        each(found[-1])
    return tuple(found)


def _answer(ask: Callable[[], Finding]) -> Finding:
    try:
        return ask()
    except Exception as error:  # a part that breaks while it is asked is a finding too, and the others are still asked
        return failed(
            f"stopped by {describe_exception(error)}",
            "a part of the run broke while it was being asked",
            "read the message; `--traceback` of the command that the part belongs to shows more",
        )
