"""Checks of the record: what the sampler says of a token's probability, against what the trainer computes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import jax
import numpy as np

from lockstep.audit.check import Finding, failed, not_applicable, passed
from lockstep.audit.diagnose import likely_cause, mismatch_words, worst_tokens
from lockstep.audit.subject import Subject, gap
from lockstep.cluster.devices import device_kinds
from lockstep.cluster.quantised_weights import layer_matrices
from lockstep.errors import MismatchError
from lockstep.models.quantise import DTYPES, SCALE_DTYPE, Quantised, Storage
from lockstep.rollout.engine import Engine, make_fingerprint
from lockstep.train.assembly import make_storage
from lockstep.train.policy import TRAINABLE_DTYPE, sampler_dtype
from lockstep.train.trainer import mismatch
from lockstep.types import Fingerprint

OTHER_TEMPERATURE = 0.7  # tried where the recipe's is 1, at which a temperature that is not applied cannot be seen
LEAST_ESS = 0.95  # in fast mode


def record_equals_recompute(subject: Subject) -> Finding:
    """Under perturbed weights, the trainer's own step computes for every token what the sampler recorded."""
    batch = subject.batch
    result, _ = subject.trained
    recomputed = [lp for lp in result.logprobs if lp is not None]
    tokens = sum(map(len, recomputed))
    values = mismatch(np.concatenate([t.logprobs for t in batch]), np.concatenate(recomputed))
    figure = mismatch_words(values, tokens)
    if subject.exact:
        right = values["mismatch/unequal_tokens"] == 0
    else:
        storage = make_storage(subject.config)
        mode = f"fast mode with {storage}" if storage.quantised else "fast mode"
        figure += f"; {mode} allows {subject.bound:g} nats and ESS {LEAST_ESS}"
        right = values["mismatch/max_abs"] <= subject.bound and values["mismatch/ess"] >= LEAST_ESS
    if right:
        return passed(figure)
    with subject.under(subject.moved):
        cause, remedy = likely_cause(subject, batch, recomputed, subject.moved, subject.temperature)
    return failed(f"{figure}; worst: {worst_tokens(subject, batch, recomputed)}", cause, remedy)


def temperature(subject: Subject) -> Finding:
    """What is recorded at a temperature is recomputed at it, and at no other."""
    at = subject.temperature if subject.temperature != 1 else OTHER_TEMPERATURE
    with subject.under(subject.moved):
        made = subject.generate(temperature=at)
        here, without = subject.scored(made, temperature=at), subject.scored(made, temperature=1.0)
    recorded = [t.logprobs for t in made]
    off, apart = gap(recorded, here), gap(recorded, without)
    if apart < off / 2:
        return failed(
            f"sampled at temperature {at:g}, the record is {off:.3g} nats per token off the trainer's at {at:g} and "
            f"{apart:.3g} off at 1",
            "temperature is applied on one side only",
            "divide the logits by the temperature on both sides, before the log-softmax",
        )
    if off > subject.bound:
        return not_applicable("the record is not the trainer's at any temperature: see record-equals-recompute")
    if gap(here, without) == 0:
        return failed(
            f"the trainer computes the same at temperature {at:g} as at 1",
            "the trainer ignores the temperature",
            "divide the logits by the temperature on both sides, before the log-softmax",
        )
    return passed(
        f"at temperature {at:g} the record is {off:.3g} nats per token off the trainer's at {at:g}, and {apart:.3g} "
        "off at 1"
    )


