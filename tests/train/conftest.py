"""Tiny policies with a trainer around them, and batches of trajectories to train on.

Helpers are handed out by fixtures: test folders are not packages.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import optax
import pytest

from lockstep.algorithms import make_algorithm
from lockstep.algorithms.base import Algorithm
from lockstep.cluster.mesh import Dial
from lockstep.cluster.programs import Programs, SplitWeights
from lockstep.cluster.sharding import place
from lockstep.cluster.shared import shared_programs
from lockstep.config import AlgorithmConfig
from lockstep.models.decoder import Numerics
from lockstep.models.init import init_params
from lockstep.models.lora import LoraSpec, adapter_table
from lockstep.models.spec import LayerKind, Leaf, ModelSpec, Rope, leaf_table
from lockstep.train.batching import Geometry, MicroBatch, make_micro_batches
from lockstep.train.forward import score
from lockstep.train.trainer import StepResult, Trainer
from lockstep.types import Fingerprint, Trajectory

TILE, PAGE = 16, 4
TEMPERATURE = 1.3
FINGERPRINT = Fingerprint("tokenizer", "template", "decoding", "numerics")
# vocabulary 60, width 12, 6 query heads of 4, MLP 20; everything is even, so that two devices can share it.
PLAIN = ModelSpec("llama", 60, 12, 6, 2, 4, 20, (LayerKind(Rope(10000.0)),) * 2, 1e-5, 0.5, 512, tied_head=True)


def grpo(**settings: Any) -> Algorithm:
    """As a recipe with these settings makes it."""
    return make_algorithm(AlgorithmConfig(**({"clip_high": 0.28} | settings)), 8)


def random_tree(leaves: dict[str, Leaf], params: dict[str, np.ndarray], seed: int) -> dict[str, np.ndarray]:
    """`params` with every leaf moved off its initial value, so that no gradient vanishes because a leaf is zero."""
    rng = np.random.default_rng(seed)
    return {p: (params[p] + 0.2 * rng.standard_normal(leaf.shape)).astype(np.float32) for p, leaf in leaves.items()}


@dataclass(eq=False)
class Policy:
    """A model on a mesh, and what of it trains. base and trainable are host arrays."""

    programs: Programs
    base: dict[str, np.ndarray]
    adapter: dict[str, np.ndarray] | None
    leaves: dict[str, Leaf]
    keepers: dict[tuple[Algorithm, bool], Trainer] = field(default_factory=dict)

    @staticmethod
    @cache  # a policy is never changed, and tests that share one share its compiled programs
    def make(
        spec: ModelSpec = PLAIN,
        axes: tuple[tuple[str, int], ...] = (),
        lora: LoraSpec | None = None,
        tile_rows: int = TILE,
        dtype: str = "float32",
        tensor_parts: int | None = None,
    ) -> Policy:
        """tensor_parts: as many as the mesh has devices along `tensor`, if not given."""
        table = leaf_table(spec)
        base = random_tree(table, init_params(spec, 3), 4)
        adapter = adapter_table(spec, lora) if lora else None
        mesh = Dial.build({"actor": dict(axes)}).mesh("actor")
        parts = tensor_parts or mesh.shape["tensor"]
        numerics = Numerics(dtype, tile_rows, PAGE, lora.scale if lora else 0.0, parts)
        programs = shared_programs(spec, numerics, mesh, {**table, **(adapter or {})})
        made = None
        if adapter is not None:
            made = random_tree(adapter, {p: np.zeros(leaf.shape) for p, leaf in adapter.items()}, 5)
        return Policy(programs, base, made, adapter or table)

    @property
    def trainable(self) -> dict[str, np.ndarray]:
        return self.base if self.adapter is None else self.adapter

    @property
    def frozen(self) -> dict[str, np.ndarray]:
        return {} if self.adapter is None else self.base

    def trainer(
        self,
        algorithm: Algorithm | None = None,
        optimizer: optax.GradientTransformation | None = None,
        schedule: Any = None,
        *,
        exact: bool = True,
        **replaced: np.ndarray,
    ) -> Trainer:
        """A fresh trainer. The default optimizer applies nothing and keeps the gradient."""
        table, mesh = leaf_table(self.programs.spec), self.programs.mesh
        return Trainer(
            self.programs,
            place(self.frozen, table, mesh) if self.frozen else {},
            place({**self.trainable, **replaced}, self.leaves, mesh),
            algorithm or grpo(),
            optimizer or optax.chain(optax.trace(0.0), optax.scale(0.0)),
            schedule or optax.constant_schedule(1.0),
            exact=exact,
        )

    def geometry(self, max_rows: int = 1024) -> Geometry:
        return Geometry(self.programs.row_shards, max_rows, self.programs.num.tile_rows, PAGE)

    def micro_batches(
        self, trajectories: list[Trajectory], advantages: np.ndarray, max_rows: int = 1024
    ) -> list[MicroBatch]:
        return make_micro_batches(trajectories, advantages, TEMPERATURE, self.geometry(max_rows))

    def keeper(self, algorithm: Algorithm, exact: bool = True) -> Trainer:
        """A trainer whose weights never move, the same one for the same arguments."""
        if (algorithm, exact) not in self.keepers:
            self.keepers[algorithm, exact] = self.trainer(algorithm, exact=exact)
        return self.keepers[algorithm, exact]

    def gradients(
        self,
        batches: list[MicroBatch],
        trajectories: list[Trajectory],
        algorithm: Algorithm | None = None,
        *,
        exact: bool = True,
        trunks: Any = None,
    ) -> tuple[StepResult, dict[str, np.ndarray]]:
        """One step's result and gradient."""
        trainer = self.keeper(algorithm or grpo(kl_coef=0.2), exact)
        result = trainer.step(batches, trajectories, 0, trunks)
        return result, {p: np.asarray(g) for p, g in trainer.optimizer_state[0].trace.items()}

    def recorded(self, trajectories: list[Trajectory], max_rows: int = 1024, noise: float = 0.0) -> list[Trajectory]:
        """The trajectories as this policy would have recorded them, moved by `noise` (nats, standard deviation)."""
        batches = self.micro_batches(trajectories, np.zeros(len(trajectories)), max_rows)
        weights = SplitWeights.of(self.keeper(grpo(kl_coef=0.2)).params, self.programs.spec.num_layers)
        found: list[np.ndarray | None] = [None] * len(trajectories)
        for batch, flat in zip(batches, score(self.programs, weights, batches), strict=True):
            batch.scatter(flat, found)
        rng = np.random.default_rng(6)
        empty = np.zeros(0, np.float32)
        moved = [lp if lp is not None else empty for lp in found]
        if noise:
            moved = [(lp + noise * rng.standard_normal(len(lp))).astype(np.float32) for lp in moved]
        return [replace(t, logprobs=np.array(lp)) for t, lp in zip(trajectories, moved, strict=True)]


