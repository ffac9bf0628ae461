"""Tables of engines: total on both sides, made of the right parts, the same attention whatever was done to heads."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lockstep.errors import SyncError
from lockstep.models.families import name_map
from lockstep.models.spec import Experts, LayerKind, ModelSpec, Rope, leaf_table
from lockstep.sync.certificate import check
from lockstep.sync.formats import FORMATS, engine_map, forms, from_hf_map, hf_map, native_forms
from lockstep.sync.layout import Layout, MeshShape
from lockstep.sync.mapping import FormatMap, check_total, materialise
from lockstep.sync.plan import Placed
from lockstep.sync.planner import make_plan


def model(family: str, heads: int, kv: int, dim: int = 12, head_dim: int = 4, **changes: object) -> ModelSpec:
    layers = (LayerKind(Rope(10_000.0)),) * 2
    spec = ModelSpec(family, 10, dim, heads, kv, head_dim, 144, layers, 1e-5, 0.5, 64)
    return replace(spec, **changes)  # type: ignore[arg-type]


EXPERTS = Experts(num=3, per_token=2, mlp_dim=4)
MIXED = (LayerKind(Rope(1e4), experts=True),) * 2
SPECS = {
    "smollm2": model("llama", 9, 3, tied_head=True),  # 9 query heads on 3 KV heads, as the 135M model
    "qwen2": model("qwen2", 16, 2, qkv_bias=True),  # 16 on 2, as Qwen2.5-3B
    "qwen3": model("qwen3", 4, 4, qk_norm=True, tied_head=True),
    "qwen3_moe": model("qwen3_moe", 4, 2, qk_norm=True, layers=MIXED, experts=EXPERTS),
    "gpt_oss": model(
        "gpt_oss", 4, 2, qkv_bias=True, o_bias=True, sinks=True, layers=MIXED,
        experts=replace(EXPERTS, bias=True, fused=True),
    ),
}  # fmt: skip


def weights(spec: ModelSpec) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {p: random.standard_normal(leaf.shape).astype(np.float32) for p, leaf in leaf_table(spec).items()}


def made(mapping: FormatMap, source: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {path: materialise(target, source) for path, target in mapping.targets.items()}


def total(mapping: FormatMap, spec: ModelSpec, dtype: str = "float32") -> FormatMap:
    check_total(mapping, native_forms(spec, dtype), forms(mapping))
    return mapping


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("fmt", FORMATS)
def test_every_table_is_total(name: str, fmt: str) -> None:
    spec = SPECS[name]
    if spec.family in FORMATS[fmt].families:
        total(engine_map(fmt, spec, "float32", to="bfloat16", own_head=True), spec)
    else:
        with pytest.raises(SyncError, match=f"no table for the model family '{spec.family}'; it has those of llama, "):
            engine_map(fmt, spec, "float32")


@pytest.mark.parametrize("name", SPECS)
def test_hf_is_what_checkpoints_hold_and_back(name: str) -> None:
    spec = SPECS[name]
    leaves = weights(spec)
    tensors = made(total(hf_map(spec, "float32"), spec), leaves)
    expected: dict[str, np.ndarray] = {}
    for path, ref in name_map(spec).items():
        expected |= ref.spread(leaves[path], range(len(ref.names)))
    assert tensors.keys() == expected.keys()
    for path in expected:
        np.testing.assert_array_equal(tensors[path], expected[path], strict=True)
    back = from_hf_map(spec, "float32")
    check_total(back, forms(hf_map(spec, "float32")), native_forms(spec, "float32"))
    for path, array in made(back, tensors).items():
        np.testing.assert_array_equal(array, leaves[path], strict=True)


def test_real_shapes() -> None:
    smollm2 = replace(
        SPECS["smollm2"], vocab_size=49152, dim=576, head_dim=64, mlp_dim=1536, layers=(LayerKind(Rope(1e5)),)
    )
    held = forms(total(engine_map("fused", smollm2, "float32", to="bfloat16", tensor=3, own_head=True), smollm2))
    assert held["model.layers.0.self_attn.qkv_proj.weight"] == ((576 + 2 * 192, 576), "bfloat16")
    assert held["model.layers.0.mlp.gate_up_proj.weight"] == ((3072, 576), "bfloat16")
    assert held["lm_head.weight"] == held["model.embed_tokens.weight"] == ((49152, 576), "bfloat16")
    with pytest.raises(SyncError, match="gate_proj has 1536 along dim 0, not a multiple of 9 tensor ranks"):
        engine_map("fused", smollm2, "float32", tensor=9)
    nine = forms(engine_map("sglang_jax", smollm2, "float32", tensor=9))
    assert nine["model.layers.0.self_attn.k_proj.weight"][0] == (576, 9 * 64)
    four = engine_map("fused", smollm2, "float32", tensor=4, pad_heads=True)
    assert forms(four)["model.layers.0.self_attn.qkv_proj.weight"][0] == (12 * 64 + 2 * 4 * 64, 576)
    assert forms(four)["model.layers.0.self_attn.o_proj.weight"][0] == (576, 12 * 64)
    qwen = replace(
        SPECS["qwen2"], vocab_size=151936, dim=2048, head_dim=128, mlp_dim=11008, layers=(LayerKind(Rope(1e6)),)
    )
    mapping = total(engine_map("fused", qwen, "bfloat16", tensor=8, vocab_multiple=512), qwen, "bfloat16")
    assert forms(mapping)["lm_head.weight"] == ((152064, 2048), "bfloat16")
    assert "pad vocab 151936 -> 152064" in mapping.targets["lm_head.weight"].operations
    assert mapping.targets["model.layers.0.self_attn.qkv_proj.weight"].operations == (
        "transpose",
        "repeat-kv x4",
        "fuse q_proj, k_proj, v_proj by 8 ranks",
    )
    assert forms(mapping)["model.layers.0.self_attn.qkv_proj.bias"] == ((16 * 128 + 2 * 8 * 128,), "bfloat16")
    jax = forms(total(engine_map("sglang_jax", qwen, "bfloat16", tensor=4), qwen, "bfloat16"))
    assert jax["model.layers.0.self_attn.q_proj.weight"][0] == (2048, 2048)
    assert jax["model.layers.0.self_attn.k_proj.weight"][0] == (2048, 4 * 128)
    assert jax["model.layers.0.self_attn.k_proj.bias"][0] == (4 * 128,)
    assert {"model.embed_tokens.embedding", "lm_head.embedding", "model.norm.scale"} < jax.keys()
    assert {"model.layers.0.input_layernorm.scale", "model.layers.0.post_attention_layernorm.scale"} < jax.keys()


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, o: np.ndarray, group: int, head_dim: int) -> np.ndarray:
    """[tokens, dim] of unmasked attention from projections [tokens, heads * head_dim] and o [heads * head_dim, dim]."""
    q, k, v = (x.reshape(len(x), -1, head_dim) for x in (q, k, v))
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    scores = np.einsum("qhd,khd->hqk", q, k)
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    out = np.einsum("hqk,khd->qhd", shares / shares.sum(-1, keepdims=True), v)
    return out.reshape(len(out), -1) @ o


@pytest.mark.parametrize(
    ("name", "ranks", "head_dim", "pad_heads"),
    [
        ("smollm2", 1, 4, False),
        ("smollm2", 3, 4, False),
        ("smollm2", 9, 4, False),
        ("smollm2", 4, 4, True),
        ("smollm2", 2, 8, True),
        ("qwen2", 2, 4, False),
        ("qwen2", 8, 8, False),
        ("qwen2", 16, 4, False),
        ("qwen3", 4, 4, False),
    ],
)
def test_every_rank_computes_its_part_of_the_same_attention(
    name: str, ranks: int, head_dim: int, pad_heads: bool
) -> None:
    """Each rank takes its even part of the fused leaf, splits it, attends with its own heads; the sum over ranks is the
    model's attention: heads repeated, padded or both."""
    spec = SPECS[name]
    leaves = weights(spec)
    leaves = {path: array / 4 for path, array in leaves.items()}
    mapping = engine_map("fused", spec, "float32", tensor=ranks, head_dim=head_dim, pad_heads=pad_heads)
    held = made(total(mapping, spec), leaves)
    x = np.random.default_rng(1).standard_normal((5, spec.dim)).astype(np.float32)
    mine = [x @ leaves[f"layers.1.{n}"] + (leaves[f"layers.1.{n}_bias"] if spec.qkv_bias else 0) for n in "qkv"]
    group = spec.num_heads // spec.num_kv_heads
    expected = attention(*mine, leaves["layers.1.o"], group, spec.head_dim)
    prefix = "model.layers.1.self_attn."
    fused = x @ held[f"{prefix}qkv_proj.weight"].T + (held[f"{prefix}qkv_proj.bias"] if spec.qkv_bias else 0)
    o = held[f"{prefix}o_proj.weight"].T
    heads = len(o) // head_dim // ranks
    got = np.zeros_like(expected)
    for part, out in zip(np.split(fused, ranks, 1), np.split(o, ranks, 0), strict=True):
        kv = (part.shape[1] - heads * head_dim) // 2
        q, k, v = np.split(part, [heads * head_dim, heads * head_dim + kv], 1)
        got += attention(q, k, v, out, heads * head_dim // kv, head_dim)
    np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-5)


