"""Why a record is not what the trainer computes: the usual faults, each tried as a hypothesis.

A hypothesis says what the trainer's log-probabilities would be if that fault were there; the one that the record fits
(ten times better than no fault at all) is named. Tried only after a mismatch was found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from lockstep.audit.subject import Subject, Tree, gap
from lockstep.cluster.programs import SplitWeights
from lockstep.text import sanitize
from lockstep.train.assembly import make_storage
from lockstep.train.trainer import ROUNDING
from lockstep.types import Trajectory

FITS = 0.1  # of the distance that there is without a hypothesis
LEAVES = 400  # at most so many are tried one by one
WORST = 3

Values = list[np.ndarray]


def shifted(recorded: Values, recomputed: Values) -> str | None:
    """Of which neighbour a token's record is, if it is not its own."""
    long = [i for i, lp in enumerate(recorded) if len(lp) > 1]
    if not long:
        return None
    limit = FITS * gap([recorded[i] for i in long], [recomputed[i] for i in long])
    for words, ours, theirs in (("next", slice(-1), slice(1, None)), ("previous", slice(1, None), slice(-1))):
        if gap([recorded[i][ours] for i in long], [recomputed[i][theirs] for i in long]) <= limit:
            return words
    return None


def likely_cause(
    subject: Subject, trajectories: Sequence[Trajectory], recomputed: Values, trainable: Tree, temperature: float
) -> tuple[str, str]:
    """(cause, remedy) of a mismatch between the trajectories' record and `recomputed`, which is under `trainable`."""
    recorded = [t.logprobs for t in trajectories]
    if not any(lp.any() for lp in recorded):
        return (
            "every recorded log-probability is 0: the sampler does not record any",
            "have the sampler record the log-probability of each token that it draws",
        )
    if (neighbour := shifted(recorded, recomputed)) is not None:
        return (
            f"the record is shifted by one: each token carries the log-probability of the {neighbour} one",
            "align the record: logprobs[t] belongs to completion_ids[t], predicted from the position before it",
        )
    # One group tells as much as all, and is one small micro-batch.
    group = max(trajectories, key=lambda t: len(t.completion_ids)).group_id
    chosen = [i for i, t in enumerate(trajectories) if t.group_id == group]
    own = [recorded[i] for i in chosen]
    limit = FITS * gap(own, [recomputed[i] for i in chosen])
    tried = [trajectories[i] for i in chosen], [recomputed[i] for i in chosen]
    for cause, remedy, make in _hypotheses(subject, *tried, trainable, temperature):
        if gap(own, make()) <= limit:
            return cause, remedy
    if _right_without_cache(subject, group, trainable, temperature, limit):
        return (
            "the key-value cache of prompts outlives the version that filled it: computed anew, the prompt is right",
            "key cached pages by version, and drop them when another one is installed",
        )
    cause, remedy = _rest(recorded, recomputed)
    if make_storage(subject.config).quantised:
        cause += "; or eight bits are too few for this model"
        remedy += '. With rollout.kv_dtype and rollout.weights_dtype "compute" only a fault remains: audit that first'
    return cause, remedy


def _right_without_cache(subject: Subject, group: str, trainable: Tree, temperature: float, limit: float) -> bool:
    """Whether the sampler's record is right where it is made to compute the prompt anew."""
    prompts = [p for p in subject.prompts if p.id == group]
    made = subject.generate(prompts=prompts, temperature=temperature, prompt_logprobs=True)
    return bool(made) and gap([t.logprobs for t in made], subject.scored(made, trainable, temperature)) <= limit


Hypothesis = tuple[str, str, Callable[[], Values]]


def _hypotheses(
    subject: Subject, trajectories: Sequence[Trajectory], recomputed: Values, trainable: Tree, temperature: float
) -> Iterator[Hypothesis]:
    def under(tree: Tree) -> Callable[[], Values]:
        return lambda: subject.scored(trajectories, {**trainable, **tree}, temperature)

    here = subject.scored(trajectories, trainable, temperature)
    if gap(here, recomputed) > 0:  # the trainer's step is not the trainer's forward pass
        yield from _of_the_step(subject, trajectories, recomputed, trainable, here)
    yield (
        "the record was rounded to bfloat16",
        "keep log-probabilities in float32 from the log-softmax to the loss",
        lambda: [_rounded(lp) for lp in recomputed],
    )
    for other in {1.0, 1 / temperature, temperature * temperature} - {temperature}:
        yield (
            f"the sampler used temperature {other:g}, the trainer {temperature:g}",
            "apply one temperature on both sides: it is part of the policy",
            lambda other=other: subject.scored(trajectories, trainable, other),  # type: ignore[misc]
        )
    for words, tree in (("", {**subject.cluster.trainer.frozen, **trainable}), (" that train", trainable)):
        cast = {path: leaf.astype(jnp.bfloat16).astype(leaf.dtype) for path, leaf in tree.items()}
        yield (
            f"one side rounds the weights{words} to bfloat16",
            "hold and use the weights in one type on both sides; only a cast that both do is harmless",
            under(cast),
        )
    if subject.config.lora is not None:
        idle = {path: jnp.zeros_like(leaf) for path, leaf in trainable.items() if path.endswith(".lora_b")}
        yield (
            "the sampler runs the base model: the adapter is not installed, or not used",
            "install the adapter's leaves with every version, and check their names against the leaf table",
            under(idle),
        )
    yield from _stale(subject, trajectories, trainable, under)


