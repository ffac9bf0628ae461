"""The executor: what a plan says and nothing else, whichever way it is carried out."""

from __future__ import annotations

import gc
import math
import time
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from lockstep.cluster.devices import host_view
from lockstep.errors import SyncError
from lockstep.sync import operations as op
from lockstep.sync.arrays import device_numbers, layout_of, placed, shared_devices
from lockstep.sync.layout import Layout, MeshShape
from lockstep.sync.local import LocalTransport
from lockstep.sync.mapping import FormatMap, Target, materialise, whole
from lockstep.sync.plan import Placed
from lockstep.sync.planner import make_plan
from lockstep.sync.publish import planned_links
from lockstep.sync.transport import Deadline

AXES = ("data", "fsdp", "tensor")


def sharding(devices, sizes, spec, memory=None) -> NamedSharding:
    grid = np.array(jax.devices())[list(devices)].reshape(sizes)
    return NamedSharding(Mesh(grid, AXES[: len(sizes)]), spec, memory_kind=memory)


def noise(shape, dtype, seed=0) -> np.ndarray:
    """Any bit pattern but NaN's, whose payload a cast need not keep."""
    raw = np.random.default_rng(seed).standard_normal(shape, np.float32).astype(jnp.dtype(dtype))
    if raw.size:
        raw.flat[0] = -0.0
    return raw


class Both:
    """Source arrays, destination shardings, and the plan between them."""

    def __init__(self, source, destination, mapping=None, **how):
        self.source, self.destination = source, destination
        held = {path: placed(leaf) for path, leaf in source.items()}
        forms = (
            {p: (leaf.shape, leaf.dtype.name) for p, leaf in source.items()}
            if mapping is None
            else {p: (t.shape, t.dtype) for p, t in mapping.targets.items()}
        )
        wanted = {
            p: Placed(forms[p][0], forms[p][1], layout_of(where, forms[p][0])) for p, where in destination.items()
        }
        self.plan = make_plan(held, wanted, mapping, **how)
        self.numbers = device_numbers(leaf.sharding for leaf in source.values())
        self.there = device_numbers(destination.values())

    def run(self, transport, version=1):
        deadline = Deadline.after(120)
        transport.send(version, self.plan, self.source, self.numbers, deadline)
        staged = transport.receive(version, self.plan, self.destination, self.there, deadline)
        transport.release(version, True)
        return staged


@st.composite
def shardings(draw, shape) -> NamedSharding:
    sizes = draw(st.sampled_from([(1, 1, 1), (2, 1, 1), (1, 2, 2), (2, 2, 2), (1, 4, 1), (2, 1, 4)]))
    # Mostly in order, so that leaves already in place are met too.
    order = draw(st.one_of(st.just(list(range(8))), st.permutations(range(8))))
    entries: list = [None] * len(shape)
    for axis in draw(st.lists(st.sampled_from(AXES), unique=True)):
        dim = draw(st.integers(0, 2))
        if dim < len(shape):
            cut = math.prod(sizes[AXES.index(a)] for a in (*(entries[dim] or ()), axis))
            if shape[dim] % cut == 0:  # jax has no uneven shards
                entries[dim] = (*(entries[dim] or ()), axis)
    return sharding(order[: math.prod(sizes)], sizes, P(*entries))


@st.composite
def targets(draw, name) -> tuple[list[Target], list[Target]]:
    """Source leaves, whole, and what one declared operation makes of them."""
    shape = draw(st.sampled_from([(), (8,), (8, 4), (4, 8, 2), (16, 8)]))
    dtype = draw(st.sampled_from(["float32", "bfloat16"]))
    kinds = ["same", "same", "cast", "transpose", "stack"]
    kinds += ["fuse", "interleave", "every", "pad", "pick"] if shape else []
    kind = draw(st.sampled_from(kinds))
    leaves = [whole(f"{name}.{i}", shape, dtype) for i in range(2 if kind in ("fuse", "interleave", "stack") else 1)]
    dim = draw(st.integers(0, max(0, len(shape) - 1)))
    made = {
        "same": lambda: leaves,
        "cast": lambda: [op.cast(leaves[0], "bfloat16" if dtype == "float32" else "float32")],
        "transpose": lambda: [op.transpose(leaves[0])],
        "stack": lambda: [op.stack(leaves, 0)],
        "fuse": lambda: [op.fuse(leaves, dim)],
        "interleave": lambda: [op.interleave(leaves, dim)],
        "every": lambda: list(op.deinterleave(leaves[0], dim, 2)),
        "pad": lambda: [op.pad(leaves[0], dim, shape[dim] + 4, "it")],
        "pick": lambda: list(op.unstack(leaves[0], dim)),
    }[kind]()
    return leaves, [op.rename(target, f"{name}.to.{i}") for i, target in enumerate(made)]


