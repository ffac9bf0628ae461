"""Mixtures of experts and latent attention on small models: names, folders, adapters, and that none is ever run."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from lockstep.cluster.mesh import Dial
from lockstep.cluster.programs import Programs
from lockstep.errors import ModelError
from lockstep.models.catalog import KNOWN_CONFIGS, known_model, load_model, load_spec
from lockstep.models.decoder import Numerics
from lockstep.models.families import FAMILIES, name_map
from lockstep.models.hf import INDEX, SINGLE, load_folder, save_folder
from lockstep.models.hf_config import config_from_spec, spec_from_config
from lockstep.models.init import init_leaf, init_params
from lockstep.models.lora import LoraSpec, adapter_table, merge
from lockstep.models.spec import (
    Experts,
    LatentAttention,
    LayerKind,
    Leaf,
    ModelSpec,
    Rope,
    Yarn,
    leaf_table,
    num_parameters,
    require_decoder,
)


def tensors_of(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Every tensor of the checkpoint, by name; none may belong to two leaves."""
    tensors: dict[str, tuple[int, ...]] = {}
    for ref in name_map(spec).values():
        for name in ref.names:
            assert name not in tensors, f"two leaves share {name}"
            tensors[name] = ref.shape
    return tensors


# --- small models of the same families --------------------------------------------------------------------------------


@st.composite
def specs(draw: st.DrawFn) -> ModelSpec:
    """Small models with experts, of every family that has them."""
    family = draw(st.sampled_from([name for name, f in FAMILIES.items() if f.experts != "none"]))
    small, bools = st.integers(1, 4), st.booleans()
    n_layers, heads, width = draw(st.integers(1, 12)), draw(small), draw(st.integers(1, 9))
    yarn = Yarn(draw(st.floats(1.0, 64.0)), 4096, mscale=draw(st.none() | st.just(0.7)), truncate=draw(bools))
    rope = Rope(draw(st.floats(2.0, 1e6)), yarn if FAMILIES[family].yarn and draw(bools) else None)
    num, per_token = draw(st.integers(1, 3)) * 2, draw(st.integers(1, 2))
    has = [True] * n_layers
    latent = None
    head_dim, kv_heads, mlp = 2 * draw(small), 1, draw(st.integers(1, 9))
    experts = Experts(num, per_token, width)
    if family == "qwen3_moe":
        experts = dataclasses.replace(experts, normalised=draw(bools))
        has = draw(st.lists(bools, min_size=n_layers, max_size=n_layers))
    elif family == "gpt_oss":
        mlp, experts = width, dataclasses.replace(experts, bias=True, fused=True, limit=draw(st.floats(0.5, 9.0)))
    elif family == "mixtral":
        mlp = width
    else:
        dense = draw(st.integers(0, n_layers))
        has = [i >= dense for i in range(n_layers)]
        latent = LatentAttention(draw(st.none() | small), draw(small), draw(small), 2 * draw(small), draw(small))
        head_dim, kv_heads = latent.nope_dim + latent.rope_dim, heads
        experts = Experts(
            num, per_token, width, width * draw(st.integers(0, 2)), draw(bools), draw(st.floats(0.5, 3.0)), 2, 1, True
        )
    window = draw(st.integers(1, 9))
    windows = {"pattern": [window, None] * n_layers, "all": [window] * n_layers}
    kinds = zip(windows.get(FAMILIES[family].windows, [None] * n_layers), has, strict=False)
    return ModelSpec(
        family=family,
        vocab_size=11,
        dim=draw(st.integers(1, 9)),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        mlp_dim=mlp,
        layers=tuple(LayerKind(rope, w, e) for w, e in kinds),
        norm_eps=1e-5,
        query_scale=head_dim**-0.5,
        max_position=64,
        tied_head=draw(bools),
        qkv_bias=FAMILIES[family].qkv_bias,
        qk_norm=FAMILIES[family].qk_norm,
        o_bias=FAMILIES[family].o_bias,
        sinks=FAMILIES[family].sinks,
        experts=experts,
        latent=latent,
    )