def test_mlp_by_ranks() -> None:
    spec = SPECS["qwen2"]
    leaves = weights(spec)
    held = made(engine_map("fused", spec, "float32", tensor=4), leaves)
    x = np.ones((2, spec.dim), np.float32)
    fused = np.split(x @ held["model.layers.0.mlp.gate_up_proj.weight"].T, 4, 1)
    down = np.split(held["model.layers.0.mlp.down_proj.weight"].T, 4, 0)
    got = sum(np.maximum(part[:, :36], 0) * part[:, 36:] @ out for part, out in zip(fused, down, strict=True))
    gate, up = x @ leaves["layers.0.gate"], x @ leaves["layers.0.up"]
    np.testing.assert_allclose(got, np.maximum(gate, 0) * up @ leaves["layers.0.down"], rtol=1e-4, atol=1e-4)


def test_a_tied_head_goes_where_an_engine_keeps_one() -> None:
    spec = SPECS["smollm2"]
    leaves = weights(spec)
    for fmt, embed, head in (
        ("hf", "model.embed_tokens.weight", "lm_head.weight"),
        ("sglang_jax", "model.embed_tokens.embedding", "lm_head.embedding"),
        ("fused", "model.embed_tokens.weight", "lm_head.weight"),
    ):
        with_head = engine_map(fmt, spec, "float32", own_head=True, vocab_multiple=16)
        assert with_head.targets[head].operations[-1].startswith("tied to embed")
        held = made(total(with_head, spec), leaves)
        np.testing.assert_array_equal(held[head], held[embed], strict=True)
        assert head not in engine_map(fmt, spec, "float32").targets
    untied = SPECS["qwen2"]
    head = made(engine_map("hf", untied, "float32", own_head=True), weights(untied))["lm_head.weight"]
    np.testing.assert_array_equal(head, weights(untied)["head"])


