"""The weights that produced a batch, kept until the last batch that needs them has been consumed.

Needed for old-policy log-probabilities. Taken from the actor when a version is published, in every placement - also
where actor and rollout are the same arrays and no sync runs - and never on the buffers of live weights: the trainer
may donate those the moment after.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
from jax.sharding import Sharding

from lockstep.cluster.devices import default_memory, memory_kinds, snapshot_memory
from lockstep.errors import SyncError
from lockstep.sync.arrays import copy
from lockstep.sync.select import listed
from lockstep.types import PolicyVersion


class Snapshot:
    """One version's weights, owned by one party, who frees them.

    version: which weights. memory: name of the memory that holds them. nbytes: bytes held, replicas included (0 once
    freed).
    """

    def __init__(self, tree: Mapping[str, jax.Array], version: PolicyVersion, memory: str | None = None) -> None:
        """Copy `tree` (path -> array) and wait for the copy.

        memory: which memory to keep it in; default pinned host memory if the devices list it, else device memory.
        Raises SyncError if the tree is empty, if a leaf was deleted or donated, if its devices have no such memory.
        """
        if not tree:
            raise SyncError(f"snapshot of {version}: there are no weights to keep")
        gone = [path for path, leaf in tree.items() if leaf.is_deleted()]
        if gone:
            raise SyncError(
                f"snapshot of {version}: {listed(gone)} deleted or donated already; take the snapshot before the "
                f"training step that donates the weights"
            )
        device = next(iter(tree.values())).addressable_shards[0].device
        kinds = memory_kinds(device)
        self.version = version
        self.memory = snapshot_memory(device) if memory is None else memory
        if self.memory not in kinds:
            raise SyncError(f"snapshot of {version}: {device} has no memory {self.memory!r}; it has {', '.join(kinds)}")
        self._computes = default_memory(device)
        self._kept: dict[str, jax.Array] | None = {
            path: copy(leaf, leaf.sharding.with_memory_kind(self.memory)) for path, leaf in tree.items()
        }
        jax.block_until_ready(self._kept)

    @property
    def nbytes(self) -> int:
        """Bytes held now, replicas included."""
        return sum(shard.data.nbytes for leaf in (self._kept or {}).values() for shard in leaf.addressable_shards)

    def restore(self, shardings: Mapping[str, Sharding] | None = None) -> dict[str, jax.Array]:
        """The weights as arrays of their own in device memory: laid out as they were, or as `shardings` says.

        Raises SyncError after `free`, and if `shardings` lacks a leaf.
        """
        if self._kept is None:
            raise SyncError(f"snapshot of {self.version} was freed; take it later or free it after its last use")
        home = {path: leaf.sharding.with_memory_kind(self._computes) for path, leaf in self._kept.items()}
        where = home if shardings is None else shardings
        missing = [path for path in self._kept if path not in where]
        if missing:
            raise SyncError(f"snapshot of {self.version}: no destination for {listed(missing)}")
        restored = {}
        for path, leaf in self._kept.items():
            at_home = copy(leaf, home[path])
            restored[path] = at_home if where[path] == home[path] else copy(at_home, where[path])
        jax.block_until_ready(restored)
        return restored

    def free(self) -> None:
        """Give the memory back now. Freeing twice is harmless."""
        for leaf in (self._kept or {}).values():
            leaf.delete()
        self._kept = None