@given(specs())
@settings(max_examples=60)
def test_tables_names_and_configurations_of_random_models(spec: ModelSpec) -> None:
    table, refs = leaf_table(spec), name_map(spec)
    assert list(refs) == list(table) and all(refs[path].leaf_shape == leaf.shape for path, leaf in table.items())
    assert sum(math.prod(shape) for shape in tensors_of(spec).values()) == num_parameters(spec)
    assert spec_from_config(json.loads(json.dumps(config_from_spec(spec)))) == spec
    for path, ref in refs.items():  # each element is numbered, goes to the checkpoint and comes back
        leaf = np.arange(table[path].size).reshape(table[path].shape)
        spread = ref.spread(leaf, range(len(ref.names)))
        assert list(spread) == list(ref.names) and all(t.shape == ref.shape for t in spread.values())
        np.testing.assert_array_equal(ref.gather(spread.__getitem__), leaf)


@given(specs(), st.integers(1, 4000))
@settings(max_examples=12, deadline=None)
def test_folders_of_random_models_come_back_bit_for_bit(spec: ModelSpec, limit: int) -> None:
    params = init_params(spec, 3, "bfloat16")
    with tempfile.TemporaryDirectory() as folder:
        save_folder(Path(folder) / "m", spec, params, max_shard_bytes=limit)
        files = {f.name: load_file(f) for f in (Path(folder) / "m").glob("*.safetensors")}
        again, loaded = load_folder(Path(folder) / "m", "stored")
        listed = json.loads((Path(folder) / "m" / INDEX).read_text())["weight_map"] if len(files) > 1 else {}
    stored = {name: tensor for file in files.values() for name, tensor in file.items()}
    assert {name: t.shape for name, t in stored.items()} == tensors_of(spec)
    assert len(stored) == sum(map(len, files.values())) and (not listed or listed.keys() == stored.keys())
    assert all(len(f) == 1 or sum(t.nbytes for t in f.values()) <= limit for f in files.values())
    # And a file begins only where the next tensor, one expert of a stack perhaps, does not fit into the last one.
    order = [name for ref in name_map(spec).values() for name in ref.names]
    for full, new in itertools.pairwise(sorted(files)):
        first = stored[next(name for name in order if name in files[new])]
        assert sum(t.nbytes for t in files[full].values()) + first.nbytes > limit
    assert again == spec and list(loaded) == list(params)
    assert all(loaded[path].tobytes() == params[path].tobytes() for path in params)


def one(family: str) -> ModelSpec:
    """A fixed small model of a family: 2 layers, 4 experts, the first layer plain where that is possible."""
    config: dict[str, Any] = {
        "model_type": FAMILIES[family].model_type,
        "vocab_size": 11,
        "hidden_size": 6,
        "intermediate_size": 5,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_experts_per_tok": 2,
        "hidden_act": "silu",
        "rope_scaling": None,
    }
    width: dict[str, Any] = {"moe_intermediate_size": 3}
    return spec_from_config(
        config
        | {
            "mixtral": {"num_local_experts": 4, "head_dim": 4},
            "gpt_oss": {"num_local_experts": 4, "head_dim": 4},
            "qwen3_moe": width | {"num_experts": 4, "mlp_only_layers": [0], "head_dim": 4},
            "deepseek_v3": width
            | {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 2}
            | {"q_lora_rank": 5, "kv_lora_rank": 3, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 3},
        }[family]
    )


@pytest.fixture
def mixtral(tmp_path: Path) -> tuple[Path, dict[str, np.ndarray]]:
    params = init_params(one("mixtral"), 5)
    save_folder(tmp_path / "m", one("mixtral"), params)
    return tmp_path / "m", params


