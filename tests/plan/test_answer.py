"""What a plan says is right: worked by hand, or from what must not depend on the way it was asked."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import lockstep
from lockstep.plan.request import read_grids
from lockstep.plan.words import WIDTH
from lockstep.sync.plan import LinkModel

# Worked by hand. Llama-3.1-8B: D = 4096, F = 14336, V = 128256, 32 layers, KV width 1024, no tied head.
MATRICES = 2 * 128256 * 4096 + 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)  # 8,029,995,008
NORMS = 65 * 4096
# fsdp = 8 cuts every matrix into 8; norms are whole. The rollout holds quarters of the matrices, twice, and all norms;
# it has nothing yet, so everything that it holds crosses, once per replica.
PER_DEVICE = 2 * (MATRICES // 4 + NORMS)  # bytes in bfloat16 that each of the 8 rollout devices takes in
CROSSING = 8 * PER_DEVICE
BOUND = PER_DEVICE / 50e9  # at 400 Gbit/s = 50 GB/s; 8 senders for 8 receivers can do no worse


def test_llama_by_hand(llama) -> None:
    found = llama.plan
    assert MATRICES + NORMS == llama.parameters == 8_030_261_248 and llama.bytes == 16_060_522_496
    assert found.bytes_crossing == found.bytes_written == CROSSING == 32_124_239_872
    assert set(found.received[8:]) == {PER_DEVICE} and set(found.received[:8]) == {0} and found.sent.sum() == CROSSING
    assert found.bounds.seconds == pytest.approx(BOUND) and llama.binding == "receive"
    assert found.new_bytes == PER_DEVICE and llama.bytes_per_device("rollout") == (PER_DEVICE, PER_DEVICE)
    assert llama.bytes_per_device("actor") == (2 * (MATRICES // 8 + NORMS),) * 2
    assert 1 <= found.load_over_bound <= 1.05 and llama.certificate.ok
    # One device gathers the 7/8 of the matrices that it lacks, then sends everything to 8 others.
    naive = llama.alternatives["naive"]
    assert naive.bytes_crossing == 2 * MATRICES * 7 // 8 + 8 * 16_060_522_496
    assert naive.seconds == pytest.approx(naive.bytes_crossing / 50e9) and naive.new_bytes == 16_060_522_496
    assert (llama.alternatives["colocated"].bytes_crossing, llama.alternatives["colocated"].seconds) == (0, 0)


GOLDEN = """
model    llama-3.1-8b: 8,030,261,248 parameters, 14.96 GiB in bfloat16
actor    fsdp=8 on devices 0-7, bfloat16, 1.87 GiB per device
rollout  data=2 tensor=4 on devices 8-15, bfloat16, 3.74 GiB per device

leaves                        bytes
  in place      0 of 291        0 B  the destination reuses the source's buffers
  local         0 of 291        0 B  copied on their own devices, nothing crosses
  over links  291 of 291  29.92 GiB  written into new buffers, replicas included
  written: 29.92 GiB = 29.92 GiB over links + 0 B local + 0 B zeros

largest leaves       shape            each  all cross  cut on actor -> rollout
  embed              128256x4096  1002 MiB  1.957 GiB  (-,fsdp/8) -> (tensor/4,-)
  head               128256x4096  1002 MiB  1.957 GiB  (-,fsdp/8) -> (tensor/4,-)
  layers.*.gate x32  4096x14336    112 MiB      7 GiB  (fsdp/8,-) -> (-,tensor/4)
  layers.*.up x32    4096x14336    112 MiB      7 GiB  (fsdp/8,-) -> (-,tensor/4)
  layers.*.down x32  14336x4096    112 MiB      7 GiB  (-,fsdp/8) -> (tensor/4,-)

