"""Leaf tables from configuration alone: published checkpoints, random mixtures of experts, and what cannot be run.

The goldens are the names and shapes of real checkpoints (`tests/goldens/make_param_trees.py`).
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import ModelError
from lockstep.models.catalog import KNOWN_CONFIGS, list_configs, load_spec
from lockstep.models.families import name_map
from lockstep.models.hf_config import config_from_spec, spec_from_config
from lockstep.models.spec import (
    Leaf,
    ModelSpec,
    Yarn,
    leaf_table,
    num_parameters,
)

GOLDENS = Path(__file__).parents[1] / "goldens"
TREES: dict[str, dict[str, Any]] = json.loads((GOLDENS / "param_trees.json").read_text())
KNOWN = {
    "llama-3.1-8b": "meta-llama/Meta-Llama-3.1-8B",
    "llama-3.1-70b": "meta-llama/Meta-Llama-3.1-70B",
    "llama-3.1-405b": "meta-llama/Meta-Llama-3.1-405B",
    "qwen3-0.6b": "Qwen/Qwen3-0.6B",
    "qwen3-1.7b": "Qwen/Qwen3-1.7B",
    "qwen3-8b": "Qwen/Qwen3-8B",
    "qwen3-32b": "Qwen/Qwen3-32B",
    "qwen3-30b-a3b": "Qwen/Qwen3-30B-A3B",
    "qwen3-235b-a22b": "Qwen/Qwen3-235B-A22B",
    "mixtral-8x7b": "mistralai/Mixtral-8x7B-v0.1",
    "gpt-oss-120b": "openai/gpt-oss-120b",
    "deepseek-v3": "deepseek-ai/DeepSeek-V3",
    "kimi-k2": "moonshotai/Kimi-K2-Instruct",
}
AXES = {"vocab", "embed", "heads", "kv_heads", "mlp", "expert", None}


def _script() -> Any:
    spec = importlib.util.spec_from_file_location("make_param_trees", GOLDENS / "make_param_trees.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TREE = _script()


def tensors_of(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Every tensor of the checkpoint, by name; none may belong to two leaves."""
    tensors: dict[str, tuple[int, ...]] = {}
    for ref in name_map(spec).values():
        for name in ref.names:
            assert name not in tensors, f"two leaves share {name}"
            tensors[name] = ref.shape
    return tensors


# --- published checkpoints --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "model"), KNOWN.items())
def test_every_tensor_of_a_published_checkpoint_is_covered_once(name: str, model: str) -> None:
    golden, spec = TREES[model], load_spec(name)
    found = tensors_of(spec)
    # First the folded form, which a person can read.
    assert sorted(TREE.fold(found)) == sorted((pattern, tuple(shape)) for pattern, shape in golden["folded"])
    assert TREE.digest(found) == golden["sha256"] == TREE.digest(TREE.unfold(golden["folded"]))
    assert (len(found), num_parameters(spec)) == (golden["tensors"], golden["parameters"])
    assert golden["parameters"] == sum(math.prod(shape) for shape in found.values())


def test_the_goldens_and_the_known_configurations_are_the_same_models() -> None:
    assert set(KNOWN.values()) == TREES.keys()
    assert [c.name for c in list_configs()] == list(KNOWN_CONFIGS) and set(KNOWN_CONFIGS) == {*KNOWN, "gpt-oss-20b"}
    folder = next(iter(KNOWN_CONFIGS.values())).path.parent
    assert sorted(p.stem for p in folder.iterdir()) == sorted(KNOWN_CONFIGS)


def test_llama_8b_by_the_numbers() -> None:
    spec = load_spec("llama-3.1-8b")
    assert num_parameters(spec) == 8_030_261_248 and f"{2 * num_parameters(spec) / 2**30:.2f}" == "14.96"
    assert not spec.unsupported


def test_gpt_oss_20b_is_the_large_one_with_fewer_layers_and_experts() -> None:
    small, large = load_spec("gpt-oss-20b"), load_spec("gpt-oss-120b")
    assert small.experts is not None and large.experts is not None
    cut = dataclasses.replace(large, layers=large.layers[:24], experts=dataclasses.replace(large.experts, num=32))
    assert small == cut and num_parameters(small) == 20_914_757_184


