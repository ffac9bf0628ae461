"""Checks of the weight sync: what is installed is what the trainer holds, whatever was there before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
import numpy as np

from lockstep import checkpoint
from lockstep.audit.check import Finding, failed, not_applicable, passed
from lockstep.audit.oracle import receipt_problems
from lockstep.audit.subject import Subject, Tree, gap, same_bits
from lockstep.sync.verify import leaf_digests
from lockstep.text import format_bytes
from lockstep.types import PolicyVersion, Trajectory


def _same_outputs(a: Sequence[Trajectory], b: Sequence[Trajectory]) -> bool:
    """Same tokens and same bits."""
    return same_bits([t.completion_ids for t in a], [t.completion_ids for t in b]) and same_bits(
        [t.logprobs for t in a], [t.logprobs for t in b]
    )


def _first_logprobs(made: Sequence[Trajectory]) -> list[np.ndarray]:
    """Log-probability of every sample's first token."""
    return [t.logprobs[:1] for t in made]


def digests_differ(subject: Subject, trainable: Tree) -> list[str]:
    """Leaves whose digest at the sampler is not the trainer's, after the cast that the recipe declares."""
    installed = subject.cluster.replica.installed
    cast = {path: leaf.astype(installed[path].dtype) for path, leaf in trainable.items() if path in installed}
    here, there = leaf_digests(cast), leaf_digests(installed)
    return sorted(path for path in trainable.keys() | there.keys() if here.get(path) != there.get(path))


def identity_sync(subject: Subject) -> Finding:
    """Weights that did not change, published again: the same greedy tokens, the same bits."""
    subject.publish(subject.moved)
    before = subject.greedy()
    receipt = subject.publish(subject.moved)
    after = subject.greedy()
    tokens = sum(len(t.logprobs) for t in before)
    if not _same_outputs(before, after):
        changed = sum(not _same_outputs([a], [b]) for a, b in zip(before, after, strict=True))
        return failed(
            f"{changed} of {len(before)} greedy samples changed over a sync that changed nothing",
            "the sync does not install what it is given: a buffer written in place, a transposed or chunked reload, or "
            "a cache that does not go with the version",
            "compare the leaves of two versions at the sampler; the digests name the first that differs",
        )
    way = "the same buffers" if receipt.same_buffers else f"{format_bytes(receipt.bytes_moved)} written"
    return passed(f"{tokens} greedy tokens alike bit for bit; {way}")


def randomise_then_sync(subject: Subject) -> Finding:
    """The sampler is filled with noise; the next sync, of unchanged weights, must bring the trainer's back."""
    subject.publish(subject.moved)
    wanted = subject.greedy()
    engine, last = subject.cluster.engine, subject.cluster.sync.published
    assert last is not None
    engine.install(PolicyVersion(last.number, "noise"), subject.policy(subject.perturbed(pure=True)))
    noise = subject.greedy()
    subject.publish(subject.moved)
    after = subject.greedy()
    if same_bits(_first_logprobs(wanted), _first_logprobs(noise)):
        return failed(
            "noise in every trained leaf did not change the sampler's outputs",
            "the sampler does not use the leaves that are installed",
            "check what the sampler's forward pass reads: names of leaves, adapters, cached copies",
        )
    if not _same_outputs(wanted, after):
        left = gap(_first_logprobs(wanted), _first_logprobs(after))
        return failed(
            f"after the sync the first tokens are {left:.3g} nats off what the same weights gave before",
            "part of what was there before survived the sync: a leaf that is skipped or believed to be there already, "
            "a copy derived from it, or the key-value cache",
            "sync every selected leaf every time; key caches by version",
        )
    wrong = digests_differ(subject, subject.moved)
    if wrong:
        return failed(
            f"{len(wrong)} leaves at the sampler are not the trainer's: {', '.join(wrong[:3])}",
            "the sync skips or garbles them",
            "map every leaf, and verify what was installed",
        )
    return passed(f"noise arrived, and left: outputs bit for bit, digests of {len(subject.moved)} leaves equal")


def skipped_sync(subject: Subject) -> Finding:
    """Weights that changed reach the sampler under a new version, in the loop and when pushed by hand."""
    soak = subject.soak
    digests = [receipt["digest"] for receipt in soak.receipts]
    moving = digests[soak.still :]
    if soak.broke is None and not soak.stayed and len(set(moving)) < len(moving):
        return failed(
            f"{len(moving) - 1} steps that changed weights published {len(set(moving)) - 1} new digests",
            "the loop takes changed weights for the same",
            "decide by comparing buffers, on every sync",
        )
    subject.publish(subject.moved)
    before, first = subject.greedy(), subject.cluster.engine.version
    other = subject.perturbed()
    receipt = subject.publish(other)
    after, second = subject.greedy(), subject.cluster.engine.version
    if second != receipt.policy:
        return failed(
            f"the receipt says {receipt.policy}, the sampler still serves {second}",
            "the sync reported success without running",
            "nothing may decide that weights are there already but a comparison of the buffers themselves",
        )
    if first is not None and second is not None and first.digest == second.digest:
        return failed(
            f"other weights were published with the same digest {first.digest[:8]}",
            "the digest is not made from the weights",
            "digest what is pushed, on every push",
        )
    if same_bits(_first_logprobs(before), _first_logprobs(after)):
        return failed(
            f"{receipt.policy} was published over {first}, and the sampler's outputs did not change",
            "the version moved without the weights, or the outputs come from a cache",
            "install first, then publish; key caches by version",
        )
    return passed(
        f"{len(set(digests))} digests over {len(digests)} versions of the loop; by hand, outputs moved by "
        f"{gap(_first_logprobs(before), _first_logprobs(after)):.3g} nats per first token"
    )


