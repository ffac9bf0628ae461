"""What the roles of a cluster hold on their devices, measured."""

from __future__ import annotations

from typing import Any

import jax

from lockstep.cluster.devices import default_memory, snapshot_memory
from lockstep.cluster.quantised_weights import int8_bytes
from lockstep.train.assembly import Cluster
from lockstep.train.stale import versions_kept


def device_bytes(tree: Any) -> int:
    """Largest number of bytes that one device holds of a tree of arrays, an array that occurs twice counted once."""
    held: dict[Any, int] = {}
    for leaf in {id(leaf): leaf for leaf in jax.tree.leaves(tree)}.values():
        for shard in leaf.addressable_shards:
            held[shard.device] = held.get(shard.device, 0) + shard.data.nbytes
    return max(held.values(), default=0)


def snapshot_column(device: jax.Device) -> str:
    """What the snapshot's bytes are listed under: they may lie in the host's memory, not the device's."""
    memory = snapshot_memory(device)
    return "snapshot" if memory == default_memory(device) else f"snapshot ({memory})"


def bytes_per_role(cluster: Cluster) -> dict[str, dict[str, int]]:
    """What each role holds on each of its devices, measured from the arrays. An alias counts only what it adds.

    Two columns come and go within a step, and are of the trained leaves' layout: `gradients`, the sum so far and one
    micro-batch's share of it; `staged`, the new tree of a sync beside the installed one. Activations are not counted.
    """
    trainer, dial = cluster.trainer, cluster.dial
    trained = device_bytes(trainer.trainable)
    held = {
        "actor": {
            "parameters": device_bytes(trainer.params),
            "optimizer": device_bytes(trainer.optimizer_state),
            "gradients": 2 * trained,
            snapshot_column(dial.mesh("actor").devices.flat[0]): versions_kept(cluster.config.rollout) * trained,
        },
    }
    if cluster.local is not None:
        held["rollout"] = {"kv": cluster.engine.kv_bytes_per_device()}
        if cluster.engine.storage.weights == "int8":  # made with the first version, so not there to be measured yet
            held["rollout"]["int8 matrices"] = int8_bytes(cluster.engine.programs.leaves, dial.role("rollout").axes)
    if cluster.own_replica is not None and not dial.colocated("actor", "rollout"):
        held["rollout"]["parameters"] = device_bytes((cluster.rollout_frozen, cluster.replica.installed))
        held["rollout"]["staged"] = device_bytes(cluster.replica.installed)
    if cluster.reference is not None:
        weights = cluster.reference.weights
        # The initial weights of a full-parameter run are the actor's own, yet only until the first update.
        shared = {id(a) for path, a in trainer.params.items() if path not in trainer.trainable}
        shared |= {id(a) for a in cluster.rollout_frozen.values()}
        own = [a for a in jax.tree.leaves((weights.embed, weights.layers, weights.head)) if id(a) not in shared]
        if own:
            held["reference"] = {"parameters": device_bytes(own)}
    if cluster.reward_models:
        scoring = [(w.embed, w.layers, w.head) for w in (model.weights for model in cluster.reward_models)]
        held["reward"] = {"parameters": device_bytes(scoring)}
    if cluster.critic is not None:
        critic = cluster.critic.model
        others = {id(a) for a in trainer.frozen.values()}
        trained = device_bytes(critic.trainable)
        held["critic"] = {
            "parameters": device_bytes([a for a in critic.params.values() if id(a) not in others]),
            "optimizer": device_bytes(critic.optimizer_state),
            "gradients": 2 * trained,
        }
    return held