@st.composite
def problems(draw) -> tuple[dict[str, np.ndarray], dict[str, NamedSharding], dict[str, NamedSharding], FormatMap]:
    values, here, there, table = {}, {}, {}, {}
    for number in range(draw(st.integers(1, 3))):
        leaves, made = draw(targets(f"leaf{number}"))
        for leaf in leaves:
            values[leaf.path] = noise(leaf.shape, leaf.dtype, len(values))
            here[leaf.path] = draw(shardings(leaf.shape))
        goals = draw(st.sampled_from([None, here[leaves[0].path]]))
        for target in made:
            fits = goals is not None and target.shape == leaves[0].shape
            table[target.path] = target
            there[target.path] = goals if fits else draw(shardings(target.shape))
    return values, here, there, FormatMap("random", table, {}, {})


def check_carried_out(problem, way, relay, budget) -> None:
    """The law: gather, make, place - bit for bit, in the plan's bytes, on memory of its own."""
    values, here, there, mapping = problem
    source = {path: jax.device_put(array.copy(), here[path]) for path, array in values.items()}
    try:
        both = Both(source, there, mapping, relay=relay, staging_bytes=budget)
    except SyncError:  # a budget that is too small for the smallest row is refused
        assert budget < 1 << 20
        return
    staged = both.run(LocalTransport(way))
    assert list(staged.tree) == list(mapping.targets)
    assert dict(staged.link_bytes) == planned_links(both.plan)
    oracle = {path: materialise(target, values) for path, target in mapping.targets.items()}
    for path, leaf in both.plan.leaves.items():
        got = staged.tree[path]
        assert got.sharding == there[path] and got.dtype == jnp.dtype(leaf.dtype)
        held = sum(shard.data.nbytes for shard in got.addressable_shards)
        shared = [shared_devices(source[name], got) for name in leaf.sources]
        # All or nothing: on the source's buffers everywhere, or nowhere.
        assert all(len(s) == (len(there[path].device_set) if leaf.in_place and got.size else 0) for s in shared)
        assert leaf.bytes_written == (0 if leaf.in_place else held)
    moved = {path: got for path, got in staged.tree.items() if not both.plan.leaves[path].in_place}
    for leaf in source.values():
        if not any(plan.in_place and leaf is source[plan.sources[0]] for plan in both.plan.leaves.values()):
            leaf.delete()  # what the trainer donates does no harm
    for path, got in {**moved, **{p: g for p, g in staged.tree.items() if p not in moved}}.items():
        for shard in got.addressable_shards:
            assert np.asarray(shard.data).tobytes() == oracle[path][shard.index].tobytes(), path


@settings(max_examples=60)
@given(problems(), st.booleans(), st.sampled_from([1 << 30, 64]))
def test_a_plan_is_carried_out_by_the_host(problem, relay, budget):
    check_carried_out(problem, "host", relay, budget)


@settings(max_examples=12)
@given(problems(), st.booleans(), st.sampled_from([1 << 30, 64]))
def test_a_plan_is_carried_out_by_devices_alone(problem, relay, budget):
    check_carried_out(problem, "device", relay, budget)


def crossing(shape=(64, 32), dtype="float32", **how) -> Both:
    """Rows on four devices to columns on two others, twice."""
    source = {
        "w": jax.device_put(noise(shape, dtype), sharding(range(4), (1, 4, 1), P("fsdp", None))),
        "scale": jax.device_put(noise((), dtype, 1), sharding(range(4), (1, 4, 1), P())),
    }
    where = {
        "w": sharding(range(4, 8), (2, 1, 2), P(None, "tensor")),
        "scale": sharding(range(4, 8), (2, 1, 2), P()),
    }
    return Both(source, where, **how)


@pytest.mark.parametrize("way", ["host", "device"])
def test_relays_pass_on_what_arrived(way):
    source = {"w": jax.device_put(noise((64, 16), "float32"), sharding(range(1), (1, 1, 1), P()))}
    both = Both(source, {"w": sharding(range(1, 8), (7, 1, 1), P())}, staging_bytes=512)
    assert both.plan.relayed and both.plan.rounds > 2
    staged = both.run(LocalTransport(way))
    assert dict(staged.link_bytes) == planned_links(both.plan)
    assert len({s.data.unsafe_buffer_pointer() for s in staged.tree["w"].addressable_shards}) == 7
    for shard in staged.tree["w"].addressable_shards:
        np.testing.assert_array_equal(shard.data, source["w"])


def test_bytes_that_crossed_are_those_of_the_buffers_not_of_the_plan():
    """A plan whose numbers were changed is carried out all the same; the measured bytes stay true."""
    both = crossing()
    true = planned_links(both.plan)
    both.plan = replace(both.plan, links=both.plan.links * 2)
    assert dict(both.run(LocalTransport()).link_bytes) == true != planned_links(both.plan)