def _of_the_step(
    subject: Subject, trajectories: Sequence[Trajectory], recomputed: Values, trainable: Tree, here: Values
) -> Iterator[Hypothesis]:
    """A forward pass of the trainer's own programs gives the record, its training step does not."""
    cause = "the training step computes something else than a forward pass of the same weights"
    if gap(recomputed, subject.scored(trajectories, trainable, 1.0)) <= FITS * gap(recomputed, here):
        cause = "the training step ignores the temperature"
    yield (
        cause,
        "give the step the micro-batches as they were made: tokens, positions and temperature of the sampler",
        lambda: here,
    )


def _stale(
    subject: Subject,
    trajectories: Sequence[Trajectory],
    trainable: Tree,
    under: Callable[[Tree], Callable[[], Values]],
) -> Iterator[Hypothesis]:
    """Weights of an earlier version, all of them or one leaf: the first version, and the one before this."""
    earlier: list[tuple[str, Tree]] = [("the initial weights", subject.initial)]
    earlier += [(f"version {n}", tree) for n, tree in subject.history if tree is not trainable][-1:]
    for words, tree in earlier:
        yield (
            f"the sampler still runs {words}",
            "publish and install the new weights before sampling; nothing may decide that they are there already",
            under(tree),
        )
        if "embed" in tree and subject.cluster.spec.tied_head:
            yield (
                f"the sampler's head is still that of {words}: it is tied to `embed` and was not made anew",
                "make every copy that is derived from a leaf (tied, fused, packed) anew with each version",
                lambda tree=tree: subject.scored(  # type: ignore[misc]
                    trajectories, weights=_old_head(subject, trainable, tree)
                ),
            )
    for words, tree in earlier:
        for path in list(trainable)[:LEAVES]:
            yield (
                f"the sampler's leaf {path} is still that of {words}",
                "install every leaf of a version; a leaf that no rule names must be an error",
                under({path: tree[path]}),
            )


def _old_head(subject: Subject, trainable: Tree, tree: Tree) -> SplitWeights:
    layers = subject.cluster.spec.num_layers
    frozen = subject.cluster.trainer.frozen
    old = SplitWeights.of({**frozen, **trainable, "embed": tree["embed"]}, layers).head
    return replace(SplitWeights.of({**frozen, **trainable}, layers), head=old)


def _rounded(values: np.ndarray) -> np.ndarray:
    return values.astype(ml_dtypes.bfloat16).astype(np.float32)


def _rest(recorded: Values, recomputed: Values) -> tuple[str, str]:
    d = np.concatenate(recorded).astype(np.float64) - np.concatenate(recomputed)
    if np.abs(d).max() <= ROUNDING:
        return (
            "rounding: an operation's last bits depend on what is computed beside it",
            'report it with the recipe and environment.json; numerics.mode = "fast" goes on with a measured mismatch',
        )
    if (d >= -ROUNDING).all() and d.mean() > ROUNDING:
        return (
            "the record is renormalised over the ids that were kept (top-p, top-k, min-p or ids ruled out)",
            "record the log-probability under the whole softmax, and the kept mass beside it",
        )
    return (
        "the sampler's weights, cache or tokens are not the trainer's: none of the usual faults explains it alone "
        "(shift, temperature, rounding, adapter, stale weights, a stale leaf)",
        "compare the worst tokens above: wrong from the first token on points to weights or prompt, wrong later on to "
        "the key-value cache",
    )


def worst_tokens(subject: Subject, trajectories: Sequence[Trajectory], recomputed: Values) -> str:
    """The tokens whose record is farthest off, with their text."""
    rows = [
        (abs(float(now[t]) - float(trajectory.logprobs[t])), trajectory, t, float(now[t]))
        for trajectory, now in zip(trajectories, recomputed, strict=True)
        for t in range(len(now))
    ]
    decode = subject.cluster.tokenizer.decode
    shown = []
    for _, trajectory, t, now in sorted(rows, key=lambda row: -row[0])[:WORST]:
        text = sanitize(decode([int(trajectory.completion_ids[t])], skip_special=False), 24)
        shown.append(
            f"{text!r} (token {t} of sample {trajectory.index} of {trajectory.group_id}) recorded "
            f"{trajectory.logprobs[t]:.6g}, recomputed {now:.6g}"
        )
    return "; ".join(shown)


def mismatch_words(values: Mapping[str, float], tokens: int) -> str:
    """The mismatch metrics as a figure."""
    return (
        f"max |d| {values['mismatch/max_abs']:.3g} nats, k1 {values['mismatch/k1'] + 0.0:.2g}, k3 "
        f"{values['mismatch/k3'] + 0.0:.2g}, ESS {values['mismatch/ess']:.4g}; "
        f"{values['mismatch/unequal_tokens']:.0f} of {tokens} tokens differ"
    )
