"""One weight sync: select -> plan -> stage -> verify -> publish, all or nothing.

    sync = WeightSync(trainable, shardings(trainable, dial.mesh("rollout")), base=leaf_digests(base))
    adapter, receipt = sync.push(counters.version + 1, actor_adapter, rollout_adapter)
    counters = counters.published(receipt)

The new tree is staged beside the installed one. It is handed out only after every leaf's digest, computed from the
staged arrays on the destination devices, equals the source's. The installed dict is never written.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

import jax
from jax.sharding import Sharding

from lockstep.cluster.sharding import describe_layout, describe_mesh
from lockstep.errors import SyncError
from lockstep.models.spec import Leaf
from lockstep.sync.select import check_names, listed, select
from lockstep.sync.transfer import LeafMove, LocalTransport, Transport, plan_leaf, shared_devices, written_bytes
from lockstep.sync.verify import check_same, kind_of, policy_digest, start_digests
from lockstep.types import PolicyVersion


@dataclass(frozen=True)
class SyncReceipt:
    """What one sync did. Bytes count replicas, except bytes_selected; seconds are wall-clock.

    version, digest: the published policy (digest over base and trainable weights). syncs: how many syncs of this pair
    moved bytes so far, this one included. bytes_selected: of the trainable leaves, once. bytes_planned and bytes_moved:
    written into new destination buffers, as computed beforehand and as read off the buffers afterwards. bytes_crossing:
    those of the planned that their device did not hold. same_buffers: every destination leaf is the source's buffer, so
    nothing ran. seconds: `select` (checks and plan), `stage`, `verify`. leaf_digests: of the trainable leaves.
    """

    version: int
    digest: str
    source: str
    destination: str
    source_layout: str
    destination_layout: str
    syncs: int
    leaves: int
    bytes_selected: int
    bytes_planned: int
    bytes_moved: int
    bytes_crossing: int
    same_buffers: bool
    seconds: Mapping[str, float]
    leaf_digests: Mapping[str, str]

    @property
    def policy(self) -> PolicyVersion:
        """The version that this sync published."""
        return PolicyVersion(self.version, self.digest)

    def to_json(self) -> str:
        """One line: every field but the digests of the single leaves, which the policy's digest is made from."""
        return json.dumps({k: v for k, v in asdict(self).items() if k != "leaf_digests"})


@dataclass(frozen=True)
class Counters:
    """Three numbers that are easily taken for one. step: optimizer steps done. version: number of the published policy.
    syncs: syncs that moved bytes (none when actor and rollout hold the same arrays)."""

    step: int = 0
    version: int = 0
    syncs: int = 0

    def stepped(self) -> Counters:
        """After an optimizer step."""
        return replace(self, step=self.step + 1)

    def published(self, receipt: SyncReceipt) -> Counters:
        """After a verified sync."""
        return replace(self, version=receipt.version, syncs=self.syncs + (not receipt.same_buffers))