def buffers() -> set[int]:
    """Where the data of all live arrays is."""
    return {s.data.unsafe_buffer_pointer() for x in jax.live_arrays() for s in x.addressable_shards}


@pytest.mark.parametrize("way", ["host", "device"])
def test_what_is_in_place_allocates_nothing(way):
    where = sharding(range(4), (1, 2, 2), P("fsdp", "tensor"))
    source = {"w": jax.device_put(noise((8, 8), "float32"), where)}
    transport = LocalTransport(way)
    both = Both(source, {"w": where})
    live = buffers()
    staged = both.run(transport)
    assert staged.tree["w"] is source["w"] and not staged.link_bytes and transport.memory.allocated == 0
    assert buffers() == live
    # The same places under another mesh, and a subset of replicas: other arrays on the same buffers.
    line = jax.device_put(noise((8, 8), "float32"), sharding(range(4), (1, 4, 1), P("fsdp", None)))
    copies = jax.device_put(noise((8,), "float32"), sharding(range(8), (8, 1, 1), P()))
    both = Both(
        {"line": line, "copies": copies},
        {"line": sharding(range(4), (1, 1, 4), P("tensor", None)), "copies": sharding([2, 5], (2, 1, 1), P())},
    )
    staged = both.run(transport)
    assert both.plan.bytes_written == 0 and transport.memory.allocated == 0
    assert (
        len(shared_devices(line, staged.tree["line"])) == 4 and len(shared_devices(copies, staged.tree["copies"])) == 2
    )


def test_shards_that_happen_to_be_in_place_are_copied_with_the_rest():
    array = jax.device_put(noise((8, 8), "float32"), sharding(range(4), (1, 4, 1), P("fsdp", None)))
    both = Both({"w": array}, {"w": sharding([0, 1, 3, 2], (1, 4, 1), P("fsdp", None))})
    staged = both.run(LocalTransport())
    assert both.plan.bytes_written == array.nbytes and both.plan.bytes_crossing == array.nbytes // 2
    assert not shared_devices(array, staged.tree["w"])
    np.testing.assert_array_equal(staged.tree["w"], array)


@pytest.mark.parametrize("way", ["host", "device"])
def test_another_memory_is_another_place(way):
    array = jax.device_put(noise((8, 8), "float32"), sharding(range(2), (1, 2, 1), P("fsdp", None)))
    there = array.sharding.with_memory_kind("pinned_host")
    out = Both({"w": array}, {"w": there}).run(LocalTransport(way)).tree["w"]
    assert out.sharding == there and not shared_devices(array, out)
    back = Both({"w": out}, {"w": array.sharding}).run(LocalTransport(way)).tree["w"]
    assert back.sharding == array.sharding and not shared_devices(out, back)
    assert np.asarray(back).tobytes() == np.asarray(array).tobytes()


def test_memory_is_used_again_only_when_nobody_reads_it():
    both, transport = crossing((256, 64)), LocalTransport("host")
    first = both.run(transport, 1)
    once = transport.memory.allocated
    kept = np.asarray(first.tree["w"]).copy()
    view = first.tree["w"].addressable_shards[0].data
    second = both.run(transport, 2)  # two versions live: memory for both
    assert transport.memory.allocated == 2 * once
    del first
    gc.collect()
    both.source = {p: jax.device_put(np.asarray(x) + 1, x.sharding) for p, x in both.source.items()}
    third = both.run(transport, 3)
    np.testing.assert_array_equal(view, kept[: view.shape[0], : view.shape[1]])
    held = transport.memory.allocated
    assert held <= 2 * once + view.nbytes + 64  # all but the buffer that `view` still reads
    np.testing.assert_array_equal(second.tree["w"], kept)
    np.testing.assert_array_equal(third.tree["w"], kept + 1)
    del second, third, view
    gc.collect()
    transport.memory.trim()
    assert transport.memory.allocated == 0


def test_views_of_arrays_outlive_them():
    """A sync that was given up may still be reading when the trainer has gone on and donated its weights."""
    for dtype in ("float32", "bfloat16", "float8_e4m3fn"):
        array = jax.block_until_ready(jax.device_put(noise((64, 8), dtype), jax.devices()[3]))
        view, kept = host_view(array), np.asarray(array.copy())
        array.delete()
        others = jax.block_until_ready([jax.device_put(np.ones((64, 8)), jax.devices()[3]) for _ in range(4)])
        assert view.tobytes() == kept.tobytes() and not view.flags.writeable, others[0].shape
    array = jax.block_until_ready(jax.device_put(noise((64,), "float32"), jax.devices()[3]) * 2)  # jax's own memory
    view = host_view(array)
    assert view.ctypes.data == array.unsafe_buffer_pointer()
    where = view.ctypes.data
    del view
    plus = jax.jit(lambda x: x + 1, donate_argnums=0)(array)
    assert plus.unsafe_buffer_pointer() == where  # nothing of the view is left