def truncation(subject: Subject) -> Finding:
    """Where ids are cut off, the record stays that of the whole softmax and the kept mass is beside it."""
    sampling = subject.cluster.sampling
    if sampling.reshapes:
        return failed(
            "the recipe samples with penalties or biases",
            "they change the odds between tokens, so no trainer can recompute the distribution that was sampled from",
            "take penalties and biases out of [rollout]; they are for generation only",
        )
    top_p = 0.8
    with subject.under(subject.moved):
        made = subject.generate(top_p=top_p)
        whole = subject.scored(made)
    for t, lp in zip(made, whole, strict=True):
        kept = t.kept_logmass
        if kept is None or not np.isfinite(kept).all() or (kept > 1e-6).any() or (kept < np.log(top_p) - 1e-3).any():
            said = "is not recorded" if kept is None else f"is recorded as {kept.tolist()[:3]}"
            inflated = float((t.logprobs - lp).max())
            return failed(
                f"at top_p {top_p} the log of the kept mass {said}; the record is up to {inflated:.3g} nats above the "
                "whole softmax's",
                "top-p renormalises over what it keeps, while the trainer computes the whole softmax: every ratio is "
                "off by the kept mass",
                "record the whole softmax's log-probability and the kept mass, or sample with top_p = 1",
            )
    least = min(float(np.exp(t.kept_logmass.min())) for t in made if t.kept_logmass is not None)
    own = "cuts ids off, kept mass recorded" if sampling.truncates else "samples the whole softmax"
    return passed(f"this recipe {own}; a probe at top_p {top_p} recorded kept masses down to {least:.3g}")


def record_guard(subject: Subject) -> Finding:
    """The trainer would notice: a record that is off by one bit is refused (exact) or measured (fast)."""
    batch = list(subject.batch)
    longest = max(range(len(batch)), key=lambda i: len(batch[i].completion_ids))
    planted = batch[longest].logprobs.copy()
    planted[-1] = np.nextafter(planted[-1], np.float32(-100)) if subject.exact else planted[-1] - np.float32(0.5)
    batch[longest] = replace(batch[longest], logprobs=planted)
    trainer = subject.cluster.trainer
    with subject.under(subject.moved):
        trainer.exact = subject.exact
        try:
            result, _ = subject.step(subject.micro_batches(batch, subject.advantages), batch)
        except MismatchError:
            return passed("a record that is off by the last bit of one token stops the step")
        finally:
            trainer.exact = False
    if subject.exact:
        return failed(
            "a record that is off by the last bit of one token is trained on",
            "the trainer does not compare the record with what it computes",
            "compare bits before the update, in every step",
        )
    seen = result.metrics["mismatch/max_abs"]
    if seen < 0.4:
        return failed(
            f"a record that is off by 0.5 nats is reported as a mismatch of {seen:.3g}",
            "the mismatch is measured against something else than the record",
            "measure recomputed minus recorded, over all trained tokens",
        )
    return passed(f"a record that is off by 0.5 nats shows as {seen:.3g}")


def dtypes(subject: Subject) -> Finding:
    """Types, tiles and pages on both sides."""
    cluster = subject.cluster
    actor, rollout = cluster.trainer.programs.num, cluster.engine.programs.num
    differ = [f.name for f in fields(actor) if getattr(actor, f.name) != getattr(rollout, f.name)]
    if differ:
        named = ", ".join(f"{n} {getattr(actor, n)} / {getattr(rollout, n)}" for n in differ)
        return failed(
            f"trainer and sampler compute with different numerics: {named}",
            "the two roles were given different arithmetic",
            "give both the same Numerics; it is part of the fingerprint",
        )
    held = {
        "trained": (kinds(cluster.trainer.trainable), TRAINABLE_DTYPE),
        "sampled": (kinds(cluster.replica.installed), sampler_dtype(subject.config)),
        "frozen": (kinds(cluster.trainer.frozen), subject.config.model.dtype),
        "frozen at the sampler": (kinds(cluster.rollout_frozen), subject.config.model.dtype),
    }
    wanted = make_storage(subject.config)
    for what, (kind, asked) in sampler_holds(cluster.engine, wanted, actor.dtype).items():
        if kind != asked:
            return failed(
                f"the sampler's {what} is held as {kind}, expected {asked} ({wanted})",
                "the engine was not made with the recipe's rollout.kv_dtype and rollout.weights_dtype",
                "pass both to the engine and to the fingerprint; the trajectories' identity names them",
            )
    words = "; ".join(f"{name} {kind}" for name, (kind, _) in held.items() if kind)
    wrong = [f"{name} leaves are {kind}, expected {wanted}" for name, (kind, wanted) in held.items()
             if kind not in ("", wanted)]  # fmt: skip
    if wrong:
        return failed(
            "; ".join(wrong),
            "a side holds its weights in another type than the recipe's: digests cannot be equal, and bits differ",
            "cast where the map declares it, and only there",
        )
    cut = f", blocks in {actor.tensor_parts} parts" if actor.tensor_parts > 1 else ""
    arithmetic = f"{actor.dtype}, tiles of {actor.tile_rows} rows, pages of {actor.page_size}{cut}"
    return passed(f"{words}; arithmetic {arithmetic}; at the sampler {wanted}")


