"""Versions by request: staged at every replica, verified there, held, then committed or aborted.

What is staged passes through the same weight sync as a trainer's: planned, moved, digests compared where it landed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

from lockstep.cluster.mesh import Dial
from lockstep.cluster.sharding import place
from lockstep.errors import ModelError, SyncError
from lockstep.models.hf import load_folder, name_map
from lockstep.serve.role import Served
from lockstep.service.controls import Source
from lockstep.service.requests import UpdatePolicy
from lockstep.service.service import RolloutService
from lockstep.sync import foreign
from lockstep.sync.receipt import SyncReceipt
from lockstep.sync.route import Route
from lockstep.sync.select import check_names
from lockstep.sync.sync import WeightSync
from lockstep.sync.verify import leaf_digests
from lockstep.types import PolicyVersion

HOLD_S = 3600.0  # that a staged version may wait to be committed, its flips included


@dataclass
class _Held:
    """A version that is staged, or being staged. decided: "commit" or why not."""

    number: int
    staged: threading.Event = field(default_factory=threading.Event)
    told: threading.Event = field(default_factory=threading.Event)
    over: threading.Event = field(default_factory=threading.Event)
    decided: str = ""
    policy: PolicyVersion | None = None
    receipt: SyncReceipt | None = None
    error: BaseException | None = None


class Versions:
    """served: what is served, loaded here. routes: to the replicas that there are now. root: where versions may be read
    from; None: nowhere."""

    def __init__(
        self, served: Served, service: RolloutService, routes: Callable[[], list[Route]], root: Path | None
    ) -> None:
        self._served, self._service, self._routes = served, service, routes
        self._root = None if root is None else root.resolve()
        self._mesh = Dial.build({"actor": {}, "rollout": "actor"}, jax.devices()[:1]).mesh("actor")
        frozen = {path: served.model.params[path] for path in served.frozen}
        self._base = leaf_digests(place(frozen, served.frozen, self._mesh)) if frozen else {}
        self._current: tuple[PolicyVersion | None, dict[str, jax.Array]] = (None, self._place(served.first_weights()))
        self._held: _Held | None = None
        self._lock = threading.Lock()
        self._following = threading.Lock()  # what is current does not change while replicas are brought to it

    def _place(self, weights: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
        return place(weights, self._served.trains, self._mesh)

    def _sync(self, routes: list[Route], deadline_s: float = HOLD_S) -> WeightSync:
        return WeightSync(
            self._served.trains, routes, base=self._base, source_role="front", on_failure="evict", deadline_s=deadline_s
        )

    def publish_first(self) -> PolicyVersion:
        """The weights to begin with, as version 0."""
        tree = self._current[1]
        receipt = self._sync(self._routes()).push(0, tree)
        self._follow(receipt, tree)
        return receipt.policy

    def holds(self, policy: PolicyVersion) -> bool:
        """Whether this version came from here, and can be brought to a replica again."""
        return self._current[0] == policy

    def catch_up(self, route: Route) -> PolicyVersion | None:
        """Bring a replica that was started again to what was published last, if that came from here; else it waits for
        the trainer's next version: nothing older is served in its place."""
        with self._following:
            policy, tree = self._current
            if policy is None or self._service.latest not in (None, policy):
                return None
            return self._sync([route]).push(policy.number, tree).policy

    def _follow(self, receipt: SyncReceipt, tree: dict[str, jax.Array]) -> None:
        """What is published is current. Replicas that are there and missed it, because they came between staging and
        commit, are brought to it: until the next version they would serve the one before, or nothing."""
        with self._following:
            self._current = (receipt.policy, tree)
            for name, why in receipt.evicted.items():
                self._service.leave_out(name, why)
        for route in self._routes():
            if route.replica.name not in receipt.replicas:
                try:
                    self.catch_up(route)
                except SyncError as error:  # said by its status, too; if it is lost, it is started again
                    self._service.leave_out(route.replica.name, str(error))

    # -- by request ----------------------------------------------------------------------------------------------------

    def stage(self, source: Source, number: int) -> dict[str, Any]:
        """As `Controls.stage`."""
        serving = self._service.latest
        with self._lock:
            if self._held is not None and not self._held.over.is_set():
                raise SyncError(f"sync: version {self._held.number} is staged already; commit it or abort it first")
            if serving is not None and number <= serving.number:
                raise SyncError(
                    f"sync: version {number} is out of order; {serving} was published last, use a higher number"
                )
            held = self._held = _Held(number)
        try:
            tree = self._place(self._load(source))
        except BaseException:
            held.over.set()
            raise
        threading.Thread(target=self._push, args=(held, tree), name=f"version {number}", daemon=True).start()
        while not held.staged.wait(0.1):
            if held.over.is_set():
                break
        if held.error is not None:
            raise held.error
        return self._answer(held)

    def commit(self, number: int, policy: UpdatePolicy | None = None) -> dict[str, Any]:
        """As `Controls.commit`. policy: from now on."""
        held = self._decide(number, "commit")
        if policy is not None:
            self._service.update_by(policy)
        held.told.set()
        held.over.wait()
        if held.error is not None:
            raise held.error
        return self._answer(held)

    def abort_version(self, number: int) -> dict[str, Any]:
        """As `Controls.abort_version`."""
        held = self._decide(number, "aborted by request")
        held.told.set()
        held.over.wait()
        return {"version": number, "aborted": True}

    def _decide(self, number: int, what: str) -> _Held:
        """What becomes of the version that is staged: the first who says so is right."""
        with self._lock:
            held = self._held
            if held is None or held.number != number or held.over.is_set() or not held.staged.is_set():
                there = "nothing" if held is None or held.over.is_set() else f"version {held.number}"
                raise SyncError(f"sync: version {number} is not staged, {there} is; stage it first")
            if held.decided:
                raise SyncError(
                    f"sync: version {number} is being {'committed' if held.decided == 'commit' else 'aborted'}"
                )
            held.decided = what
            return held

    def _push(self, held: _Held, tree: dict[str, jax.Array]) -> None:
        def hold(policy: PolicyVersion) -> None:
            held.policy = policy
            held.staged.set()
            if not held.told.wait(HOLD_S / 2):
                with self._lock:
                    held.decided = held.decided or f"nobody committed it within {HOLD_S / 2:g} s"
            if held.decided != "commit":
                raise SyncError(f"sync: version {held.number} was not published: {held.decided}")

        try:
            held.receipt = self._sync(self._routes()).push(held.number, tree, before_flip=hold)
            self._follow(held.receipt, tree)
        except BaseException as error:
            held.error = error
        finally:
            held.over.set()

    @staticmethod
    def _answer(held: _Held) -> dict[str, Any]:
        assert held.policy is not None
        made: dict[str, Any] = {"version": held.number, "digest": held.policy.digest}
        if held.receipt is not None:
            evicted = dict(held.receipt.evicted)
            made |= {"replicas": list(held.receipt.replicas), "evicted": evicted, "seconds": dict(held.receipt.seconds)}
        return made

    # -- where weights are read ----------------------------------------------------------------------------------------

    def _load(self, source: Source) -> dict[str, np.ndarray]:
        """The trained leaves. Raises SyncError or ModelError for a place that may not be read, or is not a version."""
        if source.kind == "transfer":
            raise SyncError(
                "sync: over a transfer address the trainer's own sync stages and flips: connect it to the "
                "`sync_address` of each replica, which the status lists (`lockstep.sync.remote.RemoteReplica`)"
            )
        path = self._confined(source)
        if source.kind == "shared_memory":
            return self._from_segment(path)
        if self._served.config is not None and self._served.frozen:
            raise SyncError("sync: an adapter is staged from shared memory; a folder holds whole models")
        self._check_files(path)
        spec, params = load_folder(path, self._served.dtype, check_finite=True)
        if spec != self._served.model.spec:
            raise ModelError(f"{path} holds another model than the one that is served; its config.json differs")
        return params

    def _confined(self, source: Source) -> Path:
        roots = [self._root] if source.kind == "files" else [Path("/dev/shm")]
        if roots[0] is None:
            raise SyncError("sync: versions are read from no folder here; start the service with --weights-dir DIR")
        path = (roots[0] / source.place).resolve()
        if not path.is_relative_to(roots[0]) or path == roots[0]:
            raise SyncError(f"sync: {source.place!r} is outside of where versions are read from")
        return path

    def _check_files(self, folder: Path) -> None:
        """A folder inside may still hold links to what is outside, or something that is read for ever."""
        assert self._root is not None
        if not folder.is_dir():
            raise SyncError(f"sync: {folder.name!r} is no folder in --weights-dir; write the version there first")
        for path in folder.iterdir():
            real = path.resolve()
            if not real.is_relative_to(self._root):
                raise SyncError(
                    f"sync: {path.name!r} of the version's folder links to outside of --weights-dir; copy it"
                )
            if not (real.is_file() or real.is_dir()):
                raise SyncError(f"sync: {path.name!r} of the version's folder is no regular file")

    def _from_segment(self, path: Path) -> dict[str, np.ndarray]:
        """By the leaves' own names, or by the Hugging Face names of the model."""
        try:
            with foreign.Segment(path) as segment:
                segment.check()
                names = segment.manifest["leaves"]
                if set(names) == set(self._served.trains):
                    found = {name: segment.array(name, check=False).copy() for name in names}
                else:
                    refs = name_map(self._served.model.spec)
                    check_names({n: None for ref in refs.values() for n in ref.names}, names, f"leaves of {path.name}")
                    found = {
                        leaf: np.array(ref.gather(lambda n: segment.array(n, check=False)))
                        for leaf, ref in refs.items()
                    }
        except foreign.WeightsError as error:
            raise SyncError(f"sync: {error}") from error
        bad = [leaf for leaf, a in found.items() if not np.isfinite(np.asarray(a, np.float32)).all()]
        if bad:
            raise SyncError(f"sync: {bad[0]} of {path.name} holds NaN or infinity")
        return {leaf: a.astype(self._served.dtype) for leaf, a in found.items()}