def test_nan_payloads_and_signs_of_zero_cross():
    bits = np.array([0x7FC00001, 0xFFC12345, 0x7F800000, 0x80000000, 1, 0x007FFFFF, 0, 0xFF800000], np.uint32)
    array = jax.device_put(bits.view(np.float32), sharding(range(2), (1, 2, 1), P("fsdp")))
    for way in ("host", "device"):
        out = Both({"w": array}, {"w": sharding([5], (1, 1, 1), P())}).run(LocalTransport(way)).tree["w"]
        assert np.asarray(out).view(np.uint32).tolist() == bits.tolist()


def test_nothing_to_do():
    empty = {"w": jax.device_put(np.zeros((0, 4), np.float32), sharding(range(2), (1, 2, 1), P(None, "fsdp")))}
    for way in ("host", "device"):
        staged = Both(empty, {"w": sharding(range(2, 4), (1, 2, 1), P("fsdp", None))}).run(LocalTransport(way))
        assert staged.tree["w"].shape == (0, 4) and not staged.link_bytes


# -- what does not fit ------------------------------------------------------------------------------------------------


def test_what_was_planned_is_what_is_there_or_it_is_refused():
    both, transport = crossing(), LocalTransport()
    deadline = Deadline.after(60)
    with pytest.raises(SyncError, match=rf"plan {both.plan.hash} of version 3 was not sent here; what was: nothing"):
        transport.receive(3, both.plan, both.destination, both.there, deadline)
    with pytest.raises(SyncError, match="planned with w, which the source lacks"):
        transport.send(3, both.plan, {"scale": both.source["scale"]}, both.numbers, deadline)
    moved = {**both.source, "w": jax.device_put(both.source["w"], jax.devices()[7])}
    with pytest.raises(SyncError, match=r"w is float32\[64, 32\] .*device 7.*was planned as float32\[64, 32\].*fsdp=4"):
        transport.send(3, both.plan, moved, both.numbers, deadline)
    transport.send(3, both.plan, both.source, both.numbers, deadline)
    with pytest.raises(SyncError, match="was not sent here; what was: nothing"):
        transport.receive(4, both.plan, both.destination, both.there, deadline)
    other = {**both.destination, "w": sharding(range(4, 8), (2, 1, 2), P("tensor", None))}
    with pytest.raises(SyncError, match=r"w float32\[64, 32\] is wanted as .* but was planned as"):
        transport.receive(3, both.plan, other, both.there, deadline)
    with pytest.raises(SyncError, match="writes w, for which the destination names no sharding"):
        transport.receive(3, both.plan, {"scale": both.destination["scale"]}, both.there, deadline)
    both.source["w"].delete()
    with pytest.raises(SyncError, match="the source's w deleted or donated"):
        transport.receive(3, both.plan, both.destination, both.there, deadline)
    transport.release(3, True)
    transport.release(3, True)


def test_a_deadline_that_passed_says_who_waited_for_whom():
    both, transport = crossing(), LocalTransport()
    deadline = Deadline.after(1e-3)
    transport.send(9, both.plan, both.source, both.numbers, deadline)
    time.sleep(2e-3)
    with pytest.raises(SyncError, match=r"the sampler waited .* s for the trainer's weights \(.*version 9\)"):
        transport.receive(9, both.plan, both.destination, both.there, deadline)


# -- layouts of shardings ----------------------------------------------------------------------------------------------


def test_layouts_of_shardings():
    where = sharding([3, 1, 0, 2], (1, 2, 2), P(("fsdp", "tensor")))
    layout = layout_of(where, (8, 2))
    assert layout == Layout(
        MeshShape((("data", 1), ("fsdp", 2), ("tensor", 2)), (3, 1, 0, 2)), (("fsdp", "tensor"), ())
    )
    for device, index in where.devices_indices_map((8, 2)).items():
        box = layout.box(device.id, (8, 2))
        assert box == tuple(part.indices(size)[:2] for part, size in zip(index, (8, 2), strict=True))
    assert layout_of(SingleDeviceSharding(jax.devices()[3]), (2,)) == Layout(MeshShape((), (3,)), ((),))
    assert layout_of(where.with_memory_kind("pinned_host"), (8,)).memory == "host"
    with pytest.raises(SyncError, match="'unpinned_host' cannot be planned for"):
        layout_of(where.with_memory_kind("unpinned_host"), (8,))
