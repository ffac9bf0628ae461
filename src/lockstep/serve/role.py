"""The rollout role of a model or a recipe, by itself: leaves, engine, and the replica that weights are synced to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from lockstep.cluster.devices import device_kinds
from lockstep.cluster.mesh import Dial
from lockstep.cluster.programs import Programs
from lockstep.cluster.sharding import place, shardings
from lockstep.cluster.shared import shared_programs
from lockstep.config import Config, load_config
from lockstep.errors import ConfigError
from lockstep.models import load_model
from lockstep.models.catalog import LoadedModel
from lockstep.models.decoder import Numerics
from lockstep.models.quantise import AS_COMPUTED, Storage
from lockstep.models.spec import Leaf, leaf_table
from lockstep.rollout.engine import Engine, make_fingerprint
from lockstep.rollout.generate import PAGE_SIZE, TILE_ROWS
from lockstep.rollout.pool_size import longest_sequence, pages_within, row_bytes
from lockstep.serve.spec import ServeSpec
from lockstep.sync.replica import LocalReplica
from lockstep.sync.transport import Transport
from lockstep.sync.verify import leaf_digests, tree_digest
from lockstep.train.assembly import (
    make_engine,
    make_numerics,
    make_sampling,
    make_storage,
)
from lockstep.train.policy import split_leaves
from lockstep.train.syncing import Scorer
from lockstep.train.trained_model import initial_trainable
from lockstep.types import Fingerprint, PolicyVersion, SamplingParams

BLANK = PolicyVersion(-1, "")  # weights that programs are compiled with, and nobody is served
DEFAULT_POSITIONS = 2048  # a long context that nobody uses would fill the memory with pages


@dataclass(frozen=True)
class Served:
    """What is served, before it is placed anywhere. trains: leaves that versions replace, frozen: the others. dtype: of
    the former in the sampler. sampling: how it is drawn where a request says nothing else; max_positions."""

    model: LoadedModel
    config: Config | None
    trains: Mapping[str, Leaf]
    frozen: Mapping[str, Leaf]
    dtype: str
    sampling: SamplingParams
    max_positions: int

    def first_weights(self) -> dict[str, np.ndarray]:
        """The trained leaves to begin with: the model's own, or a fresh adapter; the trainer's, bit for bit."""
        if self.config is None:
            return {path: np.asarray(self.model.params[path]) for path in self.trains}
        split = split_leaves(self.config, self.model.spec)
        return {
            path: np.asarray(leaf, self.dtype)
            for path, leaf in initial_trainable(self.model.params, split, self.config.run.seed).items()
        }


@dataclass(frozen=True)
class Role:
    """The same, placed: programs, engine (nothing installed), replica (blank, so that weights that do not arrive cannot
    go unnoticed)."""

    served: Served
    engine: Engine
    replica: LocalReplica
    base_digest: str
    fingerprint: Fingerprint


def load_served(spec: ServeSpec, say: Callable[[str], None] | None = None) -> Served:
    """Raises a LockstepError for a model or a recipe that cannot be used, and for sizes that do not fit it."""
    if bool(spec.model) == bool(spec.recipe):
        raise ConfigError("serve: name a model or a recipe, one of the two")
    if spec.recipe:
        config = load_config(spec.recipe, list(spec.overrides))
        model = load_model(config.model.name, config.model.dtype, say=say)
        leaves = split_leaves(config, model.spec)
        longest = longest_sequence(config, model.spec)
        return Served(
            model,
            config,
            leaves.trains,
            leaves.frozen,
            config.model.dtype,
            make_sampling(config, model.tokenizer),
            longest,
        )
    model = load_model(spec.model, spec.dtype, say=say)
    longest = spec.max_positions or min(model.spec.max_position, DEFAULT_POSITIONS)
    if longest > model.spec.max_position:
        raise ConfigError(
            f"serve: {longest} positions were asked for, {spec.model} was made for {model.spec.max_position}; lower "
            "--max-positions"
        )
    sampling = SamplingParams(1.0, 16, frozenset(model.tokenizer.eos_ids))
    return Served(model, None, leaf_table(model.spec), {}, spec.dtype, sampling, longest)


def make_role(
    spec: ServeSpec,
    name: str,
    transport: Transport,
    numbers_of: Callable[[Mapping[str, jax.sharding.Sharding]], Mapping[int, jax.Device]],
    install: Callable[..., None],
    say: Callable[[str], None] | None = None,
) -> Role:
    """numbers_of: device numbers for the plan, from the trained leaves' shardings. install(policy, params): puts a
    version into the engine, frozen leaves included."""
    served = load_served(spec, say)
    model, config = served.model, served.config
    dial = (
        Dial.build({"actor": {}, "rollout": "actor"}, jax.devices()[:1])
        if config is None
        else Dial.from_config(config.cluster)
    )
    mesh = dial.mesh("rollout")
    programs = shared_programs(model.spec, _numerics(spec, served), mesh, {**served.frozen, **served.trains})
    frozen = place(model.params, served.frozen, mesh) if served.frozen else {}
    engine = _engine(spec, served, programs, say)
    where = shardings(served.trains, mesh)
    zeros = {path: np.zeros(leaf.shape, jnp.dtype(served.dtype)) for path, leaf in served.trains.items()}
    blank = place(zeros, served.trains, mesh)
    if spec.warm_up or (config is not None and config.rollout.warm_up):
        engine.install(BLANK, {**frozen, **blank})
        warmed = engine.warm_up(served.sampling)
        if say is not None:
            say(f"{name}: {warmed}")
    base_digest = tree_digest(leaf_digests(frozen)) if frozen else ""
    replica = LocalReplica(
        name,
        blank,
        where,
        transport,
        install=lambda policy, tree: install(policy, {**frozen, **tree}),
        score=Scorer(programs, frozen),
        numbers=numbers_of(where),
        base_digest=base_digest,
    )
    return Role(served, engine, replica, base_digest, engine.fingerprint)


def _numerics(spec: ServeSpec, served: Served) -> Numerics:
    if served.config is not None:
        return make_numerics(served.config, split_leaves(served.config, served.model.spec).lora)
    return Numerics(spec.dtype, TILE_ROWS if spec.numerics == "exact" else 0, PAGE_SIZE)


def _engine(spec: ServeSpec, served: Served, programs: Programs, say: Callable[[str], None] | None) -> Engine:
    model, config = served.model, served.config
    tokenizer, longest = model.tokenizer, served.max_positions
    storage: Storage = AS_COMPUTED if config is None else make_storage(config)
    kinds = device_kinds(list(programs.mesh.devices.flat))
    fingerprint = make_fingerprint(tokenizer, served.sampling, programs.num, kinds, storage)
    decode = partial(tokenizer.decode, skip_special=False)
    if config is None:
        pages = 0
        if spec.kv_memory_mib:
            pages = pages_within(spec.kv_memory_mib << 20, PAGE_SIZE, row_bytes(model.spec, spec.dtype))
        return Engine(
            programs, slots=spec.slots, max_positions=longest, num_pages=pages, decode=decode,
            decode_steps=spec.decode_steps, fingerprint=fingerprint,
        )  # fmt: skip
    return make_engine(config, model, programs, longest, fingerprint, say)