def make_trajectories(seed: int = 0, vocab: int = PLAIN.vocab_size) -> list[Trajectory]:
    """Three ragged groups (4, 3, 4), shuffled, with completions of 1 to 6 tokens and one without any.

    All take 9 to 16 positions and so the same shapes, which keeps the number of compilations down.
    """
    rng = np.random.default_rng(seed)
    made = []
    for g, (length, samples) in enumerate(((11, 4), (9, 3), (10, 4))):
        prompt = rng.integers(0, vocab, length).astype(np.int32)
        for i in range(samples):
            count = 0 if (g, i) == (0, 2) else 1 if (g, i) == (1, 1) else int(rng.integers(2, 7))
            completion = rng.integers(0, vocab, count).astype(np.int32)
            reference = (-3 - rng.random(count)).astype(np.float32)
            made.append(
                Trajectory(
                    prompt, completion, np.zeros(count, np.float32), np.zeros(count, np.int32), "stop", 0,
                    f"group/{g}", i, FINGERPRINT, reference_logprobs=reference,
                )
            )  # fmt: skip
    return [made[i] for i in rng.permutation(len(made))]


@pytest.fixture(scope="session")
def make_policy():
    """Policy.make."""
    return Policy.make


@pytest.fixture(scope="session")
def trajectories() -> list[Trajectory]:
    """`make_trajectories()`, without log-probabilities."""
    return make_trajectories()


@pytest.fixture(scope="session")
def advantages(trajectories: list[Trajectory]) -> np.ndarray:
    """One per trajectory."""
    return np.random.default_rng(7).standard_normal(len(trajectories))


@pytest.fixture(scope="session")
def plain() -> Policy:
    """`PLAIN` on one device, trained whole."""
    return Policy.make()


@pytest.fixture(scope="session")
def record(plain: Policy, trajectories: list[Trajectory]) -> list[Trajectory]:
    """The trajectories as `plain` records them."""
    return plain.recorded(trajectories)
