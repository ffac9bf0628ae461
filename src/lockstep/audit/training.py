"""Checks of the trainer: masks, groups, cuts of the batch, the loss and its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax

from lockstep.algorithms.base import Samples
from lockstep.algorithms.dr_grpo import DrGRPO
from lockstep.algorithms.grpo import GRPO
from lockstep.algorithms.losses import Tokens, Totals
from lockstep.algorithms.rloo import RLOO
from lockstep.audit.check import Finding, failed, not_applicable, passed
from lockstep.audit.definitions import gradient, k_estimate
from lockstep.audit.subject import Subject, distance, same_bits
from lockstep.cluster.mesh import Dial
from lockstep.cluster.sharding import place
from lockstep.cluster.shared import shared_programs
from lockstep.text import format_bytes
from lockstep.train.batching import MicroBatch
from lockstep.train.trainer import StepResult
from lockstep.types import Trajectory

GARBAGE = np.array([np.nan, 1e9, -1e9, np.inf], np.float32)
SPLIT_TOLERANCE = {"float32": 1e-4, "bfloat16": 3e-2}  # relative, of the gradient: sums in another order
SAME_TOLERANCE = 1e-6  # relative, of a gradient that is summed in the same order
ONE_DEVICE_BYTES = 1 << 30  # a larger policy is not put on one device for a comparison


def _apart(name: str, a: StepResult, b: StepResult) -> float:
    """By how much two results differ in a metric, relative to the larger."""
    x, y = a.metrics.get(name, 0.0), b.metrics.get(name, 0.0)
    return abs(x - y) / max(abs(x), abs(y), 1e-6) if np.isfinite(x - y) else float("inf")


def _record(result: StepResult) -> list[np.ndarray]:
    return [lp for lp in result.logprobs if lp is not None]


def masked_garbage(subject: Subject) -> Finding:
    """NaN and 1e9 in every masked slot and padded row change nothing; a reward that is NaN is refused."""
    plain = subject.micro_batches(subject.batch, subject.advantages)
    filled = [_with_garbage(batch, subject.cluster.spec.vocab_size) for batch in plain]
    slots = sum(int((~np.asarray(b.tokens.mask)).sum()) for b in plain)
    wanted, gradient = subject.trained
    try:
        with subject.under(subject.moved):
            result, other = subject.step(filled, subject.batch)
    except Exception as error:  # however a part breaks on garbage, that is the finding
        return failed(f"garbage in {slots} masked slots stops the step: {error}", *_MASK)
    moved = {name: _apart(name, result, wanted) for name in wanted.metrics if name != "lr"}
    worst = max(moved, key=lambda name: moved[name])
    off = distance(other, gradient)
    if moved[worst] > SAME_TOLERANCE or off > SAME_TOLERANCE or not same_bits(_record(result), _record(wanted)):
        return failed(
            f"garbage in {slots} masked slots moves {worst} by {moved[worst]:.3g} and the gradient by {off:.3g} "
            f"(relative)",
            *_MASK,
        )
    try:
        Samples.of([0.0, float("nan"), 1.0], ["a", "a", "a"])
    except ValueError:
        return passed(f"{slots} masked slots and all padded rows filled with garbage: metrics and gradient alike")
    return failed(
        "a reward that is NaN is taken for an advantage",
        "NaN rewards are averaged in, or hidden by a sum that skips them",
        "leave a sample without a reward out before advantages are computed, and count it",
    )


_MASK = (
    "a mask is off (shifted by one, made from token values) or applied to results instead of inputs, where 0 x NaN is "
    "NaN",
    "make masks from lengths, and replace masked inputs before any arithmetic",
)


def _with_garbage(batch: MicroBatch, vocabulary: int) -> MicroBatch:
    """What no loss and no metric may see, filled with what would show."""
    mask = np.asarray(batch.tokens.mask)
    junk = np.resize(GARBAGE, mask.shape)
    tokens = batch.tokens._replace(
        old_logp=np.where(mask, batch.tokens.old_logp, junk),
        ref_logp=np.where(mask, batch.tokens.ref_logp, junk),
        advantage=np.where(mask, batch.tokens.advantage, junk),
        sequence=np.where(mask, batch.tokens.sequence, 10**9).astype(np.int32),
    )
    padding = np.asarray(batch.rows.pos) < 0
    ids = np.where(padding, np.arange(len(padding)) % vocabulary, batch.rows.tokens).astype(np.int32)
    return replace(batch, tokens=tokens, rows=batch.rows._replace(tokens=ids))


def group_permutation(subject: Subject) -> Finding:
    """Samples in another order: the same advantages, the same gradient. Groups are found by id, not by place."""
    batch = subject.batch
    rng = np.random.default_rng(2)
    order = rng.permutation(len(batch))
    rewards, groups = rng.normal(size=len(batch)), [t.group_id for t in batch]
    advantages = subject.judged
    straight = advantages(rewards, groups).per_sample
    mixed = advantages(rewards[order], [groups[i] for i in order]).per_sample
    off = float(np.abs(mixed - straight[order]).max())
    if off > 1e-9:
        return failed(
            f"in another order, advantages differ by up to {off:.3g}",
            "groups are cut by position: prompts come in another order than the grouping believes",
            "group by the prompt's id",
        )
    wanted, gradient = subject.trained
    permuted = [batch[i] for i in order]
    with subject.under(subject.moved):
        result, other = subject.step(subject.micro_batches(permuted, subject.advantages[order]), permuted)
    apart = distance(other, gradient)
    alike = same_bits(_record(result), [_record(wanted)[i] for i in order])
    if apart > SPLIT_TOLERANCE[subject.config.model.dtype] or (subject.exact and not alike):
        return failed(
            f"in another order, the gradient differs by {apart:.3g} (relative)",
            "a sample's tokens, advantage or reference are taken from another sample's place",
            "carry all of a sample's fields together",
        )
    return passed(f"{len(batch)} samples in {len(set(groups))} groups: advantages alike, gradient to {apart:.2g}")


def ragged_groups(subject: Subject) -> Finding:
    """Groups of 4, 3 and 4 in any order: each is judged by itself, and every token is trained on once."""
    groups = list("abacbcabcac")
    rewards = np.random.default_rng(3).normal(size=len(groups)).round(1) + 10 * np.array([g == "b" for g in groups])
    algorithm = subject.cluster.trainer.algorithm
    if not algorithm.by_group:
        return not_applicable(f"{algorithm.settings.name} judges a sample against the whole batch")
    advantages = subject.judged
    together = advantages(rewards, groups).per_sample
    alone = np.zeros(len(groups))
    for group in set(groups):
        members = [i for i, g in enumerate(groups) if g == group]
        alone[members] = advantages(rewards[members], [group] * len(members)).per_sample
    off = float(np.abs(together - alone).max())
    centre = max(abs(float(together[[i for i, g in enumerate(groups) if g == x]].sum())) for x in set(groups))
    if off > 1e-9 or (centre > 1e-9 and isinstance(algorithm, GRPO | DrGRPO | RLOO)):
        return failed(
            f"a group's advantages change by {off:.3g} with the other groups, and sum to {centre:.3g}",
            "advantages are centred over the batch, or over groups of one size that are not these",
            "subtract each group's own mean, found by its id",
        )
    kept = _ragged(subject.batch)
    wrong = uncovered(subject.micro_batches(kept), kept)
    if wrong:
        return failed(
            f"of {len(kept)} samples in ragged groups, {wrong}",
            "the layout takes groups to be of one size",
            "lay every sample out by its own length",
        )
    return passed(f"groups of 4, 3, 4: each as if alone; {sum(t.num_sampled for t in kept)} tokens laid out once")


def _ragged(batch: Sequence[Trajectory]) -> list[Trajectory]:
    """Without the last sample of every other group."""
    groups = list(dict.fromkeys(t.group_id for t in batch))
    last = {g: max(t.index for t in batch if t.group_id == g) for g in groups[::2]}
    return [t for t in batch if last.get(t.group_id) != t.index]


def uncovered(batches: Sequence[MicroBatch], trajectories: Sequence[Trajectory]) -> str:
    """What of the trajectories' tokens is not laid out exactly once; empty if all is."""
    seen: dict[int, int] = {}
    for batch in batches:
        mask = np.asarray(batch.tokens.mask)
        for sample, start, stop in batch.spans:
            seen[sample] = seen.get(sample, 0) + 1
            if not np.array_equal(batch.target[start:stop], trajectories[sample].sampled_ids):
                return f"sample {sample} is laid out with other tokens than its own"
            if not mask[start:stop].all():
                return f"{int((~mask[start:stop]).sum())} tokens of sample {sample} are masked"
        if mask.sum() != sum(stop - start for _, start, stop in batch.spans):
            return "slots without a token are trained on"
    wrong = [i for i, t in enumerate(trajectories) if t.num_sampled and seen.get(i) != 1]
    return f"sample {wrong[0]} is laid out {seen.get(wrong[0], 0)} times" if wrong else ""


