"""A replica in this process: its installed weights, and the callback that puts them into an engine.

    replica = LocalReplica("rollout", blank, shardings(leaves, mesh), transport, install=engine_install)

The new tree is staged beside the installed one, digested where it lies, probed, and only then flipped. What is
installed is never written.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np
from jax.sharding import Sharding

from lockstep.cluster.sharding import describe_layout
from lockstep.errors import SyncError
from lockstep.sync.arrays import device_numbers, in_default_memory, layout_of, shared_devices, written_bytes
from lockstep.sync.plan import Placed, SyncPlan
from lockstep.sync.probe import check_probe
from lockstep.sync.publish import Offer, StageReport
from lockstep.sync.select import check_names
from lockstep.sync.transport import Deadline, Transport
from lockstep.sync.verify import check_same, kind_of, leaf_digests
from lockstep.types import PolicyVersion

Install = Callable[[PolicyVersion, Mapping[str, jax.Array]], None]
Score = Callable[[Mapping[str, jax.Array], Sequence[Sequence[int]]], list[np.ndarray]]


class LocalReplica:
    """Holds one copy of the leaves that train, in this process; the weights come over any transport."""

    def __init__(
        self,
        name: str,
        installed: Mapping[str, jax.Array],
        destination: Mapping[str, Sharding],
        transport: Transport,
        *,
        install: Install | None = None,
        score: Score | None = None,
        numbers: Mapping[int, jax.Device] | None = None,
        source: str = "actor",
        base_digest: str = "",
    ) -> None:
        """installed: what is there before the first flip. destination: where each of its leaves is declared to be.
        install: makes an engine serve a version; raises SyncError only with the old one still served. score: float32
        log-probabilities of token sequences under a staged tree, for probes. numbers: the plan's device numbers here
        (default: jax's ids). source: the sender's name, for errors. base_digest: of the frozen weights that are served
        together with these (`verify.tree_digest` of their leaf digests); empty where there are none.

        Raises SyncError if `installed` is not what and where `destination` says.
        """
        check_names(destination, installed, f"table of destination shardings of {name}")
        for path, leaf in installed.items():
            if leaf.is_deleted():
                raise SyncError(f"sync: {name}'s {path} deleted or donated; it cannot be served")
            if layout_of(leaf.sharding, leaf.shape) != layout_of(destination[path], leaf.shape):
                raise SyncError(
                    f"sync: {path} {kind_of(leaf)} is installed elsewhere than declared; declared: "
                    f"{describe_layout(destination[path])}; {name}: {describe_layout(leaf.sharding)}"
                )
        self.name = name
        self.destination = dict(destination)
        self.transport = transport
        self._install, self._score, self._source = install, score, source
        self._numbers, self._base_digest = numbers, base_digest
        self._installed = dict(installed)
        self._forms = {path: (leaf.shape, leaf.dtype.name) for path, leaf in installed.items()}
        self._active: PolicyVersion | None = None
        self._staged: tuple[PolicyVersion, dict[str, jax.Array]] | None = None
        self._attempts, self._staging = 0, -1
        self._lock = threading.Lock()
        self._poisoned: str | None = None

    @property
    def active(self) -> PolicyVersion | None:
        """The version being served; None before the first flip, and while poisoned."""
        return None if self._poisoned is not None else self._active

    @property
    def poisoned(self) -> str | None:
        """Why nobody knows what is being served, after a flip that broke halfway; None when all is well. The next
        sync that succeeds mends it, being whole."""
        return self._poisoned

    @property
    def installed(self) -> dict[str, jax.Array]:
        """The leaves being served. Raises SyncError while poisoned."""
        if self._poisoned is not None:
            raise SyncError(f"sync: {self.name} is poisoned until a full sync succeeds: {self._poisoned}")
        return self._installed

    def placed(self) -> dict[str, Placed]:
        """What a plan has to know of this side: shape, dtype and layout of every leaf."""
        return {
            path: Placed(shape, dtype, layout_of(self.destination[path], shape))
            for path, (shape, dtype) in self._forms.items()
        }

    def stage(self, offer: Offer, deadline: Deadline, digested: Mapping[str, jax.Array] | None = None) -> StageReport:
        """As `Replica.stage`. digested: target path -> the sender's array, where the sender is in this process: a leaf
        that comes to stand on these very buffers has been digested already."""
        with self._lock:
            self._attempts += 1
            self._staged, self._staging, mine = None, offer.policy.number, self._attempts
        self._check_base(offer)
        clock = [time.perf_counter()]
        plan, digested = offer.plan, digested or {}
        numbers = device_numbers(self.destination.values()) if self._numbers is None else self._numbers
        staged = self.transport.receive(offer.policy.number, plan, self.destination, numbers, deadline)
        self._check_staged(plan, staged.tree)
        clock.append(time.perf_counter())
        digests = self._digests(offer, digested, staged.tree)
        check_same(offer.digests, digests, self._source, self.name)
        clock.append(time.perf_counter())
        probed = self._probe(offer, staged.tree)
        clock.append(time.perf_counter())
        written = sum(
            written_bytes(digested[path], leaf) if path in digested else _held_bytes(leaf)
            for path, leaf in staged.tree.items()
        )
        with self._lock:
            if mine != self._attempts:
                raise SyncError(f"sync: version {offer.policy.number} was discarded at {self.name} while it was staged")
            self._staged = offer.policy, staged.tree
        phases = zip(("transfer", "verify", "probe"), clock, clock[1:], strict=False)
        seconds = {phase: end - start for phase, start, end in phases if phase != "probe" or offer.probe}
        return StageReport(self.name, digests, staged.link_bytes, written, probed, seconds)

    def flip(self, policy: PolicyVersion, deadline: Deadline) -> None:
        """As `Replica.flip`. An `install` that breaks with anything but a SyncError leaves the replica poisoned."""
        with self._lock:
            if self._staged is None or self._staged[0] != policy:
                held = "nothing" if self._staged is None else f"{self._staged[0]}"
                raise SyncError(f"sync: {self.name} was told to serve {policy}, but has {held} staged and verified")
            tree = self._staged[1]
            try:
                if self._install is not None:
                    self._install(policy, tree)
            except SyncError:
                raise
            except BaseException as error:
                self._poisoned = f"installing {policy} broke with {type(error).__name__}: {error}"
                raise
            self._installed, self._active = tree, policy
            self._staged = self._poisoned = None

    def discard(self, version: int) -> None:
        """As `Replica.discard`; what is still being staged is dropped when it arrives."""
        with self._lock:
            if self._staging == version:  # also where it has been staged; a late word about another one is not for it
                self._attempts += 1
                self._staged, self._staging = None, -1

    def _check_base(self, offer: Offer) -> None:
        """An adapter is nothing without the base that it was trained on."""
        if offer.base_digest != self._base_digest:
            raise SyncError(
                f"sync: {offer.policy} belongs to frozen weights of digest {offer.base_digest or 'none'}, "
                f"{self.name} holds {self._base_digest or 'none'}; load the same base there, and give the replica the "
                f"digest of what it holds"
            )

    def _check_staged(self, plan: SyncPlan, staged: Mapping[str, jax.Array]) -> None:
        """The transport's word is not taken for it: names, shapes, dtypes and places of what came."""
        check_names(staged, plan.leaves, f"staged tree of {self.name}")
        for path, leaf in plan.leaves.items():
            got, place = staged[path], self.destination[path]
            if got.shape != leaf.shape or got.dtype.name != leaf.dtype:
                raise SyncError(
                    f"sync: {path} was staged as {kind_of(got)}, the plan says {leaf.dtype}"
                    f"[{','.join(map(str, leaf.shape))}]; source: {leaf.source_layout.describe()}; staged: "
                    f"{describe_layout(got.sharding)}"
                )
            if got.sharding != place:
                raise SyncError(
                    f"sync: {path} {kind_of(got)} was staged as {describe_layout(got.sharding)}; "
                    f"declared: {describe_layout(place)}"
                )

    def _digests(
        self, offer: Offer, digested: Mapping[str, jax.Array], staged: Mapping[str, jax.Array]
    ) -> dict[str, str]:
        """Of every staged leaf; those on the sender's very buffers were digested by the sender."""
        same = {
            path: offer.digests[path]
            for path, leaf in staged.items()
            if path in digested
            and path in offer.digests
            and len(shared_devices(digested[path], leaf)) == len(leaf.sharding.device_set)
        }
        return same | leaf_digests({path: in_default_memory(leaf) for path, leaf in staged.items() if path not in same})

    def _probe(self, offer: Offer, staged: Mapping[str, jax.Array]) -> int:
        if offer.probe is None:
            return 0
        if self._score is None:
            raise SyncError(f"sync: a probe is asked for, but {self.name} was given no way to score sequences")
        score = self._score
        check_probe(offer.probe, lambda sequences: score(staged, sequences), self.name)
        return len(offer.probe.sequences)


def _held_bytes(leaf: jax.Array) -> int:
    """Bytes of all its shards, replicas included."""
    return sum(shard.data.nbytes for shard in leaf.addressable_shards)