load per device       min       max
"""


def test_the_text_of_llama(llama) -> None:
    text = llama.summary
    assert text.startswith(GOLDEN.lstrip()) and str(llama) == text
    assert "receive        3.74 GiB  3.74 GiB  the rollout's 8 devices" in text
    assert "receive 80.3 ms (binds)" in text and "naive             132.7 GiB   2.85 s    14.96 GiB" in text
    assert "rank 16, an adapter of 80 MiB" in text  # 41,943,040 parameters
    for name in ("certificate  ok: mapping, ", "pass nothing on", "plan hash    " + llama.plan.hash, "GiB = 2^30"):
        assert name in text


def all_texts(llama, tiny) -> Iterator[str]:
    yield llama.summary
    yield lockstep.plan_sync("deepseek-v3", actor="pipeline=4,expert=4", rollout="tensor=8").summary
    yield lockstep.plan_sync(
        "gpt-oss-20b", actor="fsdp=4,tensor=2", rollout="tensor=8@0-7", actor_dtype="float32"
    ).summary
    yield lockstep.plan_sync("llama-3.1-8b", actor="fsdp=2", rollout="tensor=16", format="fused").summary
    yield lockstep.plan_sync(tiny, actor="fsdp=2", rollout="actor", lora=2).summary


def test_every_line_fits(llama, tiny) -> None:
    for text in all_texts(llama, tiny):
        assert all(len(line) <= WIDTH for line in text.splitlines()), text


def test_on_one_mesh_nothing_crosses(tiny) -> None:
    for rollout in ("actor", "fsdp=4@0-3"):
        found = lockstep.plan_sync(tiny, actor="fsdp=4", rollout=rollout)
        assert found.request.colocated and found.plan.bytes_written == 0 == found.plan.seconds
        assert all(leaf.in_place for leaf in found.plan.leaves.values()) and found.certificate.ok
        assert f"in place    {len(found.plan.leaves)} of {len(found.plan.leaves)}" in found.summary


def test_a_device_keeps_what_it_has(tiny) -> None:
    """The rollout's devices are the actor's: a quarter of every matrix of the same cut is there already."""
    apart = lockstep.plan_sync(tiny, actor="fsdp=4", rollout="data=4").plan
    shared = lockstep.plan_sync(tiny, actor="fsdp=4", rollout="data=4@0-3").plan
    norms = 7 * 32 * 2
    matrices = shared.bytes_written - 0  # norms are whole on both sides: in place
    assert apart.bytes_crossing == matrices + 4 * norms
    assert shared.bytes_crossing * 4 == matrices * 3


def test_only_the_adapter_crosses_under_lora(tiny) -> None:
    found = lockstep.plan_sync(tiny, actor="fsdp=2", rollout="tensor=2", lora=4)
    assert set(found.plan.leaves) == set(found.selected) and all(".lora_" in path for path in found.plan.leaves)
    assert found.parameters == lockstep.plan_sync(tiny, actor="1", rollout="1").parameters
    assert "lora     rank 4: " in found.summary
    assert found.alternatives["lora"].bytes_crossing == found.plan.bytes_crossing


def test_a_cast_crosses_in_the_smaller_type(tiny) -> None:
    narrow, down, up = (
        lockstep.plan_sync(tiny, actor="fsdp=2", rollout="tensor=2", dtype=dtype, actor_dtype=actor)
        for dtype, actor in (("bfloat16", None), ("bfloat16", "float32"), ("float32", "bfloat16"))
    )
    assert narrow.plan.bytes_crossing == down.plan.bytes_crossing == up.plan.bytes_crossing
    assert up.plan.bytes_written == 2 * down.plan.bytes_written and "as they cross" in up.summary
    assert "every" not in narrow.alternatives["colocated"].how and down.alternatives["colocated"].new_bytes > 0


def test_a_format_is_planned_as_the_engine_holds_it(tiny) -> None:
    found = lockstep.plan_sync(tiny, actor="fsdp=2", rollout="tensor=4", format="fused")
    leaf = found.plan.leaves["model.layers.0.self_attn.qkv_proj.weight"]
    # 4 query heads of 8; the 2 KV heads are repeated for 4 ranks: (4 + 4 + 4) x 8 rows.
    assert leaf.shape == (96, 32) and leaf.sources == ("layers.0.q", "layers.0.k", "layers.0.v")
    assert found.plan.leaves["lm_head.weight"].shape == (128, 32) and leaf.target_layout.parts() == (4, 1)
    assert found.certificate.ok and "3 x (fsdp/2,-) -> (tensor/4,-)" in found.summary
    assert found.to_json()["bytes_filled"] == 2 * 2 * 32 * 32  # the padding of embedding and head


def test_bisection_and_latency_are_in_the_prediction(tiny) -> None:
    slow = LinkModel(link_gbps=8, bisection_gbps=1, latency_s=2.0)
    found = lockstep.plan_sync(tiny, actor="fsdp=2", rollout="tensor=2", link=slow)
    assert found.binding == "bisection" and found.plan.seconds >= 2.0
    assert found.plan.bounds.bisection_s == pytest.approx(found.plan.bytes_crossing * 8 / 1e9)


def test_devices_take_the_next_free_numbers() -> None:
    def numbers(actor: str, rollout: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        found = read_grids(actor, rollout)
        return found[0].devices, found[1].devices

    assert numbers("fsdp=2", "tensor=2") == ((0, 1), (2, 3))
    assert numbers("fsdp=2", "tensor=2@0-1") == ((0, 1), (0, 1))
    assert numbers("fsdp=2@1+3", "tensor=3") == ((1, 3), (0, 2, 4))
    assert numbers("1", "actor") == ((0,), (0,))
    assert read_grids({"fsdp": 2, "devices": [5, 4]}, "actor")[1].devices == (5, 4)
    assert [name for name, _ in read_grids("tensor=2,data=3", "1")[0].axes] == ["data", "tensor"]