def equal_rewards(subject: Subject) -> Finding:
    """Groups whose rewards are all equal teach nothing: advantage exactly 0, at any level."""
    rewards, groups = [0.1] * 3 + [0.9] * 4 + [-2.0], ["a"] * 3 + ["b"] * 4 + ["c"]
    algorithm = subject.cluster.trainer.algorithm
    if not algorithm.by_group:
        return not_applicable(f"{algorithm.settings.name} judges a sample against the whole batch")
    found = subject.judged(rewards, groups)
    most = float(np.abs(found.per_sample).max())
    if most > 0:
        return failed(
            f"groups of equal rewards have advantages up to {most:.3g}",
            "advantages are centred over the batch, or a mean of equal numbers is not that number",
            "compare the rewards of a group before subtracting their mean",
        )
    if found.zero_variance != 3:
        return failed(
            f"3 groups of equal rewards are counted as {found.zero_variance}",
            "the count of groups that teach nothing is not made from the groups",
            "count the groups whose smallest reward is their largest",
        )
    return passed("groups of 3, 4 and 1 with equal rewards: advantages exactly 0, counted as 3")


def split_invariance(subject: Subject) -> Finding:
    """The same batch in other micro-batches, and on one device: the same loss, gradient and log-probabilities."""
    wanted, gradient = subject.trained
    batch, tolerance = subject.batch, SPLIT_TOLERANCE[subject.config.model.dtype]
    longest = max(len(t.prompt_ids) + len(t.completion_ids) for t in batch)
    said = [f"{len(subject.micro_batches(batch))}"]
    worst = 0.0
    with subject.under(subject.moved):
        for rows in sorted({longest, 3 * longest}):
            cut = subject.micro_batches(batch, subject.advantages, max_rows=rows)
            result, other = subject.step(cut, batch)
            off = max(distance(other, gradient), _apart("loss", result, wanted))
            if off > tolerance or (subject.exact and not same_bits(_record(result), _record(wanted))):
                return failed(
                    f"in {len(cut)} micro-batches instead of {said[0]}, loss or gradient differ by {off:.3g} relative",
                    "means are taken per micro-batch: the denominator changes with the cut",
                    "divide by counts of the whole batch, made before it is cut",
                )
            said.append(f"{len(cut)}")
            worst = max(worst, off)
    elsewhere = _one_device(subject)
    if isinstance(elsewhere, Finding):
        return elsewhere
    return passed(f"{', '.join(said)} micro-batches: loss and gradient alike to {worst:.2g}; {elsewhere}")


