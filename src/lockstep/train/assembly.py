"""From a recipe to the parts of a run: model, roles on their meshes, engine, trainer, sync."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
import optax

from lockstep.algorithms import make_algorithm
from lockstep.cluster.devices import device_kinds
from lockstep.cluster.mesh import Dial
from lockstep.cluster.programs import Programs, SplitWeights
from lockstep.cluster.sharding import place, shardings
from lockstep.config import Config, LoraConfig, OptimConfig
from lockstep.errors import ConfigError
from lockstep.models import load_model
from lockstep.models.catalog import LoadedModel
from lockstep.models.decoder import Numerics
from lockstep.models.init import init_leaf
from lockstep.models.lora import LoraSpec, adapter_table
from lockstep.models.spec import Leaf, ModelSpec, leaf_table
from lockstep.models.tokenizer import Tokenizer
from lockstep.rollout.engine import Engine, make_fingerprint
from lockstep.sync.select import trainable_leaves
from lockstep.sync.sync import WeightSync
from lockstep.sync.verify import check_same, leaf_digests
from lockstep.train.batching import Geometry
from lockstep.train.trainer import Trainer
from lockstep.types import Fingerprint, SamplingParams

TRAINABLE_DTYPE = "float32"  # master copies: a bfloat16 weight loses updates below 2^-8 of itself


@dataclass(frozen=True)
class Reference:
    """The frozen policy: compiled functions, weights, and its own row geometry. shares_trunk: its layers below the
    first trained one are the actor's own arrays on the actor's mesh, so their output is computed once for both."""

    programs: Programs
    weights: SplitWeights
    geometry: Geometry
    shares_trunk: bool


@dataclass
class Cluster:
    """Everything a step needs. installed: the rollout role's trainable leaves, as last published; rollout_frozen: its
    other leaves."""

    config: Config
    tokenizer: Tokenizer
    spec: ModelSpec
    dial: Dial
    trainer: Trainer
    geometry: Geometry
    engine: Engine
    sampling: SamplingParams
    fingerprint: Fingerprint
    reference: Reference | None
    sync: WeightSync
    rollout_frozen: Mapping[str, jax.Array]
    installed: dict[str, jax.Array]
    source: str
    bytes_per_role: dict[str, dict[str, int]] = field(default_factory=dict)


def lora_spec(config: LoraConfig | None, spec: ModelSpec) -> LoraSpec | None:
    """The adapter's shape. Raises ConfigError when it asks for more layers than there are."""
    if config is None:
        return None
    if config.last_layers > spec.num_layers:
        raise ConfigError(
            f"lora.last_layers = {config.last_layers}, but the model has {spec.num_layers} layers; use 1 to "
            f"{spec.num_layers}, or 0 for all"
        )
    return LoraSpec(config.rank, config.alpha, tuple(config.targets), config.last_layers)


def stop_ids(config: Config, tokenizer: Tokenizer) -> frozenset[int]:
    """The model's end-of-sequence ids, all of them, and the recipe's stop texts."""
    return tokenizer.eos_ids | {tokenizer.single_id(text) for text in config.rollout.stop}


def make_schedule(optim: OptimConfig, steps: int) -> optax.Schedule:
    """Learning rate by update number: linear warm-up to `lr`, then constant, or down to 0 at the last step."""
    rest = max(1, steps - optim.warmup_steps)
    after = {
        "constant": optax.constant_schedule(optim.lr),
        "linear": optax.linear_schedule(optim.lr, 0.0, rest),
        "cosine": optax.cosine_decay_schedule(optim.lr, rest),
    }[optim.schedule]
    if not optim.warmup_steps:
        return after
    # Starts one notch up: update 0 at rate 0 would be a wasted step.
    warm = optax.linear_schedule(optim.lr / optim.warmup_steps, optim.lr, max(1, optim.warmup_steps - 1))
    return optax.join_schedules([warm, after], [optim.warmup_steps])


def make_optimizer(optim: OptimConfig, schedule: optax.Schedule) -> optax.GradientTransformation:
    """AdamW behind global-norm clipping (Loshchilov & Hutter 2019, arXiv:1711.05101)."""
    return optax.chain(
        optax.clip_by_global_norm(optim.max_grad_norm),
        optax.adamw(schedule, b1=optim.betas[0], b2=optim.betas[1], eps=optim.eps, weight_decay=optim.weight_decay),
    )


def make_numerics(config: Config, lora: LoraSpec | None) -> Numerics:
    return Numerics(
        dtype=config.model.dtype,
        tile_rows=config.numerics.tile_rows if config.numerics.mode == "exact" else 0,
        page_size=config.rollout.page_size,
        lora_scale=lora.scale if lora else 0.0,
    )


def initial_trainable(
    params: Mapping[str, np.ndarray], adapter: Mapping[str, Leaf] | None, seed: int
) -> dict[str, np.ndarray]:
    """A fresh adapter (B zero, so the policy starts as the base), or the model's own weights in the master dtype."""
    if adapter is not None:
        return {path: init_leaf(leaf, seed) for path, leaf in adapter.items()}
    return {path: np.asarray(leaf, TRAINABLE_DTYPE) for path, leaf in params.items()}


