"""What is being audited: the recipe's own cluster in small sizes, and what several checks ask of it.

Everything goes through what a run itself uses: `engine.generate`, `sync.push`, `trainer.step`, `Loop.step`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from lockstep.algorithms.base import Advantages, Samples
from lockstep.algorithms.checked import judged
from lockstep.audit.soak import Soak
from lockstep.cluster.devices import device_kinds
from lockstep.cluster.programs import SplitWeights
from lockstep.config import Config, OptimConfig
from lockstep.envs.base import Score
from lockstep.envs.rewards import Reward
from lockstep.rollout.engine import make_fingerprint, request_seed
from lockstep.sync.receipt import SyncReceipt
from lockstep.train.assembly import Cluster, make_storage
from lockstep.train.batching import MicroBatch, make_micro_batches
from lockstep.train.forward import score
from lockstep.train.loop import Loop
from lockstep.train.optimizer import make_optimizer
from lockstep.train.syncing import PROBE_BOUND
from lockstep.train.trainer import StepResult, Trainer
from lockstep.types import Fingerprint, Prompt, SamplingParams, Trajectory

PROMPTS, SAMPLES, NEW_TOKENS = 4, 4, 16  # at most
STILL_STEPS, MOVING_STEPS = 2, 2
CHECKPOINT_BYTES = 512 << 20  # a larger one is not tried: writing it would take longer than all the rest
MOVING_LR = 1e-3  # what makes a step visible in float32, whatever the recipe's rate
STRENGTH = 0.1  # of a perturbation, relative to a leaf's own size (root mean square; 1 where the leaf is all zeros)
VISIBLE = 0.05  # nats per token by which a perturbation has to move the policy; else it is made stronger, RAISED times
RAISED, FACTOR = 4, 4
QUANTISED_BOUND = 20.0  # nats of one token: a rare one is far off, so the effective sample size is what judges

Tree = Mapping[str, jax.Array]


def in_small(config: Config, folder: Path) -> Config:
    """The recipe with fewer and shorter samples, writing to `folder`. What decides a number stays as it is."""
    rollout, tile = config.rollout, config.numerics.tile_rows if config.numerics.mode == "exact" else 1
    prompts, samples = min(PROMPTS, rollout.prompts), min(SAMPLES, rollout.samples)
    slots = min(rollout.slots, -(-prompts * samples // tile) * tile)
    changed: dict[str, dict[str, Any]] = {
        "run": {"name": "audit", "dir": str(folder), "steps": STILL_STEPS + MOVING_STEPS, "checkpoint_every": 0},
        "rollout": {
            "prompts": prompts,
            "samples": samples,
            "slots": slots,
            "num_pages": 0,
            "kv_memory_mib": 0,
            "max_new_tokens": min(NEW_TOKENS, rollout.max_new_tokens),
            "staleness": 0,
            "url": None,
            "token_file": None,
        },
        # One update a step, so that a step's rate is its update's; the trainer's program is the same.
        "train": {"select": "all", "select_count": 0, "save_trajectories": True, "epochs": 1, "mini_batches": 1},
        "algorithm": {"mask_truncated": False},  # that samples are cut so early is the audit's doing
    }
    if config.critic is not None:
        changed["critic"] = {"warmup_steps": 0}  # what is looked at is the policy's training
    return config.model_copy(
        update={name: getattr(config, name).model_copy(update=values) for name, values in changed.items()}
    )


class SpreadReward(Reward):
    """In place of the recipe's: no judge is called, and every group has something to learn from."""

    def score(self, prompts: Sequence[Prompt], completions: Sequence[str]) -> list[Score]:
        """Sample i of a batch earns the i-th number of a fixed sequence."""
        values = [((i * 7 + 3) % 10) / 10 for i in range(len(completions))]
        return [Score(value, {"audit": value}) for value in values]


def remade(trainer: Trainer, config: Config) -> Trainer:
    """The same trainer (class, programs, weights, algorithm) with an optimizer that keeps the gradient, stands still,
    moves, and stands still again; it measures a mismatch where the run's own would stop."""
    schedule, optimizer = _measuring(config.optim)
    return type(trainer)(
        trainer.programs, trainer.frozen, trainer.trainable, trainer.algorithm, optimizer, schedule, exact=False
    )


