"""What a recipe would do and cost, before anything runs: `lockstep run RECIPE --dry-run`."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import numpy as np

from lockstep.cluster.cuts import bytes_per_device
from lockstep.cluster.mesh import Dial
from lockstep.cluster.quantised_weights import int8_bytes
from lockstep.cluster.roles import ROLES
from lockstep.config import Config, CriticConfig
from lockstep.models.catalog import load_spec, require_weights
from lockstep.models.parts import whole_blocks
from lockstep.models.spec import ModelSpec, leaf_table, num_parameters, require_policy
from lockstep.plan.answer import plan_of
from lockstep.plan.request import request_of_recipe
from lockstep.rollout.pool_size import (
    describe_pool,
    head_shares,
    longest_sequence,
    pages_of_recipe,
    pool_bytes,
    row_bytes,
)
from lockstep.text import format_bytes
from lockstep.train.footprint import snapshot_column
from lockstep.train.policy import TRAINABLE_DTYPE, LeafSplit, sampler_dtype, split_leaves, trained_leaves
from lockstep.train.reference import measures_kl
from lockstep.train.stale import versions_kept


def describe(config: Config) -> str:
    """The resolved recipe, the dial with bytes per device and role, and what a sync costs. No weights are loaded.

    Raises a LockstepError for what could not run: a model that can only be planned among them.
    """
    require_weights(config.model.name)
    spec = load_spec(config.model.name)
    require_policy(spec, config.model.name)
    leaves = split_leaves(config, spec)
    dial = Dial.from_config(config.cluster)
    sizes = planned_bytes(config, dial, spec, leaves)
    pages, nbytes = planned_pool(config, spec)
    trained = sum(leaf.size for leaf in leaves.trains.values())
    return "\n".join(
        [
            config.to_toml().rstrip(),
            "",
            f"model: {config.model.name}: {num_parameters(spec):,} parameters, {spec.num_layers} layers, "
            f"{config.model.dtype}; {trained:,} parameters train ({'LoRA' if leaves.lora else 'full'}, "
            f"{TRAINABLE_DTYPE})",
            "",
            dial.describe(sizes, leaves.all),
            *whole_blocks(spec, config.numerics.parts_on(config.cluster)),
            "gradients and staged copies are held for part of each step; activations come on top and are not counted",
            "",
            describe_pool(pages, config.rollout.page_size, longest_sequence(config, spec), nbytes)
            if config.rollout.url is None
            else f"completions are sampled by {config.rollout.url}, which holds its own copy of the weights",
            _sync_cost(config),
        ]
    )


def planned_bytes(config: Config, dial: Dial, spec: ModelSpec, leaves: LeafSplit) -> dict[str, dict[str, int]]:
    """Bytes per device and role, by the rules that place the arrays: the columns of `footprint.bytes_per_role`.

    Raises ConfigError if the model has too few positions for the recipe.
    """
    # jax's reading of the names: numpy alone knows no bfloat16.
    compute, master = jnp.dtype(config.model.dtype).itemsize, jnp.dtype(TRAINABLE_DTYPE).itemsize

    sampler = jnp.dtype(sampler_dtype(config)).itemsize

    def parameters(role: str, trained: int) -> int:
        axes = dial.role(role).axes
        return bytes_per_device(leaves.frozen, axes, compute) + bytes_per_device(leaves.trains, axes, trained)

    actor = dial.role("actor").axes
    # Adam's two moments, its counter, and the schedule's.
    trained = bytes_per_device(leaves.trains, actor, master)
    moments = 2 * trained + 2 * np.dtype(np.int32).itemsize
    sizes = {
        "actor": {
            "parameters": parameters("actor", master),
            "optimizer": moments,
            "gradients": 2 * trained,
            snapshot_column(dial.mesh("actor").devices.flat[0]): versions_kept(config.rollout) * trained,
        },
    }
    if config.rollout.url is None:
        sizes["rollout"] = {"kv": planned_pool(config, spec)[1]}
    if config.rollout.url is None and config.rollout.weights_dtype == "int8":
        sizes["rollout"]["int8 matrices"] = int8_bytes(leaves.all, dial.role("rollout").axes)
    if not dial.colocated("actor", "rollout"):
        sizes["rollout"]["parameters"] = parameters("rollout", sampler)
        sizes["rollout"]["staged"] = bytes_per_device(leaves.trains, dial.role("rollout").axes, sampler)
    if measures_kl(config) and (held := _reference_bytes(config, dial, spec, leaves)):
        sizes["reference"] = {"parameters": held}
    if config.reward.models:
        axes, tables = dial.role("reward").axes, [leaf_table(load_spec(m.model)) for m in config.reward.models]
        sizes["reward"] = {"parameters": sum(bytes_per_device(table, axes, compute) for table in tables)}
    if config.critic is not None:
        sizes["critic"] = _critic_bytes(config, config.critic, dial, spec)
    return {role: sizes[role] for role in ROLES if role in sizes}


def _reference_bytes(config: Config, dial: Dial, spec: ModelSpec, leaves: LeafSplit) -> int:
    """What the reference adds. What trains, it keeps as it was, or as it followed; the rest it may share."""
    compute, master = jnp.dtype(config.model.dtype).itemsize, jnp.dtype(TRAINABLE_DTYPE).itemsize
    axes, moves = dial.role("reference").axes, config.algorithm.reference_every > 0
    shares_frozen = leaves.frozen and any(dial.colocated(role, "reference") for role in ("actor", "rollout"))
    own = bytes_per_device(leaves.trains, axes, master)
    if shares_frozen:
        return own if moves else 0
    if dial.colocated("actor", "reference"):
        return own
    if moves:
        return own + bytes_per_device(leaves.frozen, axes, compute)
    return bytes_per_device(leaf_table(spec), axes, compute)


def _critic_bytes(config: Config, critic: CriticConfig, dial: Dial, policy: ModelSpec) -> dict[str, int]:
    """The critic's columns. An adapter on the actor's own frozen arrays adds the adapter and the head only."""
    compute, master = jnp.dtype(config.model.dtype).itemsize, jnp.dtype(TRAINABLE_DTYPE).itemsize
    spec = policy if critic.model is None else load_spec(critic.model)
    leaves, axes = trained_leaves(critic.lora, replace(spec, scalar_head=True)), dial.role("critic").axes
    shares = critic.model is None and config.lora is not None and dial.colocated("actor", "critic")
    trained = bytes_per_device(leaves.trains, axes, master)
    return {
        "parameters": trained + (0 if shares else bytes_per_device(leaves.frozen, axes, compute)),
        "optimizer": 2 * trained + 2 * np.dtype(np.int32).itemsize,
        "gradients": 2 * trained,
    }


def planned_pool(config: Config, spec: ModelSpec) -> tuple[int, int]:
    """(pages, bytes) of the sampler's key-value cache on each device."""
    longest, rollout, dtype = longest_sequence(config, spec), config.rollout, config.model.dtype
    shares = head_shares(config, spec)
    pages = pages_of_recipe(rollout, spec, dtype, longest, shares)
    return pages, pool_bytes(pages, rollout.page_size, row_bytes(spec, dtype, rollout.kv_dtype, shares))


def _sync_cost(config: Config) -> str:
    """One line: what crosses at each step."""
    request = request_of_recipe(config)
    plan = plan_of(request)
    trains = f"sync: {len(plan.leaves)} leaves, {format_bytes(sum(leaf.bytes for leaf in plan.leaves.values()))} train"
    if request.colocated:
        return f"{trains}; the same buffers serve both roles, 0 B cross"
    return (
        f"{trains}; each sync writes {format_bytes(plan.bytes_written)} on the rollout devices (replicas included), of "
        f"which {format_bytes(plan.bytes_crossing)} cross between devices (`lockstep plan --recipe` shows how)"
    )
