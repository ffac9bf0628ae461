"""The adapter as a tree: which leaves it has, and that merging it is what it computes."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from lockstep.models.init import init_leaf, init_params
from lockstep.models.lora import TARGETS, LoraSpec, adapter_table, merge
from lockstep.models.spec import ModelSpec, leaf_table


def test_leaves_of_the_last_layers_with_the_axes_of_their_base(tiny_spec: ModelSpec) -> None:
    table, base = adapter_table(tiny_spec, LoraSpec(4, 16.0, ("k", "down"), last_layers=2)), leaf_table(tiny_spec)
    assert list(table) == [
        f"layers.{i}.{t}.lora_{ab}" for i in (1, 2) for t in ("k", "down") for ab in ("a", "b")
    ]  # fmt: skip
    for path, leaf in table.items():
        whole = base[path.rpartition(".")[0]]
        if path.endswith("_a"):
            assert (leaf.shape, leaf.axes, leaf.init) == ((whole.shape[0], 4), (whole.axes[0], "rank"), "normal")
        else:
            assert (leaf.shape, leaf.axes, leaf.init) == ((4, whole.shape[1]), ("rank", whole.axes[1]), "zeros")
        assert leaf.path == path


@pytest.mark.parametrize(("last_layers", "adapted"), [(0, 3), (1, 1), (3, 3), (9, 3)])
def test_how_many_layers_are_adapted(tiny_spec: ModelSpec, last_layers: int, adapted: int) -> None:
    table = adapter_table(tiny_spec, LoraSpec(2, 4.0, last_layers=last_layers))
    assert {p.split(".")[1] for p in table} == {str(i) for i in range(3 - adapted, 3)}
    assert len(table) == adapted * 2 * len(TARGETS)


def test_a_fresh_adapter_changes_nothing(tiny_spec: ModelSpec) -> None:
    lora, params = LoraSpec(2, 4.0), init_params(tiny_spec, 0)
    adapter = {p: init_leaf(leaf, 1) for p, leaf in adapter_table(tiny_spec, lora).items()}
    merged = merge(params, adapter, lora.scale)
    assert merged.keys() == params.keys()
    assert all(np.array_equal(merged[p], params[p]) for p in params)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_merging_adds_the_scaled_product_and_keeps_the_base(tiny_spec: ModelSpec, dtype) -> None:
    lora = LoraSpec(2, 3.0, ("q", "up"), last_layers=1)
    params = {p: v.astype(dtype) for p, v in init_params(tiny_spec, 0).items()}
    before = {p: v.copy() for p, v in params.items()}
    table = adapter_table(tiny_spec, lora)
    adapter = {p: init_leaf(replace(leaf, init="normal"), 1) for p, leaf in table.items()}
    merged = merge(params, adapter, lora.scale)
    for path in params:
        assert np.array_equal(params[path], before[path]), "merge wrote to the base"
        if path in ("layers.2.q", "layers.2.up"):
            product = adapter[f"{path}.lora_a"].astype(np.float64) @ adapter[f"{path}.lora_b"]
            wanted = params[path].astype(np.float64) + 1.5 * product
            assert merged[path].dtype == dtype
            np.testing.assert_array_equal(merged[path], wanted.astype(dtype))
        else:
            assert merged[path] is params[path]