@cache
def _measuring(optim: OptimConfig) -> tuple[optax.Schedule, optax.GradientTransformation]:
    moves = [0.0, MOVING_LR, 0.0]
    schedule = optax.join_schedules(
        [optax.constant_schedule(rate) for rate in moves], [STILL_STEPS, STILL_STEPS + MOVING_STEPS]
    )
    # A trace that forgets everything holds the newest gradient.
    return schedule, optax.chain(optax.trace(0.0), make_optimizer(optim, schedule))


@dataclass
class Subject:
    """A cluster under audit.

    cluster: as `assembly.build` made it from `in_small` of the recipe, or with parts replaced. folder: empty, for what
    the loop writes. recipe: in full size. loop: the loop's class. measuring: what `remade` made of the cluster's
    trainer, where that is there already.
    """

    cluster: Cluster
    folder: Path
    recipe: Config
    loop: type[Loop] = Loop
    measuring: Trainer | None = None
    history: list[tuple[int, Tree]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.built = self.cluster.trainer
        self.cluster.trainer = self.measuring or remade(self.built, self.cluster.config)
        self.cluster.reward.close()
        self.cluster.reward = SpreadReward({}, {}, "fail")
        if self.checkpoint_bytes > CHECKPOINT_BYTES:  # one step more than are run: the loop saves the last one
            run = self.config.run
            self.cluster.config = self.config.model_copy(
                update={"run": run.model_copy(update={"steps": run.steps + 1})}
            )
        self._noise, self._strength = 0, STRENGTH

    # -- words ---------------------------------------------------------------------------------------------------------

    @property
    def config(self) -> Config:
        return self.cluster.config

    @property
    def exact(self) -> bool:
        return self.config.numerics.mode == "exact"

    @property
    def bound(self) -> float:
        """Nats by which a record may be off: none in exact mode, else what rounding alone may make, or eight bits."""
        if make_storage(self.config).quantised:
            return QUANTISED_BOUND
        return 0.0 if self.exact else PROBE_BOUND[self.config.model.dtype]

    @property
    def temperature(self) -> float:
        return self.config.rollout.temperature

    @property
    def checkpoint_bytes(self) -> int:
        """Of what trains and its optimizer state."""
        trainer = self.cluster.trainer
        return sum(leaf.nbytes for leaf in jax.tree.leaves((trainer.trainable, trainer.optimizer_state)))

    def sizes(self) -> str:
        r = self.config.rollout
        return (
            f"{r.prompts} prompts x {r.samples} samples of up to {r.max_new_tokens} tokens, at temperature "
            f"{r.temperature:g}; {STILL_STEPS} steps at learning rate 0, {MOVING_STEPS} at {MOVING_LR:g}; rewards are "
            f"the audit's own"
        )

    # -- the sampler's side --------------------------------------------------------------------------------------------

    @cached_property
    def prompts(self) -> list[Prompt]:
        """The recipe's first prompts, each once."""
        found = self.cluster.task.prompts(0, self.config.rollout.prompts)
        return list({p.id: p for p in found}.values())

    def seeds(self, prompts: Sequence[Prompt], samples: int) -> dict[str, list[int]]:
        return {p.id: [request_seed(self.config.run.seed, 0, p.id, i) for i in range(samples)] for p in prompts}

    def generate(
        self, *, prompts: Sequence[Prompt] | None = None, samples: int | None = None, **changed: Any
    ) -> list[Trajectory]:
        """Samples under the recipe's parameters. changed: fields of `SamplingParams`."""
        asked = self.prompts if prompts is None else prompts
        params: SamplingParams = replace(self.cluster.sampling, **changed)
        count = self.config.rollout.samples if samples is None else samples
        engine = self.cluster.engine
        try:
            return engine.generate(asked, self.seeds(asked, count), params)
        except Exception:
            for prompt in asked:  # the other checks sample too
                engine.abort(prompt.id)
            raise

    def greedy(self) -> list[Trajectory]:
        """One greedy sample per prompt, of a few tokens: what a change of weights shows in."""
        return self.generate(samples=1, temperature=0.0, max_new_tokens=min(8, self.config.rollout.max_new_tokens))

    def policy(self, trainable: Tree) -> dict[str, jax.Array]:
        """All leaves as the engine takes them, with `trainable` for what trains, where the sampler is."""
        installed = self.cluster.replica.installed
        moved = {path: jax.device_put(leaf.astype(installed[path].dtype), installed[path].sharding)
                 for path, leaf in trainable.items()}  # fmt: skip
        return {**self.cluster.rollout_frozen, **moved}

    @property
    def full_fingerprint(self) -> Fingerprint:
        """As a run of the recipe in full size makes it here."""
        cluster = self.cluster
        sampling = replace(cluster.sampling, max_new_tokens=self.recipe.rollout.max_new_tokens)
        programs = cluster.engine.programs
        kinds = device_kinds(list(programs.mesh.devices.flat))
        return make_fingerprint(cluster.tokenizer, sampling, programs.num, kinds, make_storage(self.config))

    # -- the sync ------------------------------------------------------------------------------------------------------

    def publish(self, trainable: Tree) -> SyncReceipt:
        """These weights to the sampler, as the next version."""
        last = self.cluster.sync.published
        self.cluster.sync.reset()
        receipt = self.cluster.sync.push(0 if last is None else last.number + 1, trainable)
        self.history.append((receipt.version, trainable))
        return receipt

    def perturbed(self, pure: bool = False) -> dict[str, jax.Array]:
        """What trains, with noise on every leaf (`pure`: nothing but noise), and other noise each time."""
        self._noise += 1
        keys = jax.random.split(jax.random.key(self._noise), len(self.initial))
        return {
            path: jax.device_put(_noisy(leaf, key, self._strength, 0.0 if pure else 1.0), leaf.sharding)
            for key, (path, leaf) in zip(keys, self.initial.items(), strict=True)
        }

    @cached_property
    def initial(self) -> dict[str, jax.Array]:
        """What trains, as the run starts."""
        return dict(self.built.trainable)

    @cached_property
    def moved(self) -> dict[str, jax.Array]:
        """What trains, perturbed so that the outputs move clearly: the weights under which records are compared, since
        an adapter starts as zero and an idle part of the policy hides its faults."""
        known = [t for step in self.soak.steps[:1] for t in step.trajectories if len(t.completion_ids)][:SAMPLES]
        before = self.scored(known, self.initial) if known else []
        for _ in range(RAISED if known else 0):
            tree = self.perturbed()
            if gap(before, self.scored(known, tree)) >= VISIBLE:
                return tree
            self._strength *= FACTOR
        return self.perturbed()

    @contextmanager
    def under(self, trainable: Tree) -> Iterator[None]:
        """Trainer and sampler on these weights; the trainer's own come back."""
        trainer = self.cluster.trainer
        before, trainer.trainable = trainer.trainable, dict(trainable)
        try:
            published = self.history[-1][1] if self.history else None
            if published is not trainable:
                self.publish(trainable)
            yield
        finally:
            trainer.trainable = before

    # -- the trainer's side --------------------------------------------------------------------------------------------

    def micro_batches(
        self,
        trajectories: Sequence[Trajectory],
        advantages: np.ndarray | None = None,
        temperature: float | None = None,
        **geometry: int,
    ) -> list[MicroBatch]:
        """As the recipe lays them out; geometry: fields of `Geometry` that differ."""
        signal = np.zeros(len(trajectories)) if advantages is None else advantages
        at = self.temperature if temperature is None else temperature
        return make_micro_batches(trajectories, signal, at, replace(self.cluster.geometry, **geometry))

    def scored(
        self,
        trajectories: Sequence[Trajectory],
        trainable: Tree | None = None,
        temperature: float | None = None,
        weights: SplitWeights | None = None,
    ) -> list[np.ndarray]:
        """The trainer's log-probabilities under any weights: a forward pass."""
        trainer = self.cluster.trainer
        if weights is None:
            chosen = trainer.trainable if trainable is None else trainable
            weights = SplitWeights.of({**trainer.frozen, **chosen}, self.cluster.spec.num_layers)
        batches = self.micro_batches(trajectories, temperature=temperature)
        found: list[np.ndarray | None] = [np.zeros(0, np.float32)] * len(trajectories)
        for batch, flat in zip(batches, score(trainer.programs, weights, batches), strict=True):
            batch.scatter(flat, found)
        return [part for part in found if part is not None]

    def step(
        self, batches: Sequence[MicroBatch], trajectories: Sequence[Trajectory]
    ) -> tuple[StepResult, dict[str, jax.Array]]:
        """A training step that moves nothing: its result and its gradient."""
        trainer = self.cluster.trainer
        before = trainer.trainable
        result = trainer.step(batches, trajectories, STILL_STEPS + MOVING_STEPS)
        gradient = {path: jnp.copy(g) for path, g in trainer.optimizer_state[0].trace.items()}
        trainer.trainable = before
        return result, gradient

    # -- what several checks look at -----------------------------------------------------------------------------------

    @cached_property
    def soak(self) -> Soak:
        """The loop's few steps; the first thing that an audit does with its cluster."""
        return Soak.run(self.loop, self.cluster, self.folder, STILL_STEPS, MOVING_STEPS)

    @cached_property
    def batch(self) -> list[Trajectory]:
        """What the sampler records under `moved`, with reference log-probabilities where the loss reads them."""
        with self.under(self.moved):
            made = self.generate()
        if not self.cluster.trainer.algorithm.kl_in_loss:
            return made
        rng = np.random.default_rng(5)
        return [
            replace(t, reference_logprobs=t.logprobs + rng.normal(0, 0.1, len(t.logprobs)).astype(np.float32))
            for t in made
        ]

    @cached_property
    def advantages(self) -> np.ndarray:
        """One for each trajectory of `batch`, none of them near zero."""
        rng = np.random.default_rng(6)
        return rng.choice([-1.0, 1.0], len(self.batch)) * rng.uniform(0.5, 1.5, len(self.batch))

    def judged(self, rewards: Sequence[float] | np.ndarray, groups: Sequence[str]) -> Advantages:
        """What the algorithm makes of rewards of samples of one token each; where there is a critic, it expects 0."""
        algorithm = self.cluster.trainer.algorithm
        values = [np.zeros(1)] * len(groups) if algorithm.needs_values else None
        return judged(algorithm, Samples.of([float(r) for r in rewards], groups, values=values))

    @cached_property
    def trained(self) -> tuple[StepResult, dict[str, jax.Array]]:
        """Result and gradient of `batch` under `moved`, cut as the recipe cuts it; other cuts are compared with it."""
        with self.under(self.moved):
            return self.step(self.micro_batches(self.batch, self.advantages), self.batch)


@jax.jit
def _noisy(leaf: jax.Array, key: jax.Array, strength: float, keep: float) -> jax.Array:
    size = jnp.sqrt(jnp.mean(leaf.astype(jnp.float32) ** 2))
    noise = jax.random.normal(key, leaf.shape, jnp.float32) * strength * jnp.where(size > 0, size, 1.0)
    return (keep * leaf.astype(jnp.float32) + noise).astype(leaf.dtype)


def distance(a: Tree, b: Tree) -> float:
    """|a - b| / |b| over all leaves together; inf where a holds what is not a number."""
    apart, size = (float(x) for x in _norms(dict(a), {path: b[path] for path in a}))
    return apart / size if size else (0.0 if apart == 0 else float("inf"))


@jax.jit
def _norms(a: dict[str, jax.Array], b: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    apart = optax.global_norm(jax.tree.map(jnp.subtract, a, b))
    return jnp.where(jnp.isfinite(apart), apart, jnp.inf), optax.global_norm(b)


def gap(a: Sequence[np.ndarray], b: Sequence[np.ndarray]) -> float:
    """Mean |a - b| over all tokens; 0 where there is none."""
    pairs = [(x.astype(np.float64), y.astype(np.float64)) for x, y in zip(a, b, strict=True) if len(x)]
    if not pairs:
        return 0.0
    return float(np.abs(np.concatenate([x - y for x, y in pairs])).mean())


def same_bits(a: Sequence[np.ndarray], b: Sequence[np.ndarray]) -> bool:
    """Whether two lists of arrays hold the same bits."""
    return len(a) == len(b) and all(
        x.dtype == y.dtype and x.tobytes() == y.tobytes() for x, y in zip(a, b, strict=True)
    )