def build(config: Config) -> Cluster:
    """Load the model and set up every role. Raises before any step if parts do not fit each other."""
    model = load_model(config.model.name, config.model.dtype)
    dial = Dial.from_config(config.cluster)
    spec = model.spec
    lora = lora_spec(config.lora, spec)
    table = leaf_table(spec)
    adapter = adapter_table(spec, lora) if lora else None
    trains = trainable_leaves(table, adapter)
    frozen_table = {} if adapter is None else table
    num = make_numerics(config, lora)
    sampling = SamplingParams(
        config.rollout.temperature, config.rollout.max_new_tokens, stop_ids(config, model.tokenizer)
    )
    longest = config.task.max_prompt_tokens + config.rollout.max_new_tokens
    if longest > spec.max_position:
        raise ConfigError(
            f"task.max_prompt_tokens + rollout.max_new_tokens = {longest}, but {config.model.name} was made for "
            f"{spec.max_position} positions; lower one of them"
        )

    actor_mesh, rollout_mesh = dial.mesh("actor"), dial.mesh("rollout")
    actor = Programs(spec, num, actor_mesh, {**table, **(adapter or {})})
    frozen = place(model.params, frozen_table, actor_mesh) if frozen_table else {}
    trainable = place(initial_trainable(model.params, adapter, config.run.seed), trains, actor_mesh)
    schedule = make_schedule(config.optim, config.run.steps)
    trainer = Trainer(
        actor, frozen, trainable, make_algorithm(config.algorithm), make_optimizer(config.optim, schedule), schedule,
        exact=config.numerics.mode == "exact",
    )  # fmt: skip

    base_digests = leaf_digests(frozen)
    same = dial.colocated("actor", "rollout")
    rollout = actor if same else Programs(spec, num, rollout_mesh, {**table, **(adapter or {})})
    rollout_frozen = frozen
    installed = trainable
    if not same:
        # The frozen weights cross once, here, and are verified like any sync; the trained ones start as zeros, so that
        # a sync that does not arrive cannot go unnoticed.
        rollout_frozen = place(model.params, frozen_table, rollout_mesh) if frozen_table else {}
        check_same(base_digests, leaf_digests(rollout_frozen), "actor", "rollout")
        blank = {path: np.zeros(leaf.shape, TRAINABLE_DTYPE) for path, leaf in trains.items()}
        installed = place(blank, trains, rollout_mesh)
    fingerprint = make_fingerprint(model.tokenizer, sampling, num, device_kinds(list(rollout_mesh.devices.flat)))
    engine = Engine(
        rollout,
        slots=config.rollout.slots,
        max_positions=longest,
        num_pages=config.rollout.num_pages,
        fingerprint=fingerprint,
    )
    cluster = Cluster(
        config=config,
        tokenizer=model.tokenizer,
        spec=spec,
        dial=dial,
        trainer=trainer,
        geometry=_geometry(config, actor),
        engine=engine,
        sampling=sampling,
        fingerprint=fingerprint,
        reference=_reference(config, dial, model, actor, frozen, trainable),
        sync=WeightSync(trains, shardings(trains, rollout_mesh), base=base_digests),
        rollout_frozen=rollout_frozen,
        installed=installed,
        source=model.source,
    )
    cluster.bytes_per_role = _bytes_per_role(cluster)
    return cluster


def _geometry(config: Config, programs: Programs) -> Geometry:
    return Geometry(programs.num_devices, config.train.micro_batch_rows, programs.num.tile_rows, programs.num.page_size)


def _reference(
    config: Config,
    dial: Dial,
    model: LoadedModel,
    actor: Programs,
    frozen: Mapping[str, jax.Array],
    trainable: Mapping[str, jax.Array],
) -> Reference | None:
    """The base under LoRA, else the weights as they are before the first update (arrays never change in place, so with
    the actor's mesh it costs nothing to keep them until then, and one copy afterwards)."""
    if not (config.algorithm.measure_kl or config.algorithm.kl_coef > 0):
        return None
    if dial.colocated("actor", "reference"):
        weights = SplitWeights.of(frozen or trainable, model.spec.num_layers)
        return Reference(actor, weights, _geometry(config, actor), shares_trunk=bool(frozen))
    table = leaf_table(model.spec)
    programs = Programs(model.spec, actor.num, dial.mesh("reference"), table)
    placed = place(model.params, table, dial.mesh("reference"))
    return Reference(
        programs, SplitWeights.of(placed, model.spec.num_layers), _geometry(config, programs), shares_trunk=False
    )


def device_bytes(tree: Any) -> int:
    """Largest number of bytes that one device holds of a tree of arrays."""
    held: dict[Any, int] = {}
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.addressable_shards:
            held[shard.device] = held.get(shard.device, 0) + shard.data.nbytes
    return max(held.values(), default=0)


def _bytes_per_role(cluster: Cluster) -> dict[str, dict[str, int]]:
    """What each role holds on each of its devices, measured from the arrays. An alias counts only what it adds."""
    own = {
        "actor": {
            "parameters": device_bytes(cluster.trainer.params),
            "optimizer": device_bytes(cluster.trainer.optimizer_state),
        },
        "rollout": {"kv": cluster.engine.kv_bytes_per_device()},
    }
    if not cluster.dial.colocated("actor", "rollout"):
        own["rollout"]["parameters"] = device_bytes((cluster.rollout_frozen, cluster.installed))
    if cluster.reference is not None and not cluster.dial.colocated("actor", "reference"):
        weights = cluster.reference.weights
        own["reference"] = {"parameters": device_bytes((weights.embed, weights.layers, weights.head["final_norm"]))}
    return own
