"""What crosses: the leaves that train, all of them, and nothing else.

Under LoRA those are the adapter's leaves, else every leaf of the model. Optimizer state has no leaf in either table, so
it cannot be selected; handing it in is an error like any other unknown leaf.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from lockstep.errors import SyncError
from lockstep.models.spec import Leaf

if TYPE_CHECKING:  # only named here; what trains can be asked without it
    import jax

_SHOWN = 5  # names in a message; the rest are counted


def trainable_leaves(model: Mapping[str, Leaf], adapter: Mapping[str, Leaf] | None) -> dict[str, Leaf]:
    """The table of what trains: the adapter's leaves if there is an adapter, else the model's.

    Raises SyncError if the adapter is empty (nothing would ever be synced) or shares a name with the model.
    """
    if adapter is None:
        return dict(model)
    if not adapter:
        raise SyncError(
            "sync: the adapter has no leaves, so nothing would train; check lora.targets and lora.last_layers"
        )
    shared = [path for path in adapter if path in model]
    if shared:
        raise SyncError(
            f"sync: {listed(shared)} names both an adapter leaf and a model leaf; adapter names must differ"
        )
    return dict(adapter)


def select(tree: Mapping[str, jax.Array], trainable: Mapping[str, Leaf]) -> dict[str, jax.Array]:
    """`tree`, what trains at the actor, in the order of the table.

    Raises SyncError for a leaf that is not in the table (optimizer state, say), and for one that the tree lacks.
    """
    check_names(tree, trainable, "source")
    return {path: tree[path] for path in trainable}


def check_names(tree: Mapping[str, object], leaves: Mapping[str, object], side: str) -> None:
    """Raise SyncError unless `tree` has every one of `leaves`, and nothing besides."""
    missing = [path for path in leaves if path not in tree]
    unknown = [path for path in tree if path not in leaves]
    if not missing and not unknown:
        return
    parts = []
    if missing:
        parts.append(f"missing: {listed(missing)}")
    if unknown:
        parts.append(f"not a trainable leaf: {listed(unknown)}")
    raise SyncError(
        f"sync: the {side} does not hold exactly the {len(leaves)} trainable leaves; {'; '.join(parts)}. "
        f"Every one must cross and nothing else may (base weights, optimizer state)"
    )


def listed(names: list[str]) -> str:
    """The first few names, and how many more there are."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