@pytest.mark.parametrize("name", KNOWN_CONFIGS)
def test_every_leaf_says_how_it_may_be_cut(name: str) -> None:
    spec = load_spec(name)
    for path, leaf in leaf_table(spec).items():
        assert path == leaf.path and len(leaf.axes) == len(leaf.shape) and set(leaf.axes) <= AXES
        named = [axis for axis in leaf.axes if axis is not None]
        assert len(set(named)) == len(named), f"{path}: one axis for two dims"
        if leaf.size > 1_000_000:
            assert named, f"{path} is large and nothing may cut it"
        if spec.experts is not None and "experts_" in path:
            assert leaf.shape[0] == spec.experts.num and leaf.axes[0] == "expert"
        for size, axis in zip(leaf.shape, leaf.axes, strict=True):
            assert axis != "embed" or size == spec.dim
            assert axis != "heads" or size % spec.num_heads == 0


@pytest.mark.parametrize("name", KNOWN_CONFIGS)
def test_a_known_configuration_survives_writing(name: str) -> None:
    spec = load_spec(name)
    assert spec_from_config(json.loads(json.dumps(config_from_spec(spec)))) == spec


def test_what_the_tables_of_the_large_models_look_like() -> None:
    deepseek = leaf_table(load_spec("deepseek-v3"))
    assert deepseek["layers.2.gate"].shape == (7168, 18432) and "layers.2.router" not in deepseek
    assert deepseek["layers.3.experts_down"] == Leaf(
        "layers.3.experts_down", (256, 2048, 7168), ("expert", "mlp", "embed"), "normal"
    )
    assert "layers.3.gate" not in deepseek and "layers.61.attn_norm" not in deepseek
    assert deepseek["layers.0.kv_b"].axes == (None, "heads") and deepseek["layers.0.q_a"].axes == ("embed", None)
    gpt_oss = leaf_table(load_spec("gpt-oss-20b"))
    assert gpt_oss["layers.0.experts_gate_up"].shape == (32, 2880, 5760)
    assert gpt_oss["layers.0.sinks"].shape == (64,) and gpt_oss["layers.0.o_bias"].shape == (2880,)
    windows = [kind.window for kind in load_spec("gpt-oss-20b").layers]
    assert windows == [128, None] * 12
    assert load_spec("deepseek-v3").layers[0].rope.scaling == Yarn(40.0, 4096, 32.0, 1.0, 1.0, 1.0)


# --- configurations ---------------------------------------------------------------------------------------------------


def published(name: str, **changes: Any) -> dict[str, Any]:
    return json.loads(KNOWN_CONFIGS[name].path.read_text()) | changes


def test_keys_of_published_folders_that_change_no_leaf() -> None:
    """Kimi K2's own model type; packed storage; the publisher's code; numbers that transformers derives and writes."""
    quantized = {"quantization_config": {"quant_method": "fp8"}, "auto_map": {"AutoConfig": "x.Y"}}
    derived = {"head_dim": 64, "qk_head_dim": 192, "rope_interleave": True}
    same = published("kimi-k2", model_type="kimi_k2", **quantized, **derived)
    assert spec_from_config(same) == load_spec("kimi-k2")
    packed = published("gpt-oss-20b", quantization_config={"quant_method": "mxfp4"})
    assert spec_from_config(packed) == load_spec("gpt-oss-20b")
    new = published("gpt-oss-20b")
    new["rope_parameters"] = new.pop("rope_scaling") | {"rope_theta": new.pop("rope_theta")}
    assert spec_from_config(new) == load_spec("gpt-oss-20b")