def sampler_holds(engine: Engine, storage: Storage, dtype: str) -> dict[str, tuple[str, str]]:
    """What -> (types of the arrays that the engine reads, the types that `storage` means)."""
    kv = dtype if storage.kv == "compute" else f"{SCALE_DTYPE}/{DTYPES[storage.kv]}"
    matrices = {
        "int8" if isinstance(leaf, Quantised) else "compute"
        for layer in engine.weights.layers
        for name, leaf in layer.items()
        if isinstance(leaf, Quantised) or name in layer_matrices({name: leaf})
    }
    return {
        "key-value cache": (kinds(dict(enumerate(jax.tree.leaves(engine._pools)))), kv),
        "layer matrices": ("/".join(sorted(matrices)), storage.weights),
    }


def kinds(tree: Mapping[Any, Any]) -> str:
    """Types of a tree's leaves."""
    return "/".join(sorted({leaf.dtype.name for leaf in tree.values()}))


def fingerprint(subject: Subject) -> Finding:
    """Tokenizer, template, decoding and numerics, hashed on the trainer's side and carried by every sample."""
    cluster = subject.cluster
    programs = cluster.trainer.programs
    own = make_fingerprint(
        cluster.tokenizer, cluster.sampling, programs.num, device_kinds(list(programs.mesh.devices.flat)),
        make_storage(subject.config),
    )  # fmt: skip
    carried = [t.fingerprint for t in subject.batch]
    sides = {"the run's": cluster.fingerprint, "the sampler's": cluster.engine.fingerprint}
    sides |= {f"a sample's ({t.group_id}, {t.index})": t.fingerprint for t in subject.batch}
    for name, other in sides.items():
        if wrong := own.difference(other):
            return failed(
                f"{name} fingerprint differs from the trainer's in {', '.join(wrong)}",
                "the two sides do not agree on the tokenizer, the template, the decoding parameters or the numerics",
                "build both from one recipe; `Fingerprint.difference` names what to look at",
            )
    changed = replace(cluster.sampling, temperature=cluster.sampling.temperature + 0.5)
    other = make_fingerprint(cluster.tokenizer, changed, programs.num, "cpu")
    if "decoding" not in own.difference(other):
        return failed(
            "another temperature has the same fingerprint",
            "the fingerprint does not cover what it names",
            "hash everything that decides a log-probability",
        )
    shown = ", ".join(f"{f.name} {getattr(own, f.name)[:8]}" for f in fields(Fingerprint))
    return passed(f"{shown}: on both sides and on {len(carried)} samples")


def version_tags(subject: Subject) -> Finding:
    """Every token says which version computed it, and the sampler serves what was published."""
    wrong = []
    for step in subject.soak.steps:
        served = {int(v) for t in step.trajectories for v in t.versions}
        if served != {step.step - 1}:
            wrong.append(f"step {step.step} trained tokens of versions {sorted(served)}, published was {step.step - 1}")
    with subject.under(subject.moved):
        made = subject.generate(samples=1)
        version, published = subject.cluster.engine.version, subject.cluster.sync.published
    tagged = sorted({int(v) for t in made for v in t.versions})
    if version != published:
        wrong.append(f"published is {published}, the sampler serves {version}")
    if published is not None and tagged != [published.number]:
        wrong.append(f"published is {published}, tokens are tagged {tagged}")
    if wrong:
        return failed(
            "; ".join(wrong[:3]),
            "the version that a sample carries is not that of the weights that computed it: a counter moves with the "
            "wrong event, or the sampler was not told",
            "pass the version into the sync; the sampler takes it over in the same moment as the weights",
        )
    total = sum(len(t.versions) for step in subject.soak.steps for t in step.trajectories)
    return passed(f"{total} tokens of {len(subject.soak.steps)} steps, and {sum(map(len, (t.versions for t in made)))} "
                  f"of {published}, carry the published version")  # fmt: skip
