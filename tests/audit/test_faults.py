"""Known faults, each planted through a seam that the code has, and the check that has to name it.

A fault is a cluster with one part replaced: an engine, a trainer, an algorithm, a task, a sync, a loop that is wrong in
one way. The kinds are those that users of such systems reported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from lockstep.algorithms.advantages import group_scores
from lockstep.algorithms.grpo import GRPO
from lockstep.algorithms.losses import Totals
from lockstep.cluster.programs import SplitWeights
from lockstep.rollout.engine import Engine
from lockstep.sync.verify import leaf_digests
from lockstep.train.collect import Experience
from lockstep.train.loop import Loop
from lockstep.train.reference import Reference
from lockstep.train.serving import Local
from lockstep.train.trainer import StepResult, Trainer
from lockstep.types import PolicyVersion, SamplingParams, Trajectory

FAULTS: dict[str, tuple[Callable[..., Any], str, str, str]] = {}
"""Name -> (bench -> cluster, or (cluster, loop's class); name of the bench; check that fails; words of its answer)."""
SLOW: set[str] = set()
"""Of a kind that another one shows too."""


def fault(
    check: str, words: str, bench: str = "with_adapter", slow: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def add(make: Callable[..., Any]) -> Callable[..., Any]:
        FAULTS[make.__name__] = make, bench, check, words
        SLOW.update([make.__name__] if slow else [])
        return make

    return add


# ---------------------------------------------------------------- the sampler's weights


class FirstInstalled(Engine):
    """Remembers what it was given first."""

    first: dict[str, jax.Array] | None = None

    def install(self, version: PolicyVersion, params: Mapping[str, jax.Array]) -> None:
        self.first = dict(params) if self.first is None else self.first
        super().install(version, self.taken(params))

    def taken(self, params: Mapping[str, jax.Array]) -> Mapping[str, jax.Array]:
        return params


@fault("record-equals-recompute", "leaf layers.2.q.lora_b is still that of")
def a_stale_leaf(bench):
    class Faulty(FirstInstalled):
        def taken(self, params):
            return {**params, "layers.2.q.lora_b": self.first["layers.2.q.lora_b"]}

    return bench.cluster(engine=Faulty)


@fault("record-equals-recompute", "tied to `embed`", bench="all_weights", slow=True)
def a_stale_tied_head(bench):
    class Faulty(FirstInstalled):
        def install(self, version, params):
            super().install(version, params)
            old = SplitWeights.of(self.first, self.programs.spec.num_layers).head
            lane = self._lanes.newest
            lane.weights = replace(lane.weights, head={**lane.weights.head, "table": old["table"]})

    return bench.cluster(engine=Faulty)


@fault("adapter-reaches-sampler", "runs the base model")
def an_adapter_that_is_not_installed(bench):
    class Faulty(Engine):
        def install(self, version, params):
            super().install(version, {k: v * 0 if k.endswith(".lora_b") else v for k, v in params.items()})

    return bench.cluster(engine=Faulty)


@fault("skipped-sync", "the version moved without the weights", slow=True)
def a_label_ahead_of_the_weights(bench):
    class Faulty(FirstInstalled):
        def taken(self, params):
            return self.first

    return bench.cluster(engine=Faulty)


@fault("record-equals-recompute", "rounds the weights to bfloat16")
def weights_cast_on_one_side(bench):
    class Faulty(Engine):
        def install(self, version, params):
            super().install(version, {k: v.astype(jnp.bfloat16).astype(v.dtype) for k, v in params.items()})

    return bench.cluster(engine=Faulty)


@fault("record-equals-recompute", "the key-value cache of prompts outlives")
def a_cache_that_outlives_its_version(bench):
    class Faulty(FirstInstalled):
        def install(self, version, params):
            if self.first is None:
                super().install(version, params)
            lane = self._lanes.newest
            lane.weights, lane.version = SplitWeights.of(params, self.programs.spec.num_layers), version

    return bench.cluster(engine=Faulty)


# ---------------------------------------------------------------- the record


class Recorder(Engine):
    """Hands out samples that are not quite what it drew."""

    def generate(self, prompts, seeds, params):
        made = super().generate(prompts, seeds, self.asked(params))
        return [self.told(replace(t, fingerprint=self.as_asked(params)), params) for t in made]

    def as_asked(self, params: SamplingParams):
        from lockstep.rollout.trajectories import decoding_digest

        return replace(self.fingerprint, decoding=decoding_digest(params))

    def asked(self, params: SamplingParams) -> SamplingParams:
        return params

    def told(self, t: Trajectory, params: SamplingParams) -> Trajectory:
        return t


@fault("record-equals-recompute", "shifted by one: each token carries the log-probability of the previous one")
def a_shifted_record(bench):
    class Faulty(Recorder):
        def told(self, t, params):
            return replace(t, logprobs=np.roll(t.logprobs, 1))

    return bench.cluster(engine=Faulty)


@fault("record-equals-recompute", "every recorded log-probability is 0", slow=True)
def a_record_of_zeros(bench):
    class Faulty(Recorder):
        def told(self, t, params):
            return replace(t, logprobs=np.zeros_like(t.logprobs))

    return bench.cluster(engine=Faulty)


@fault("record-equals-recompute", "the record was rounded to bfloat16", slow=True)
def a_record_in_bfloat16(bench):
    class Faulty(Recorder):
        def told(self, t, params):
            return replace(t, logprobs=t.logprobs.astype(ml_dtypes.bfloat16).astype(np.float32))

    return bench.cluster(engine=Faulty)


@fault("temperature", "on one side only")
def no_temperature_at_the_sampler(bench):
    class Faulty(Recorder):
        def asked(self, params):
            return replace(params, temperature=1.0) if params.temperature else params

    return bench.cluster(engine=Faulty)


@fault("truncation", "renormalises over what it keeps")
def a_renormalised_record(bench):
    class Faulty(Recorder):
        def told(self, t, params):
            return replace(t, logprobs=t.sampled_logprobs.astype(np.float32), kept_logmass=None)

    return bench.cluster(engine=Faulty)


@fault("version-tags", "not that of the weights that computed it")
def a_version_tag_ahead(bench):
    class Faulty(Recorder):
        def told(self, t, params):
            return replace(t, versions=t.versions + 1)

    return bench.cluster(engine=Faulty)


@fault("seeds", "share one seed")
def one_seed_for_a_group(bench):
    class Faulty(Engine):
        def generate(self, prompts, seeds, params):
            return super().generate(prompts, {k: [own[0]] * len(own) for k, own in seeds.items()}, params)

    return bench.cluster(engine=Faulty)


@fault("seeds", "not what its tokens are drawn with", slow=True)
def seeds_that_are_ignored(bench):
    class Faulty(Engine):
        calls = 0

        def generate(self, prompts, seeds, params):
            self.calls += 1
            return super().generate(prompts, {k: [s ^ self.calls for s in own] for k, own in seeds.items()}, params)

    return bench.cluster(engine=Faulty)


# ---------------------------------------------------------------- tokens


@fault("tokenizer-identity", "made anew from text", slow=True)
def completions_made_anew_from_text(bench):
    tokenizer = bench.base.tokenizer

    class Faulty(Recorder):
        def told(self, t, params):
            ids = tokenizer.encode(tokenizer.decode(t.completion_ids.tolist(), skip_special=False), allow_special=True)
            n = max(1, len(ids))
            return replace(
                t, completion_ids=np.asarray((*ids, 0)[:n], np.int32), logprobs=np.resize(t.logprobs, n),
                versions=np.resize(t.versions, n), kept_logmass=None,
            )  # fmt: skip

    return bench.cluster(engine=Faulty)


@fault("template-identity", "begins with 2 beginning-of-sequence ids")
def a_doubled_beginning_of_sequence(bench):
    bos = bench.base.tokenizer.bos_id

    class Faulty(type(bench.base.task)):
        def prompts(self, cursor, n):
            return [replace(p, ids=(bos, *p.ids)) for p in super().prompts(cursor, n)]

    task = object.__new__(Faulty)
    vars(task).update(vars(bench.base.task))
    return replace(bench.cluster(), task=task)


@fault("eos-ids", "256 '<|endoftext|>' do not")
def a_dropped_end_of_sequence_id(bench):
    sampling = bench.base.sampling
    return bench.cluster(sampling=replace(sampling, stop_ids=sampling.stop_ids - {256}))


# ---------------------------------------------------------------- the trainer


class Stepper(Trainer):
    """Trains on micro-batches that are not quite those that it is given."""

    def step(self, batches, trajectories, update_number, trunks=None, stale=None):
        return super().step([self.taken(b) for b in batches], trajectories, update_number, trunks, stale)

    def taken(self, batch):
        return batch

    def with_mask(self, batch, mask):
        return replace(batch, tokens=batch.tokens._replace(mask=mask))


@fault("masked-garbage", "shifted by one")
def a_mask_off_by_one(bench):
    class Faulty(Stepper):
        def taken(self, batch):
            return self.with_mask(batch, np.roll(batch.tokens.mask, 1))

    return bench.cluster(trainer=Faulty)


@fault("eos-ids", "masked, as padding is")
def padding_that_is_the_end_of_sequence(bench):
    class Faulty(Stepper):
        def taken(self, batch):
            return self.with_mask(batch, batch.tokens.mask & (batch.target != 258))

    return bench.cluster(trainer=Faulty)


@fault("record-equals-recompute", "the training step ignores the temperature", slow=True)
def no_temperature_at_the_trainer(bench):
    class Faulty(Stepper):
        def taken(self, batch):
            return replace(batch, temperature=np.ones_like(batch.temperature))

    return bench.cluster(trainer=Faulty)


@fault("record-guard", "does not compare the record", slow=True)
def a_trainer_that_does_not_look(bench):
    class Faulty(Trainer):
        def _require_record(self, t, recomputed, *, compared):
            pass

    return bench.cluster(trainer=Faulty)


@fault("lr-0-soak", "decay that the rate does not scale", slow=True)
def weights_that_decay_by_themselves(bench):
    class Faulty(Trainer):
        def step(self, *args):
            result = super().step(*args)
            self.trainable = {k: v * 0.999 for k, v in self.trainable.items()}
            return result

    return bench.cluster(trainer=Faulty)


# ---------------------------------------------------------------- the algorithm


def algorithm(bench, kind: type[GRPO]) -> GRPO:
    base = bench.base.trainer.algorithm
    return kind(base.settings, base.length)


@fault("group-permutation", "cut by position")
def groups_by_position(bench):
    class Faulty(GRPO):
        def advantages(self, samples):
            by_position = [str(i // 4) for i in range(len(samples.rewards))]
            return group_scores(replace(samples, group_ids=by_position), "group", self.settings.std_epsilon)

    return bench.cluster(algorithm=algorithm(bench, Faulty))


@fault("equal-rewards", "centred over the batch", slow=True)
def advantages_centred_over_the_batch(bench):
    class Faulty(GRPO):
        def advantages(self, samples):
            r = samples.rewards
            return replace(super().advantages(samples), per_sample=(r - r.mean()) / (r.std() + 1e-4))

    return bench.cluster(algorithm=algorithm(bench, Faulty))


@fault("split-invariance", "means are taken per micro-batch")
def a_mean_per_micro_batch(bench):
    class Faulty(GRPO):
        def loss(self, logp, entropy, tokens, totals):
            return super().loss(logp, entropy, tokens, Totals(tokens.mask.sum(), totals.sequences))

    return bench.cluster(algorithm=algorithm(bench, Faulty))


@fault("policy-gradient", "the sign is flipped")
def a_surrogate_of_the_wrong_sign(bench):
    class Faulty(GRPO):
        def loss(self, logp, entropy, tokens, totals):
            return super().loss(logp, entropy, tokens._replace(advantage=-tokens.advantage), totals)

    return bench.cluster(algorithm=algorithm(bench, Faulty))


def with_kl(algorithm: GRPO, coef: float) -> GRPO:
    return GRPO(algorithm.settings.model_copy(update={"kl_coef": coef}), algorithm.length)


@fault("kl-gradient", "the sign is flipped")
def a_kl_of_the_wrong_sign(bench):
    class Faulty(GRPO):
        def loss(self, logp, entropy, tokens, totals):
            whole = super().loss(logp, entropy, tokens, totals)
            without = with_kl(self, 0.0).loss(logp, entropy, tokens, totals)
            return 2 * without[0] - whole[0], whole[1]

    return bench.cluster(algorithm=algorithm(bench, Faulty))


@fault("kl-gradient", "no gradient", slow=True)
def a_kl_without_gradient(bench):
    class Faulty(GRPO):
        def loss(self, logp, entropy, tokens, totals):
            loss, metrics = with_kl(self, 0.0).loss(logp, entropy, tokens, totals)
            whole = super().loss(logp, entropy, tokens, totals)[0]
            return loss + jax.lax.stop_gradient(whole - loss), metrics

    return bench.cluster(algorithm=algorithm(bench, Faulty))


@fault("kl-at-step-0", "not the policy that the run starts from")
def a_reference_that_is_another(bench):
    cluster = bench.cluster()
    other = {path: leaf * 1.1 for path, leaf in cluster.trainer.frozen.items()}
    reference = cluster.reference
    return replace(cluster, reference=Reference(reference.programs, other, None, reference.geometry, False))


# ---------------------------------------------------------------- sync and loop


class Courier:
    """A sync that does not always run."""

    def __init__(self, sync, local: Local) -> None:
        self.sync, self.local, self.last, self.content = sync, local, None, None

    def relabel(self) -> None:
        """What is served now has the number and digest that were pushed last."""
        self.local.engine._lanes.newest.version = self.last.policy
        self.local.service.serves("rollout", self.last.policy)

    published = property(lambda self: None if self.last is None else self.last.policy)

    def reset(self) -> None:
        self.sync.reset()

    def push(self, number: int, trainable: Mapping[str, jax.Array]):
        content = leaf_digests(trainable)
        if self.last is None or self.runs(content):
            inner = self.sync.published
            receipt = self.sync.push(0 if inner is None else inner.number + 1, trainable)
            self.last = replace(receipt, version=number)
            self.relabel()
        else:
            self.skipped(number, str(hash(tuple(content.values()))))
        self.content = content
        return self.last

    def runs(self, content: Mapping[str, str]) -> bool:
        return True

    def skipped(self, number: int, digest: str) -> None:
        self.last = replace(self.last, version=number, digest=digest)


def with_courier(bench, kind: type[Courier]):
    cluster = bench.cluster()
    return replace(cluster, sync=kind(cluster.sync, cluster.local))


@fault("skipped-sync", "reported success without running")
def a_sync_that_runs_once(bench):
    class Faulty(Courier):
        def runs(self, content):
            return False

    return with_courier(bench, Faulty)


@fault("randomise-then-sync", "believed to be there already", slow=True)
def a_sync_that_remembers_what_it_sent(bench):
    class Faulty(Courier):
        def runs(self, content):
            return content != self.content

        def skipped(self, number, digest):
            super().skipped(number, self.last.digest)
            self.relabel()

    return with_courier(bench, Faulty)


@fault("receipts", "did something else than was planned", slow=True)
def bytes_that_were_not_planned(bench):
    class Faulty(Courier):
        def push(self, number, trainable):
            self.last = replace(super().push(number, trainable), bytes_planned=4096)
            return self.last

    return with_courier(bench, Faulty)


@fault("snapshot", "by something else than the publication")
def a_snapshot_of_the_first_policy(bench):
    class Faulty(Loop):
        def _publish(self, version):
            first, self.snapshots.kept = self.snapshots.kept, []
            receipt = super()._publish(version)
            if first:
                self.snapshots.newest.free()
                self.snapshots.kept = first
            return receipt

    return bench.cluster(), Faulty


@fault("metrics", "made from other samples")
def a_reward_of_the_first_samples_only(bench):
    class Faulty(Loop):
        def _record(self, number: int, found: Experience, result: StepResult):
            record = super()._record(number, found, result)
            return record | {"reward": float(np.mean([t.reward for t in found.everything if t.index == 0]))}

    return bench.cluster(), Faulty


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in FAULTS])
def test_the_audit_names_the_fault(name: str, ask, request: pytest.FixtureRequest) -> None:
    make, bench_name, check, words = FAULTS[name]
    bench = request.getfixturevalue(bench_name)
    made = make(bench)
    cluster, loop = made if isinstance(made, tuple) else (made, Loop)
    checks = ask(bench, cluster, loop)
    failed = {n: c for n, c in checks.items() if c.status == "fail"}
    assert check in failed, failed
    assert words in f"{failed[check].cause}; {failed[check].figure}", failed[check]
    assert all(c.cause and c.remedy for c in failed.values())
    assert len(failed) < 12, sorted(failed)  # it tells faults apart: it does not fail everywhere


def test_there_are_enough_faults() -> None:
    assert (
        len(FAULTS) >= 30 and len(FAULTS) - len(SLOW) >= 20 and len({check for _, _, check, _ in FAULTS.values()}) >= 16
    )