def adapter_reaches_sampler(subject: Subject) -> Finding:
    """A strong perturbation of the adapter changes what the sampler says, and the digests agree on both sides."""
    if subject.config.lora is None:
        return not_applicable("every weight trains; there is no adapter (randomise-then-sync covers the weights)")
    subject.publish({path: leaf * 0 if path.endswith(".lora_b") else leaf for path, leaf in subject.moved.items()})
    base = subject.greedy()
    subject.publish(subject.moved)
    adapted = subject.greedy()
    wrong = digests_differ(subject, subject.moved)
    if wrong:
        return failed(
            f"{len(wrong)} of {len(subject.moved)} leaves at the sampler are not the trainer's: {', '.join(wrong[:3])}",
            "part of the adapter is not sent, or not installed",
            "map every leaf of the adapter; an unmapped one must be an error",
        )
    moved = gap(_first_logprobs(base), _first_logprobs(adapted))
    if moved == 0:
        return failed(
            "with and without the adapter the sampler's outputs are the same",
            "the adapter arrives and is not used: the sampler runs the base model",
            "check that the sampler applies the adapter's leaves, with the scale alpha / rank",
        )
    return passed(f"outputs move by {moved:.3g} nats per first token; digests of {len(subject.moved)} leaves agree")


def snapshot(subject: Subject) -> Finding:
    """The snapshot is of the weights that produce the samples, and stays so when the trainer moves on."""
    soak = subject.soak
    kept, published = soak.loop.snapshot, soak.published
    if soak.broke is not None or kept is None or published is None:
        return not_applicable(f"the loop stopped before: see lr-0-soak ({soak.broke})")
    if kept.version != published:
        return failed(
            f"published is {published}, the snapshot is of {kept.version}",
            "the snapshot is taken by something else than the publication",
            "take it whenever a version is published, also where no weights move",
        )
    with subject.under(soak.trainable):  # the same weights again, under the next number
        made = subject.generate(samples=1)
    with subject.under(subject.moved):
        old = [lp for lp in soak.loop.old_policy_logprobs(made) if lp is not None]
    recorded = [t.logprobs for t in made]
    off = max((float(np.abs(a - b).max()) for a, b in zip(recorded, old, strict=True)), default=0.0)
    if off > subject.bound or (subject.exact and not same_bits(recorded, old)):
        return failed(
            f"the snapshot's log-probabilities are up to {off:.3g} nats off the record of {published}",
            "the snapshot is of other weights (taken once, or too late), or it shares buffers with live ones",
            "copy the weights when their version is published, and free the copy with its last batch",
        )
    return passed(
        f"{sum(map(len, old))} tokens of {published} recomputed from the snapshot ({format_bytes(kept.nbytes)} in "
        f"{kept.memory}) after the trainer moved on: max |d| {off:.3g}"
    )


def receipts(subject: Subject) -> Finding:
    """The loop's receipts: bytes as planned, versions one by one."""
    found = subject.soak.receipts
    if len(found) < 2:
        return not_applicable(f"the loop wrote {len(found)} receipts: see lr-0-soak ({subject.soak.broke})")
    return judge_receipts(found)


def judge_receipts(found: Sequence[Mapping[str, object]]) -> Finding:
    """Of any receipts."""
    wrong = receipt_problems(found)
    if wrong:
        return failed(
            f"{len(wrong)} of {len(found)} receipts contradict: {'; '.join(wrong[:3])}",
            "a sync did something else than was planned, or a line was lost or edited",
            "look at the receipts of these versions in receipts.jsonl",
        )
    moved = sum(int(str(r["bytes_moved"])) for r in found)
    return passed(
        f"{len(found)} syncs, versions {found[0]['version']} to {found[-1]['version']}: {format_bytes(moved)} moved, "
        f"as planned"
    )


def checkpoint_round_trip(subject: Subject) -> Finding:
    """What the loop saved comes back bit for bit."""
    soak, trainer = subject.soak, subject.cluster.trainer
    step = checkpoint.latest(subject.folder)
    if step is None:
        size = subject.checkpoint_bytes
        why = f"see lr-0-soak ({soak.broke})" if soak.broke else f"not tried, it would take {format_bytes(size)}"
        return not_applicable(f"no checkpoint was written: {why}")
    like = {"trainable": trainer.trainable, "optimizer": trainer.optimizer_state}
    arrays, meta = checkpoint.restore(subject.folder, step, like, partial=True)
    last = soak.receipts[-1]
    tree: dict[str, jax.Array] = arrays["trainable"]
    wrong = unequal_digests(leaf_digests(tree), leaf_digests(soak.trainable))
    if wrong or meta["digest"] != last["digest"] or meta["version"] != last["version"]:
        said = f"leaves {', '.join(wrong[:3])}" if wrong else f"version {meta['version']} {meta['digest'][:8]}"
        return failed(
            f"the checkpoint of step {step} has other {said} than were published (version {last['version']} "
            f"{last['digest'][:8]})",
            "it was written at another moment than its counters, or read back wrong",
            "save after the step's sync, weights and counters together",
        )
    return passed(
        f"step {step}: {len(tree)} leaves and the optimizer's state, {format_bytes(subject.checkpoint_bytes)}"
    )


def unequal_digests(a: Mapping[str, str], b: Mapping[str, str]) -> list[str]:
    return sorted(path for path in a.keys() | b.keys() if a.get(path) != b.get(path))
