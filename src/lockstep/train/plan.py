"""What a recipe would do and cost, before anything runs: `lockstep run RECIPE --dry-run`."""

from __future__ import annotations

import numpy as np

from lockstep.cluster.mesh import Dial, format_bytes
from lockstep.cluster.roles import ROLES
from lockstep.cluster.sharding import bytes_per_device, shardings
from lockstep.config import Config
from lockstep.models.catalog import load_spec
from lockstep.models.lora import adapter_table
from lockstep.models.spec import Leaf, ModelSpec, leaf_table, num_parameters
from lockstep.rollout.engine import enough_pages
from lockstep.sync.select import trainable_leaves
from lockstep.sync.transfer import plan_leaf
from lockstep.train.assembly import TRAINABLE_DTYPE, lora_spec


def describe(config: Config) -> str:
    """The resolved recipe, the dial with bytes per device and role, and what a sync costs. No weights are loaded."""
    spec = load_spec(config.model.name)
    lora = lora_spec(config.lora, spec)
    table = leaf_table(spec)
    adapter = adapter_table(spec, lora) if lora else None
    trains = trainable_leaves(table, adapter)
    frozen = {} if adapter is None else table
    dial = Dial.from_config(config.cluster)
    sizes = _bytes(config, dial, spec, frozen, trains)
    trained = sum(leaf.size for leaf in trains.values())
    return "\n".join(
        [
            config.to_toml().rstrip(),
            "",
            f"model: {config.model.name}: {num_parameters(spec):,} parameters, {spec.num_layers} layers, "
            f"{config.model.dtype}; {trained:,} parameters train ({'LoRA' if lora else 'full'}, {TRAINABLE_DTYPE})",
            "",
            dial.describe(sizes, {**table, **(adapter or {})}),
            "",
            _sync_cost(dial, trains),
        ]
    )


def _bytes(
    config: Config, dial: Dial, spec: ModelSpec, frozen: dict[str, Leaf], trains: dict[str, Leaf]
) -> dict[str, dict[str, int]]:
    """Bytes per device and role, by the rules that place the arrays. An alias counts only what it adds."""
    compute, master = np.dtype(_numpy(config.model.dtype)).itemsize, np.dtype(TRAINABLE_DTYPE).itemsize

    def parameters(role: str) -> int:
        axes = dial.role(role).axes
        return bytes_per_device(frozen, axes, compute) + bytes_per_device(trains, axes, master)

    actor = dial.role("actor").axes
    moments = 2 * bytes_per_device(trains, actor, master)
    longest = config.task.max_prompt_tokens + config.rollout.max_new_tokens
    pages = config.rollout.num_pages or enough_pages(config.rollout.slots, longest, config.rollout.page_size)
    rows = pages * config.rollout.page_size + 1
    kv = 2 * spec.num_layers * rows * spec.num_kv_heads * spec.head_dim * compute
    sizes = {"actor": {"parameters": parameters("actor"), "optimizer": moments}, "rollout": {"kv": kv}}
    if not dial.colocated("actor", "rollout"):
        sizes["rollout"]["parameters"] = parameters("rollout")
    if not dial.colocated("actor", "reference"):
        sizes["reference"] = {"parameters": bytes_per_device(leaf_table(spec), dial.role("reference").axes, compute)}
    return {role: sizes[role] for role in ROLES if role in sizes}


def _numpy(dtype: str) -> str:
    return "uint16" if dtype == "bfloat16" else dtype  # of equal size; numpy alone has no bfloat16


def _sync_cost(dial: Dial, trains: dict[str, Leaf]) -> str:
    """One line: what crosses at each step."""
    total = sum(leaf.size for leaf in trains.values()) * np.dtype(TRAINABLE_DTYPE).itemsize
    if dial.colocated("actor", "rollout"):
        return f"sync: {len(trains)} leaves, {format_bytes(total)} train; the same buffers serve both roles, 0 B cross"
    source, destination = (shardings(trains, dial.mesh(role)) for role in ("actor", "rollout"))
    itemsize = np.dtype(TRAINABLE_DTYPE).itemsize
    moves = [plan_leaf(p, source[p], destination[p], leaf.shape, itemsize) for p, leaf in trains.items()]
    written, crossing = sum(m.bytes_planned for m in moves), sum(m.bytes_crossing for m in moves)
    return (
        f"sync: {len(trains)} leaves, {format_bytes(total)} train; each sync writes {format_bytes(written)} on the "
        f"rollout devices (replicas included), of which {format_bytes(crossing)} cross between devices"
    )