def _one_device(subject: Subject) -> str | Finding:
    """The actor's step once more on a single device; words, or what went wrong."""
    cluster, trainer = subject.cluster, subject.cluster.trainer
    count = trainer.programs.mesh.size
    if count == 1:
        return "one device"
    size = sum(leaf.nbytes for leaf in trainer.params.values())
    if size > ONE_DEVICE_BYTES:
        return f"{count} devices, not compared with one ({format_bytes(size)})"
    mesh = Dial.build({"actor": {}}, cluster.dial.devices[:1]).mesh("actor")
    leaves = trainer.programs.leaves
    programs = shared_programs(cluster.spec, trainer.programs.num, mesh, leaves)
    host = {path: np.asarray(leaf) for path, leaf in {**trainer.frozen, **subject.moved}.items()}
    params = place(host, leaves, mesh)
    single = type(trainer)(
        programs, {path: params[path] for path in trainer.frozen}, {path: params[path] for path in trainer.trainable},
        trainer.algorithm, optax.chain(optax.trace(0.0), optax.scale(0.0)), optax.constant_schedule(0.0), exact=False,
    )  # fmt: skip
    batches = subject.micro_batches(subject.batch, subject.advantages, row_shards=1)
    result = single.step(batches, subject.batch, 0)
    wanted, gradient = subject.trained
    kept = single.optimizer_state[0].trace
    back = {path: jax.device_put(np.asarray(kept[path]), leaf.sharding) for path, leaf in gradient.items()}
    off = max(distance(back, gradient), _apart("loss", result, wanted))
    if off > SPLIT_TOLERANCE[subject.config.model.dtype] or (
        subject.exact and not same_bits(_record(result), _record(wanted))
    ):
        return failed(
            f"on one device instead of {count}, loss or gradient differ by {off:.3g} (relative)",
            "a mean is taken per device, or a device's rows depend on another's",
            "sum over devices, and divide by counts of the whole batch",
        )
    return f"on one device instead of {count} to {off:.2g}"


