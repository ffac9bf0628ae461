"""Leaf table, rotary frequencies and random initialisation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import ModelError
from lockstep.models.families import FAMILIES, name_map
from lockstep.models.init import init_leaf, init_params
from lockstep.models.spec import LayerKind, Leaf, ModelSpec, Rope, layer_leaves, leaf_table, num_parameters


def small_spec(**changes: object) -> ModelSpec:
    settings: dict = {
        "family": "llama",
        "vocab_size": 101,
        "dim": 23,
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 14,
        "mlp_dim": 37,
        "layers": (LayerKind(Rope(10_000.0)),) * 3,
        "norm_eps": 1e-6,
        "query_scale": 14**-0.5,
        "max_position": 211,
    }
    return ModelSpec(**(settings | changes))


features = st.fixed_dictionaries(
    {
        "tied_head": st.booleans(),
        "qkv_bias": st.booleans(),
        "qk_norm": st.booleans(),
        "post_norms": st.booleans(),
        "layers": st.integers(1, 12).map(lambda n: (LayerKind(Rope(10_000.0)),) * n),
    }
)


@given(features)
def test_leaf_table_has_every_layer_once_and_its_sizes_add_up(changes: dict) -> None:
    spec = small_spec(**changes)
    table, layer = leaf_table(spec), layer_leaves(spec)
    outer = {"embed", "final_norm"} | (set() if spec.tied_head else {"head"})
    assert table.keys() == outer | {f"layers.{i}.{n}" for i in range(spec.num_layers) for n in layer}
    assert all(path == leaf.path and len(leaf.shape) == len(leaf.axes) for path, leaf in table.items())
    d, q, kv = 23, 6 * 14, 2 * 14
    one = 2 * d + 2 * d * q + 2 * d * kv + 3 * d * 37
    one += (q + 2 * kv) * spec.qkv_bias + 2 * 14 * spec.qk_norm + 2 * d * spec.post_norms
    assert num_parameters(spec) == spec.num_layers * one + d + 101 * d * (1 if spec.tied_head else 2)


def test_layers_are_in_numeric_order() -> None:
    table = list(leaf_table(small_spec(layers=(LayerKind(Rope(1e4)),) * 12)))
    numbers = [int(path.split(".")[1]) for path in table if path.startswith("layers.")]
    assert numbers == sorted(numbers) and table[0] == "embed" and table[-2:] == ["final_norm", "head"]


def test_every_family_has_one_tensor_per_leaf() -> None:
    for family in (f for f in FAMILIES.values() if f.experts == "none"):  # the others: test_experts.py
        spec = small_spec(family=family.name, qkv_bias=family.qkv_bias, qk_norm=family.qk_norm, post_norms=family.gemma)
        refs = name_map(spec)
        assert refs.keys() == leaf_table(spec).keys()
        assert len({r.name for r in refs.values()}) == len(refs)
        assert all(
            ref.shape == (leaf.shape if ref.op == "identity" else leaf.shape[::-1])
            for ref, leaf in zip(refs.values(), leaf_table(spec).values(), strict=True)
        )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qkv_bias": True}, "leaf 'layers.0.q_bias' has no tensor name in family 'llama'"),
        ({"family": "qwen2"}, r"family 'qwen2' needs the leaves \['layers.\{i\}.k_bias'"),
        ({"family": "gpt9"}, "family 'gpt9' has no name table; known families: llama"),
    ],
)
def test_a_spec_that_does_not_fit_its_family_is_refused(changes: dict, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        name_map(small_spec(**changes))


def test_rope_without_scaling_is_the_paper_s() -> None:
    np.testing.assert_allclose(Rope(10_000.0).inv_freq(8), [1.0, 0.1, 0.01, 0.001], rtol=1e-6)


def test_linear_scaling_stretches_every_wave() -> None:
    np.testing.assert_allclose(Rope(1e6, ("linear", 8.0)).inv_freq(16), Rope(1e6).inv_freq(16) / 8, rtol=1e-6)


def test_llama3_scaling_keeps_short_waves_and_stretches_long_ones() -> None:
    """Llama 3.1 (factor 8, original context 8192): waves below 2048 positions stay, above 8192 are stretched by 8, and
    between them the change is monotonic."""
    plain = Rope(500_000.0).inv_freq(128).astype(np.float64)
    scaled = Rope(500_000.0, ("llama3", 8.0, 1.0, 4.0, 8192)).inv_freq(128)
    wave = 2 * math.pi / plain
    np.testing.assert_allclose(scaled[wave < 2048], plain[wave < 2048], rtol=1e-6)
    np.testing.assert_allclose(scaled[wave > 8192], plain[wave > 8192] / 8, rtol=1e-6)
    ratio = (scaled / plain)[(wave >= 2048) & (wave <= 8192)]
    assert len(ratio) > 3 and (np.diff(ratio) < 0).all() and ratio.max() < 1 and ratio.min() > 1 / 8


def test_init_depends_on_seed_and_path_alone() -> None:
    spec = small_spec()
    params = init_params(spec, 7)
    assert {k: v.shape for k, v in params.items()} == {k: leaf.shape for k, leaf in leaf_table(spec).items()}
    fewer = init_params(small_spec(layers=spec.layers[:1], tied_head=True), 7)
    assert all(np.array_equal(params[k], v) for k, v in fewer.items())
    for path, leaf in reversed(leaf_table(spec).items()):
        assert np.array_equal(params[path], init_leaf(leaf, 7))
    assert not np.array_equal(params["layers.0.q"], params["layers.1.q"])
    assert not np.array_equal(params["layers.0.q"], init_params(spec, 8)["layers.0.q"])


def test_init_scales() -> None:
    matrix = init_leaf(Leaf("layers.0.down", (400, 90), ("mlp", "embed"), "normal"), 0)
    table = init_leaf(Leaf("embed", (400, 90), ("vocab", "embed"), "normal"), 0)
    assert abs(matrix.std() * math.sqrt(400) - 1) < 0.02 and abs(matrix.mean()) < 0.001
    assert abs(table.std() * math.sqrt(90) - 1) < 0.02
    params = init_params(small_spec(family="qwen2", qkv_bias=True, norm_offset=1.0), 0)
    assert (params["final_norm"] == 0).all() and (params["layers.0.k_bias"] == 0).all()
    assert (init_params(small_spec(), 0)["final_norm"] == 1).all()


def test_init_values_are_pinned() -> None:
    """A seed means the same model tomorrow: the first values of one leaf, written down when this was made."""
    values = init_leaf(Leaf("embed", (4, 4), ("vocab", "embed"), "normal"), 0)[0]
    np.testing.assert_array_equal(
        values,
        np.array([1.1670550107955933, -0.05305176228284836, -0.2034115344285965, -1.195024013519287], np.float32),
    )


def test_init_dtype_is_explicit() -> None:
    params = init_params(small_spec(), 0, "bfloat16")
    assert {str(v.dtype) for v in params.values()} == {"bfloat16"}
    with pytest.raises(ModelError, match="float32 or bfloat16, not 'float16'"):
        init_params(small_spec(), 0, "float16")