def test_which_tensor_is_which_expert(mixtral: tuple[Path, dict[str, np.ndarray]], tmp_path: Path) -> None:
    """Written out by hand, because a round trip does not see two names swapped."""
    folder, params = mixtral
    stored = load_file(folder / SINGLE)
    for w, leaf in (("w1", "gate"), ("w3", "up"), ("w2", "down")):
        tensor = stored[f"model.layers.1.block_sparse_moe.experts.2.{w}.weight"]
        np.testing.assert_array_equal(tensor, params[f"layers.1.experts_{leaf}"][2].T)
    deepseek = init_params(one("deepseek_v3"), 5)
    save_folder(tmp_path / "d", one("deepseek_v3"), deepseek)
    stored = load_file(tmp_path / "d" / SINGLE)
    layer = "model.layers.1.mlp."
    np.testing.assert_array_equal(stored[f"{layer}experts.3.up_proj.weight"], deepseek["layers.1.experts_up"][3].T)
    np.testing.assert_array_equal(stored[f"{layer}gate.weight"], deepseek["layers.1.router"].T)
    np.testing.assert_array_equal(stored[f"{layer}shared_experts.gate_proj.weight"], deepseek["layers.1.shared_gate"].T)
    gpt_oss = init_params(one("gpt_oss"), 5)
    save_folder(tmp_path / "g", one("gpt_oss"), gpt_oss)
    stored = load_file(tmp_path / "g" / SINGLE)
    np.testing.assert_array_equal(
        stored["model.layers.0.mlp.experts.gate_up_proj"], gpt_oss["layers.0.experts_gate_up"]
    )


def test_an_expert_that_is_missing_or_stored_otherwise_is_named(mixtral: tuple[Path, dict[str, np.ndarray]]) -> None:
    folder, _ = mixtral
    stored = load_file(folder / SINGLE)
    name = "model.layers.0.block_sparse_moe.experts.3.w2.weight"
    save_file({k: v for k, v in stored.items() if k != name}, folder / SINGLE, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=f"Missing: '{name}'"):
        load_folder(folder)
    save_file(stored | {name: stored[name].T.copy()}, folder / SINGLE, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=rf"'{name}' has shape \(5, 6\); config.json asks for \(6, 5\)"):
        load_folder(folder)
    save_file(stored | {name: stored[name].astype(np.float16)}, folder / SINGLE, metadata={"format": "pt"})
    with pytest.raises(ModelError, match="are one leaf, but stored as float16 and float32"):
        load_folder(folder, "stored")
    assert load_folder(folder, "bfloat16")[1]["layers.0.experts_down"].dtype.name == "bfloat16"


def test_init_scale_of_stacked_experts_is_that_of_one() -> None:
    leaf = init_leaf(Leaf("layers.0.experts_up", (3, 400, 50), ("expert", "embed", "mlp"), "normal"), 0)
    assert abs(leaf.std() * 20 - 1) < 0.02


# --- what cannot be run -----------------------------------------------------------------------------------------------

PLANNED = {name: load_spec(name).unsupported for name in KNOWN_CONFIGS}


def test_what_the_decoder_lacks_is_said() -> None:
    assert {name for name, lacks in PLANNED.items() if not lacks} == {
        n for n in KNOWN_CONFIGS if FAMILIES[load_spec(n).family].experts == "none"
    }
    assert PLANNED["qwen3-30b-a3b"] == ("mixture of experts",)
    assert PLANNED["gpt-oss-20b"] == (
        "mixture of experts",
        "attention sinks",
        "bias on the attention's output",
        "YaRN rotary scaling",
    )
    assert PLANNED["kimi-k2"] == ("mixture of experts", "multi-head latent attention", "YaRN rotary scaling")
    with pytest.raises(ModelError, match="does not compute YaRN"):
        load_spec("kimi-k2").layers[0].rope.inv_freq(64)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_a_model_that_can_only_be_planned_is_never_run(family: str, tmp_path: Path) -> None:
    spec = one(family)
    words = f"lockstep can plan .*family '{family}'.* but not run it: its decoder has no mixture of experts"
    with pytest.raises(ModelError, match=words):
        require_decoder(spec)
    mesh = Dial.build({"actor": {}, "rollout": "actor"}, jax.devices()[:1]).mesh("actor")
    with pytest.raises(ModelError, match=words):
        Programs(spec, Numerics("float32", 32, 16), mesh, leaf_table(spec))
    # `config.json` alone is a model to plan with; to run it nothing else is even looked at.
    (tmp_path / "config.json").write_text(json.dumps(config_from_spec(spec)))
    assert load_spec(tmp_path) == spec
    with pytest.raises(ModelError, match=words):
        load_model(tmp_path)