def _loss(subject: Subject, tokens: Tokens, totals: Totals, logp: np.ndarray) -> tuple[float, np.ndarray]:
    """(value, d / d logp) of the algorithm's loss, without an entropy term."""
    loss = subject.cluster.trainer.algorithm.loss
    on_device = Tokens(*map(jnp.asarray, tokens))
    (value, _), slope = jax.value_and_grad(lambda x: loss(x, None, on_device, totals), has_aux=True)(jnp.asarray(logp))
    return float(value), np.asarray(slope, np.float64)


def policy_gradient(subject: Subject) -> Finding:
    """The loss pushes a token up where its advantage is positive, and not at all where the clip holds: by the formula
    of the recipe's algorithm (`definitions.loss`)."""
    algorithm = subject.cluster.trainer.algorithm
    settings = algorithm.settings
    if not settings.built_in:
        return not_applicable(f"the audit does not know what {settings.name}'s gradient should be")
    settings = settings.model_copy(update={"kl_coef": 0.0, "entropy_coef": 0.0})
    ratio = np.array([1.0, 1.0, 1 + 2 * settings.clip_high, 1 - 0.9 * settings.clip_low, 1.0, 1.0])
    advantage = np.array([0.5, -2.0, 1.5, -0.7, 1.0, 9.0])
    mask = np.array([True] * 5 + [False])
    logp = np.array([-1.0, -2.0, -0.5, -3.0, -0.1, -1.0], np.float32)
    old = (logp - np.log(np.maximum(ratio, 0.05))).astype(np.float32)
    sequence = np.array([0, 1, 2, 3, 3, 4], np.int32)
    totals = 7, 3  # of the whole batch, of which this is a part
    fields = {"logp": logp, "old": old, "ref": logp, "advantage": advantage, "weight": np.ones(6)}
    real = {name: np.asarray(x, np.float64)[mask] for name, x in fields.items()} | {"sequence": sequence[mask]}
    wanted = np.append(gradient(settings, algorithm.length, real, totals), 0.0)
    tokens = Tokens(mask, old, logp, advantage.astype(np.float32), sequence, np.ones(6, np.float32))
    got = _loss(subject, tokens, Totals(*map(np.float32, totals)), logp)[1]
    at = int(np.argmax(np.abs(got - wanted)))
    if abs(got[at] - wanted[at]) > 1e-5:
        return failed(
            f"d loss / d logp of a token with ratio {ratio[at]:.3g}, advantage {advantage[at]:.3g} is {got[at]:.4g}, "
            f"{settings.name} says {wanted[at]:.4g}",
            _gradient_cause(got, wanted, mask, totals[0]),
            "compare the loss with its definition: the objective's sum, negative, divided by counts of the whole batch",
        )
    return passed(f"{settings.name}'s formula on 6 tokens (on-policy, clipped, masked): alike")


