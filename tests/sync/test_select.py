import numpy as np
import pytest

from lockstep.errors import SyncError
from lockstep.models.spec import LayerKind, Leaf, ModelSpec, Rope, leaf_table
from lockstep.sync.select import select, trainable_leaves

MODEL = leaf_table(ModelSpec("llama", 22, 12, 2, 1, 6, 20, (LayerKind(Rope(1e4)),), 1e-5, 1.0, 64))
ADAPTER = {
    path: Leaf(path, shape, (None, None), "normal")
    for path, shape in {"layers.0.q.lora_a": (12, 2), "layers.0.q.lora_b": (2, 12)}.items()
}


def arrays(leaves):
    return {path: np.zeros(leaf.shape, np.float32) for path, leaf in leaves.items()}


def test_adapters_only_under_lora_else_everything():
    assert trainable_leaves(MODEL, None) == MODEL
    assert trainable_leaves(MODEL, ADAPTER) == ADAPTER


def test_selection_is_in_table_order():
    assert list(select(dict(reversed(arrays(ADAPTER).items())), ADAPTER)) == list(ADAPTER)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("layers.0.q.lora_b"), r"missing: layers\.0\.q\.lora_b"),
        (lambda t: t.update({"optimizer.mu.q": 0}), r"not a trainable leaf: optimizer\.mu\.q.*optimizer state"),
        (lambda t: t.update(embed=0), r"not a trainable leaf: embed"),
    ],
)
def test_what_is_missing_or_unknown_is_named(change, message):
    tree = arrays(ADAPTER)
    change(tree)
    with pytest.raises(SyncError, match=message):
        select(tree, ADAPTER)


def test_many_names_are_counted():
    with pytest.raises(SyncError, match=r"missing: embed, .* and 7 more"):
        select({}, MODEL)


def test_adapters_that_could_never_reach_the_sampler_are_refused():
    with pytest.raises(SyncError, match="the adapter has no leaves"):
        trainable_leaves(MODEL, {})
    with pytest.raises(SyncError, match="embed names both"):
        trainable_leaves(MODEL, {"embed": MODEL["embed"]})
