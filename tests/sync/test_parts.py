"""The host's way and the devices' way of cutting and putting together are twins."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from lockstep.cluster.devices import HostMemory
from lockstep.sync import local_device
from lockstep.sync.arrays import placed
from lockstep.sync.ends import numbers_from, renumbered
from lockstep.sync.mapping import FormatMap, Piece, Run, Target, cast_operation, materialise, whole
from lockstep.sync.moves import prepare
from lockstep.sync.parts import DeviceParts, HostParts, cut
from lockstep.sync.planner import make_plan


def mapping(source: str, target: str) -> FormatMap:
    """Transposed into every second column of a padded leaf, taken out of a stack, and as it is."""
    names = (cast_operation(source, target),) if source != target else ()
    runs = (Run(0, 0, 6), Run(0, 1, 8, 1, 2))
    turned = Target("turned", (6, 20), target, (Piece("w", (1, 0), runs),), True, names)
    one = Target(
        "one", (4, 6), target, (Piece("stack", (1, 2), (Run(0, 0, 4), Run(0, 0, 6)), ((0, 1),)),), False, names
    )
    scale = whole("scale", (), source)
    return FormatMap("some", {t.path: t for t in (turned, one, scale)}, {"stack": "one of its two"}, {})


@pytest.mark.parametrize(
    ("source", "target"), [("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "float32")]
)
@pytest.mark.parametrize("replicas", [1, 4])
def test_both_ways_give_the_same_bytes(source, target, replicas):
    devices = np.array(jax.devices())
    held = Mesh(devices[:2], ("a",)) if replicas == 1 else Mesh(devices[:1], ("a",))
    wanted = Mesh(devices[4 : 4 + max(2, replicas)].reshape(replicas, -1), ("copies", "b"))
    rng = np.random.default_rng(0)
    host = {"w": (8, 6), "stack": (2, 4, 6), "scale": ()}
    host = {path: rng.standard_normal(shape, np.float32).astype(np.dtype(source)) for path, shape in host.items()}
    tree = {
        path: jax.device_put(array, NamedSharding(held, P("a") if array.ndim else P())) for path, array in host.items()
    }
    some = mapping(source, target)
    where = {path: NamedSharding(wanted, P(None, "b") if t.shape else P()) for path, t in some.targets.items()}
    numbers = numbers_from(100, where.values())
    blank = {p: jax.device_put(np.zeros(t.shape, np.dtype(t.dtype)), where[p]) for p, t in some.targets.items()}
    places = renumbered({path: placed(leaf) for path, leaf in blank.items()}, numbers)
    plan = make_plan({path: placed(leaf) for path, leaf in tree.items()}, places, some, staging_bytes=200)
    assert plan.relayed == (replicas == 4)
    prepared, memory = prepare(plan), HostMemory()
    ways = HostParts(plan, prepared, numbers, memory), DeviceParts(plan, prepared, numbers)
    shards = {path: {s.device.id: s.data for s in leaf.addressable_shards} for path, leaf in tree.items()}
    for moves in prepared.rounds:
        for move in (move for move in moves if not move.relay):
            shard, wire = shards[move.source][move.sender], plan.leaves[move.target].wire_dtype
            by_host, by_device = cut(shard, move, wire, memory), local_device.cut(shard, move, wire)
            np.testing.assert_array_equal(by_host, by_device)
            assert by_host.dtype == by_device.dtype and by_host.devices() == by_device.devices()
            for way in ways:
                way.take(move, jax.block_until_ready(jax.device_put(by_host, numbers[move.receiver])))
        for move in (move for move in moves if move.relay):
            assert ways[0].relay(move) == ways[1].relay(move)
        jax.block_until_ready(ways[1].pending())
        assert ways[0].pending() == [] == ways[1].pending()
    made = [way.assembled(where) for way in ways]
    for path, t in some.targets.items():
        expected = materialise(t, host)
        for tree in made:
            assert tree[path].sharding == where[path]
            for shard in tree[path].addressable_shards:
                np.testing.assert_array_equal(shard.data, expected[(*shard.index, ...)])