def _gradient_cause(got: np.ndarray, wanted: np.ndarray, mask: np.ndarray, count: int) -> str:
    if np.allclose(got[:2], -wanted[:2], atol=1e-5):  # on-policy, where no clip is active
        return "the sign is flipped: the update makes good tokens less likely"
    if np.allclose(got * mask.sum(), wanted * count, atol=1e-4):
        return "the sum is divided by the tokens of the micro-batch, not of the batch"
    if np.abs(got[~mask]).max() > 1e-5:
        return "masked tokens have a gradient"
    return "the surrogate, its clip or its denominator is not the algorithm's"


def kl_gradient(subject: Subject) -> Finding:
    """The KL term is a penalty: its gradient is the estimator's, and takes the policy back to the reference."""
    algorithm = subject.cluster.trainer.algorithm
    if not algorithm.kl_in_loss:
        return not_applicable('no KL term in this recipe\'s loss (algorithm.kl_coef = 0, or kl_in = "reward")')
    name, coef = algorithm.settings.kl_estimator, algorithm.settings.kl_coef
    logp = np.array([-1.0, -2.0, -0.5], np.float32)
    ref = np.array([-1.5, -1.0, -0.5], np.float32)
    d = (ref - logp).astype(np.float64)
    slope = {"k1": np.ones(3), "k2": -d, "k3": 1 - np.exp(d)}[name]
    totals = Totals(np.float32(3), np.float32(3))
    # One token a sequence: every kind of mean is the same, but for the constant that a completion counts for.
    share = coef / (algorithm.length if algorithm.settings.aggregate == "constant" else 1.0)
    wanted = share * slope / 3
    ones, zeros = np.ones(3, np.float32), np.zeros(3, np.float32)
    tokens = Tokens(np.ones(3, bool), logp, ref, zeros, np.arange(3, dtype=np.int32), ones)
    value, got = _loss(subject, tokens, totals, logp)
    meant = share * float(k_estimate(name, logp.astype(np.float64), ref.astype(np.float64)).mean())
    if np.abs(got - wanted).max() > 1e-5 or abs(value - meant) > 1e-5:
        flipped = np.allclose(got, -wanted, atol=1e-5) and np.abs(wanted).max() > 1e-5
        still = np.abs(got).max() < 1e-7
        return failed(
            f"{name} of three tokens: value {value:.4g} (definition {meant:.4g}), gradient {got.round(4).tolist()} "
            f"(definition {wanted.round(4).tolist()})",
            "the sign is flipped: the policy is rewarded for leaving the reference"
            if flipped
            else "the term has a value and no gradient: it was computed outside of what is differentiated"
            if still
            else f"the estimator is not {name}: policy and reference changed places, or another formula",
            "write the estimator with d = ref_logp - logp, and differentiate it in logp",
        )
    return passed(f"{name}: value and gradient as defined, on tokens above, below and at the reference")


def kl_at_step_0(subject: Subject) -> Finding:
    """Before the first update the policy is the reference: the KL is exactly 0."""
    if subject.cluster.reference is None:
        return not_applicable("this recipe has no reference (algorithm.measure_kl = false)")
    soak = subject.soak
    if not soak.steps:
        return not_applicable(f"no step finished: see lr-0-soak ({soak.broke})")
    name = f"kl/{subject.config.algorithm.kl_estimator}"
    logged = soak.records[0].get(name, float("nan"))
    step = soak.steps[0]
    pairs = [
        (lp, t.reference_logprobs) for lp, t in zip(step.extra["trainer_logprobs"], step.trajectories, strict=True)
    ]
    off = max(float(np.abs(lp - ref).max()) for lp, ref in pairs if lp is not None and ref is not None)
    if not logged <= subject.bound or off > subject.bound:  # NaN is not small either
        return failed(
            f"{name} of the first step is {logged:.3g}, and log-probabilities differ by up to {off:.3g} nats",
            "the reference is not the policy that the run starts from: other weights, another temperature, an adapter "
            "that does not start at zero, or an estimator that is not 0 at equality",
            "take the reference's weights before the first update, and score it as the policy is scored",
        )
    return passed(
        f"{name} {logged:.3g} over {sum(len(lp) for lp, _ in pairs if lp is not None)} tokens, max |d| {off:.3g}"
    )