def test_what_does_not_fit_is_named() -> None:
    smollm2 = SPECS["smollm2"]
    for fmt in ("fused", "sglang_jax"):
        with pytest.raises(SyncError, match="9 query heads and 3 KV heads do not fit 4 tensor ranks"):
            engine_map(fmt, smollm2, "float32", tensor=4)
        with pytest.raises(SyncError, match="do not fit 6 tensor ranks"):
            engine_map(fmt, smollm2, "float32", tensor=6)
    with pytest.raises(SyncError, match="gate_proj has 24 along dim 0, not a multiple of 9 tensor ranks"):
        engine_map("fused", replace(smollm2, mlp_dim=24), "float32", tensor=9)
    with pytest.raises(SyncError, match="norms its heads over 4 elements"):
        engine_map("sglang_jax", SPECS["qwen3"], "float32", head_dim=8)
    with pytest.raises(SyncError, match="cannot pad head dim"):
        engine_map("fused", smollm2, "float32", head_dim=2)
    with pytest.raises(SyncError, match="no format 'fuzed'; known: hf, sglang_jax, fused; did you mean fused"):
        engine_map("fuzed", smollm2, "float32")
    with pytest.raises(SyncError, match=r"no table for the model family 'mamba'.*Nothing was moved"):
        engine_map("hf", replace(smollm2, family="mamba"), "float32")
    with pytest.raises(SyncError, match="model family 'mamba' has no name table"):
        from_hf_map(replace(smollm2, family="mamba"), "float32")
    with pytest.raises(SyncError, match="tensor = 0; expected at least 1"):
        engine_map("fused", smollm2, "float32", tensor=0)


def test_a_plan_to_an_engine_is_certified() -> None:
    """From an fsdp x tensor trainer to an engine over four ranks, two copies: padded, fused, repeated, tied, cast."""
    spec = SPECS["smollm2"]
    mapping = engine_map(
        "fused", spec, "float32", to="bfloat16", tensor=4, pad_heads=True, vocab_multiple=16, own_head=True
    )
    trainer = MeshShape((("fsdp", 2), ("tensor", 2)), (0, 1, 2, 3))
    engine = MeshShape((("data", 2), ("tensor", 4)), tuple(range(2, 10)))
    two, one = (("fsdp",), ("tensor",)), (("tensor",),)
    source = {
        path: Placed(shape, dtype, Layout(trainer, two if len(shape) == 2 else one))
        for path, (shape, dtype) in native_forms(spec, "float32").items()
    }
    down = ("o_proj.weight", "down_proj.weight")
    destination = {
        path: Placed(
            shape,
            dtype,
            Layout(engine, ((), ("tensor",)) if path.endswith(down) else (("tensor",), ())[: len(shape)]),
        )
        for path, (shape, dtype) in forms(mapping).items()
    }
    certificate = check(make_plan(source, destination, mapping, staging_bytes=4096), listing=True)
    assert certificate.ok, certificate.to_json()
