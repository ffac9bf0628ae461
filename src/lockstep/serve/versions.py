"""Versions by request: staged at every replica, verified there, held, then committed or aborted.

What is staged passes through the same weight sync as a trainer's: planned, moved, digests compared where it landed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from lockstep.cluster.devices import cpu_device
from lockstep.cluster.mesh import Dial
from lockstep.cluster.sharding import place
from lockstep.errors import SyncError
from lockstep.serve.role import Served
from lockstep.serve.sources import Sources
from lockstep.service.controls import Source
from lockstep.service.requests import UpdatePolicy
from lockstep.service.service import RolloutService
from lockstep.sync.receipt import SyncReceipt
from lockstep.sync.route import Route
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
    """served: what is served, loaded here. routes: to the replicas that there are now. sources: what `stage` reads. The
    weights are kept on the CPU, whatever devices there are: those are the replicas'."""

    def __init__(
        self, served: Served, service: RolloutService, routes: Callable[[], list[Route]], sources: Sources
    ) -> None:
        self._served, self._service, self._routes, self._sources = served, service, routes, sources
        self._mesh = Dial.build({"actor": {}, "rollout": "actor"}, [cpu_device()]).mesh("actor")
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
            tree = self._place(self._sources.load(source))
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