def test_known_configurations_have_no_weights() -> None:
    for function in (load_model, known_model):
        with pytest.raises(ModelError, match=r"'llama-3\.1-8b' is a configuration without weights"):
            function("llama-3.1-8b")
        with pytest.raises(ModelError, match=r"can plan mixtral-8x7b .* not run it: .* no mixture of experts yet"):
            function("mixtral-8x7b")
    with pytest.raises(ModelError, match="did you mean 'deepseek-v3'"):
        load_spec("deepseek-v2")
    assert "8.0 B parameters; configuration only: for `lockstep plan`" in str(KNOWN_CONFIGS["llama-3.1-8b"])


# --- adapters ---------------------------------------------------------------------------------------------------------


def adapted(spec: ModelSpec, layer: int, *targets: str) -> list[str]:
    lora = LoraSpec(3, 6.0, targets) if targets else LoraSpec(3, 6.0)
    table = adapter_table(spec, lora)
    base = leaf_table(spec)
    for path, leaf in table.items():
        target, part = path.rsplit(".", 1)
        *stack, fan_in, fan_out = base[target].shape
        assert leaf.shape == ((*stack, fan_in, 3) if part == "lora_a" else (*stack, 3, fan_out))
        assert leaf.axes == (
            (*base[target].axes[:-1], "rank")
            if part == "lora_a"
            else (*base[target].axes[:-2], "rank", base[target].axes[-1])
        )
    prefix = f"layers.{layer}."
    return [p.removeprefix(prefix).removesuffix(".lora_a") for p in table if p.startswith(prefix) and p.endswith("_a")]


def test_a_target_means_every_matrix_that_does_its_work() -> None:
    assert adapted(one("mixtral"), 0) == ["q", "k", "v", "o", "experts_gate", "experts_up", "experts_down"]
    assert adapted(one("gpt_oss"), 1) == ["q", "k", "v", "o", "experts_gate_up", "experts_down"]
    assert adapted(one("qwen3_moe"), 0) == ["q", "k", "v", "o", "gate", "up", "down"]
    deepseek = one("deepseek_v3")
    latent = ["q_a", "q_b", "kv_a", "kv_b", "o"]
    assert adapted(deepseek, 0) == [*latent, "gate", "up", "down"]
    experts = ["experts_gate", "shared_gate", "experts_up", "shared_up", "experts_down", "shared_down"]
    assert adapted(deepseek, 1) == [*latent, *experts]
    assert adapted(deepseek, 1, "q", "k") == latent[:4] and adapted(deepseek, 1, "kv_b") == ["kv_b"]
    assert adapted(deepseek, 1, "experts_up") == ["experts_up"] and adapted(deepseek, 0, "experts_up") == []


def test_a_target_that_no_layer_has_is_refused() -> None:
    with pytest.raises(ModelError, match="has the target 'query'; its matrices: q, k, v, o, gate, up, down"):
        adapter_table(load_spec("llama-3.1-8b"), LoraSpec(4, 8.0, ("q", "query")))
    with pytest.raises(ModelError, match="no layer that is adapted has the target 'attn_norm'"):
        adapter_table(one("mixtral"), LoraSpec(4, 8.0, ("attn_norm",)))


def test_merging_adapts_each_expert_by_its_own() -> None:
    spec = one("mixtral")
    params, lora = init_params(spec, 1), LoraSpec(2, 4.0, ("gate",))
    rng = np.random.default_rng(0)
    adapter = {p: rng.standard_normal(leaf.shape, np.float32) for p, leaf in adapter_table(spec, lora).items()}
    merged = merge(params, adapter, lora.scale)
    a, b = adapter["layers.1.experts_gate.lora_a"], adapter["layers.1.experts_gate.lora_b"]
    for e in range(4):
        expected = params["layers.1.experts_gate"][e] + 2.0 * (a[e] @ b[e])
        np.testing.assert_allclose(merged["layers.1.experts_gate"][e], expected, rtol=1e-5, atol=1e-6)