def test_which_layers_have_experts() -> None:
    def dense(name: str, **changes: Any) -> list[int]:
        return [i for i, kind in enumerate(spec_from_config(published(name, **changes)).layers) if not kind.experts]

    assert dense("qwen3-30b-a3b") == [] and dense("qwen3-30b-a3b", mlp_only_layers=[0, 5]) == [0, 5]
    assert dense("qwen3-30b-a3b", decoder_sparse_step=2, mlp_only_layers=[1]) == [0, 1, *range(2, 48, 2)]
    assert dense("deepseek-v3") == [0, 1, 2] and dense("kimi-k2") == [0] and dense("gpt-oss-20b") == []


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "llama-3.1-8b",
            {"num_hidden_layers": 10**9},
            "'num_hidden_layers' is 1000000000; supported: .*at most 10,000",
        ),
        ("llama-3.1-8b", {"hidden_size": 10**400}, "'hidden_size' is 10.*; supported: an integer of at most"),
        ("llama-3.1-8b", {"rope_theta": 10**400}, "'rope_theta' is 10.*; supported: a number above 0"),
        ("deepseek-v3", {"n_routed_experts": 10**9}, "supported: an integer of at most 100,000"),
        ("deepseek-v3", {"n_group": 7}, "supported: a divisor of n_routed_experts, which is 256"),
        ("deepseek-v3", {"topk_group": 9}, "supported: an integer of at most n_group, which is 8"),
        ("deepseek-v3", {"scoring_func": "softmax"}, "'scoring_func' is 'softmax'; supported: 'sigmoid'"),
        ("deepseek-v3", {"first_k_dense_replace": -1}, "'first_k_dense_replace' is -1"),
        ("deepseek-v3", {"moe_layer_freq": 2}, "'moe_layer_freq' is 2; supported: 1"),
        ("deepseek-v3", {"num_key_value_heads": 8}, "supported: num_attention_heads, which is 128"),
        ("deepseek-v3", {"head_dim": 192}, "'head_dim' is 192; supported: .* 64"),
        ("deepseek-v3", {"qk_rope_head_dim": 63}, "an even width"),
        ("deepseek-v3", {"attention_bias": True}, "'attention_bias' is True; supported: False"),
        ("deepseek-v3", {"rope_scaling": {"type": "yarn", "factor": 40}}, "lacks the key 'original_max_position"),
        (
            "deepseek-v3",
            {"rope_scaling": {"type": "longrope", "factor": 40}},
            "supported: default, linear, llama3, yarn",
        ),
        ("qwen3-30b-a3b", {"num_experts_per_tok": 129}, "an integer of at most num_experts, which is 128"),
        ("qwen3-30b-a3b", {"mlp_only_layers": [48]}, "a list of layers, from 0 to 47"),
        ("qwen3-30b-a3b", {"use_sliding_window": True}, "'use_sliding_window' is True; supported: False"),
        ("qwen3-30b-a3b", {"shared_expert_intermediate_size": 5}, "'shared_expert_intermediate_size' .* is not known"),
        ("gpt-oss-20b", {"attention_bias": False}, "'attention_bias' is False; supported: True"),
        ("gpt-oss-20b", {"experts_per_token": 3}, "what num_experts_per_tok says, 4"),
        ("gpt-oss-20b", {"swiglu_alpha": 1.0}, "'swiglu_alpha' is 1.0; supported: 1.702"),
        ("mixtral-8x7b", {"num_local_experts": 0}, "'num_local_experts' is 0"),
    ],
)
def test_what_would_change_a_planned_model_is_refused(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        spec_from_config(published(name, **changes))


JUNK: list[Any] = [None, True, 0, -1, 3, 10**9, 10**400, 1.5, float("nan"), "", [], [[]], [{}], {}, {"rope_type": []}]


@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen3-30b-a3b", "mixtral-8x7b", "gpt-oss-20b", "kimi-k2"])
def test_no_value_of_any_key_is_anything_but_understood_or_refused(name: str) -> None:
    for key in [*published(name), "rope_parameters", "layer_types", "head_dim", "mlp_only_layers", "experts_per_token"]:
        for value in JUNK:
            try:
                spec = spec_from_config(published(name, **{key: value}))
            except ModelError:
                continue
            assert spec_from_config(config_from_spec(spec)) == spec and name_map(spec).keys() == leaf_table(spec).keys()


def test_the_documentation_lists_the_known_configurations() -> None:
    page = (GOLDENS.parents[1] / "docs" / "models.md").read_text()
    rows = [f"| `{c.name}` | {c.source} | {num_parameters(c.spec()) / 1e9:.1f} B |" for c in list_configs()]
    assert "\n".join(rows) in page


def test_a_gpt_oss_without_rotary_settings_is_refused() -> None:
    """Its format means YaRN with certain numbers by leaving them out."""
    config = published("gpt-oss-20b")
    del config["rope_scaling"]
    with pytest.raises(ModelError, match="lacks the key 'rope_scaling'"):
        spec_from_config(config)