class WeightSync:
    """Takes the trainable weights of one role to another, version by version.

    Whether anything has to move is decided anew on every push, from the layouts the arrays have then.
    """

    def __init__(
        self,
        leaves: Mapping[str, Leaf],
        destination: Mapping[str, Sharding],
        *,
        base: Mapping[str, str],
        source_role: str = "actor",
        destination_role: str = "rollout",
        transport: Transport | None = None,
    ) -> None:
        """leaves: the table of what trains (`select.trainable_leaves`). destination: sharding of each of them there
        (`cluster.sharding.shardings`). base: leaf digests of the frozen weights, which every policy digest covers;
        empty when all weights train.

        Raises SyncError if a leaf has no destination, or the destination has a leaf that does not train.
        """
        check_names(destination, leaves, f"table of destination shardings of {destination_role}")
        self._leaves = dict(leaves)
        self._destination = dict(destination)
        self._base = dict(base)
        self._roles = (source_role, destination_role)
        self._transport = LocalTransport() if transport is None else transport
        self._published: PolicyVersion | None = None
        self._failure: str | None = None
        self._syncs = 0

    @property
    def published(self) -> PolicyVersion | None:
        """The last version that a push returned; None before the first."""
        return self._published

    def reset(self) -> None:
        """Make the object usable again after a failed push. The published version stays; push the weights anew."""
        self._failure = None

    def push(
        self, version_number: int, trainable: Mapping[str, jax.Array], installed: Mapping[str, jax.Array]
    ) -> tuple[dict[str, jax.Array], SyncReceipt]:
        """Place `trainable` where `installed` is, verify it there, and return (what is to be served now, receipt).

        version_number: one more than the last one published by this object (the first may be any); the last number
        again is accepted for the very same content, to repair a destination. trainable: the source's arrays, in any
        layout. installed: the destination's arrays now; never written, and no longer needed once this returns.

        Raises SyncError, with nothing published and the object unusable until `reset`: names, shapes, dtypes or layouts
        that do not fit, version numbers out of order, leaves that cannot be placed, content that differs after placing.
        """
        if self._failure is not None:
            raise SyncError(
                f"sync: an earlier push failed and this object has not been reset since; call reset() and push again. "
                f"The failure was: {self._failure}"
            )
        try:
            return self._push(version_number, trainable, installed)
        except BaseException as error:
            self._failure = f"{type(error).__name__}: {error}"
            raise

    def _push(
        self, number: int, trainable: Mapping[str, jax.Array], installed: Mapping[str, jax.Array]
    ) -> tuple[dict[str, jax.Array], SyncReceipt]:
        clock = [time.perf_counter()]
        self._check_number(number)
        self._check_fit(trainable, installed)
        source = select(trainable, self._leaves)
        moves = {
            path: plan_leaf(path, leaf.sharding, self._destination[path], leaf.shape, leaf.dtype.itemsize)
            for path, leaf in source.items()
        }
        clock.append(time.perf_counter())
        staged = self._transport.stage(source, self._destination, moves)
        self._check_staged(source, staged)
        clock.append(time.perf_counter())
        digests = self._verify(source, staged)
        policy = PolicyVersion(number, policy_digest(self._base, digests))
        self._check_repeat(policy)
        clock.append(time.perf_counter())
        receipt = self._receipt(policy, source, staged, moves, digests, clock)
        if receipt.bytes_moved != receipt.bytes_planned:
            raise SyncError(
                f"sync: {receipt.bytes_moved} bytes were written where {receipt.bytes_planned} were planned "
                f"({len(source)} leaves, {receipt.source_layout} to {receipt.destination_layout}): the transport "
                f"copies or reuses buffers that it should not"
            )
        self._published, self._syncs = policy, receipt.syncs
        return {path: staged[path] for path in self._leaves}, receipt

    def _check_number(self, number: int) -> None:
        """Version numbers grow by one; the last one may be pushed again."""
        last = self._published
        if number < 0 or (last is not None and number not in (last.number, last.number + 1)):
            wanted = "0 or more" if last is None else f"{last.number + 1} (or {last.number} again, unchanged)"
            raise SyncError(f"sync: version {number} is out of order; expected {wanted}, last published: {last}")

    def _check_repeat(self, policy: PolicyVersion) -> None:
        """One number, one content."""
        last = self._published
        if last is not None and last.number == policy.number and last.digest != policy.digest:
            raise SyncError(
                f"sync: version {policy.number} was published with digest {last.digest} and now has {policy.digest}; "
                f"weights that changed need a new version number"
            )

    def _check_fit(self, trainable: Mapping[str, jax.Array], installed: Mapping[str, jax.Array]) -> None:
        """Everything that can be known before a byte moves."""
        here, there = self._roles
        check_names(trainable, self._leaves, f"source ({here})")
        check_names(installed, self._leaves, f"destination ({there})")
        for tree, role in ((trainable, here), (installed, there)):
            gone = [path for path in self._leaves if tree[path].is_deleted()]
            if gone:
                raise SyncError(
                    f"sync: {role}'s {listed(gone)} deleted or donated; push before the step that donates them"
                )
        for path, leaf in self._leaves.items():
            new, old = trainable[path], installed[path]
            layouts = f"{here}: {describe_layout(new.sharding)}; {there}: {describe_layout(old.sharding)}"
            if not new.shape == old.shape == leaf.shape:
                raise SyncError(
                    f"sync: {path} has shape {new.shape} at {here} and {old.shape} at {there}, the leaf table says "
                    f"{leaf.shape}; {layouts}. Nothing was written"
                )
            if new.dtype != old.dtype:
                raise SyncError(
                    f"sync: {path} is {kind_of(new)} at {here} and {kind_of(old)} at {there}, and no cast is declared; "
                    f"give both roles one dtype; {layouts}. Nothing was written"
                )
            if not _same_place(old.sharding, self._destination[path], leaf):
                raise SyncError(
                    f"sync: {path} {kind_of(old)} is installed elsewhere than declared; declared: "
                    f"{describe_layout(self._destination[path])}; {layouts}. Nothing was written"
                )

    def _check_staged(self, source: Mapping[str, jax.Array], staged: Mapping[str, jax.Array]) -> None:
        """The transport's word is not taken for it: names, shapes, dtypes and places of what came back."""
        check_names(staged, self._leaves, f"staged tree of {self._roles[1]}")
        for path, leaf in source.items():
            got, place = staged[path], self._destination[path]
            if got.shape != leaf.shape or got.dtype != leaf.dtype:
                raise SyncError(
                    f"sync: {path} was staged as {kind_of(got)}, the source is {kind_of(leaf)}; "
                    f"source: {describe_layout(leaf.sharding)}; staged: {describe_layout(got.sharding)}"
                )
            if got.sharding != place:
                raise SyncError(
                    f"sync: {path} {kind_of(got)} was staged as {describe_layout(got.sharding)}; "
                    f"declared: {describe_layout(place)}"
                )

    def _verify(self, source: Mapping[str, jax.Array], staged: Mapping[str, jax.Array]) -> dict[str, str]:
        """Leaf digests, equal on both sides. What stands on the source's very buffers is digested once."""
        there = {p: x for p, x in staged.items() if len(shared_devices(source[p], x)) < len(x.sharding.device_set)}
        source_digests, staged_digests = start_digests(source), start_digests(there)
        wanted = source_digests()
        check_same({path: wanted[path] for path in there}, staged_digests(), *self._roles)
        return wanted

    def _receipt(
        self,
        policy: PolicyVersion,
        source: Mapping[str, jax.Array],
        staged: Mapping[str, jax.Array],
        moves: Mapping[str, LeafMove],
        digests: Mapping[str, str],
        clock: list[float],
    ) -> SyncReceipt:
        moved = sum(written_bytes(source[path], staged[path]) for path in source)
        first = next(iter(source))
        return SyncReceipt(
            version=policy.number,
            digest=policy.digest,
            source=self._roles[0],
            destination=self._roles[1],
            source_layout=describe_mesh(source[first].sharding),
            destination_layout=describe_mesh(self._destination[first]),
            syncs=self._syncs + (moved > 0),
            leaves=len(source),
            bytes_selected=sum(leaf.nbytes for leaf in source.values()),
            bytes_planned=sum(move.bytes_planned for move in moves.values()),
            bytes_moved=moved,
            bytes_crossing=sum(move.bytes_crossing for move in moves.values()),
            same_buffers=moved == 0,
            seconds={
                phase: end - start
                for phase, start, end in zip(("select", "stage", "verify"), clock, clock[1:], strict=False)
            },
            leaf_digests=digests,
        )


def _same_place(installed: Sharding, declared: Sharding, leaf: Leaf) -> bool:
    """Whether the two put the same part of the leaf into the same memory of the same devices."""
    return installed.memory_kind == declared.memory_kind and installed.is_equivalent_to(declared, len(leaf.shape))
