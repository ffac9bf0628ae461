"""A replica of the weight sync whose versions are taken over as the rollout service's protocol says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import jax

from lockstep.sync.publish import Offer, Replica, StageReport
from lockstep.sync.replica import LocalReplica
from lockstep.sync.transport import Deadline
from lockstep.types import PolicyVersion

if TYPE_CHECKING:
    from lockstep.service.service import RolloutService


class ServedReplica:
    """A `publish.Replica` around another one. Whether a version may be served is the inner one's to decide; when, and
    what becomes of the requests under way, the protocol's."""

    def __init__(self, inner: Replica, service: RolloutService) -> None:
        self.name, self.inner, self._service = inner.name, inner, service

    @property
    def active(self) -> PolicyVersion | None:
        active = self.inner.active
        if self._service.protocol.replicas[self.name].out is not None:  # somebody knows again
            self._service.serves(self.name, active)
        return active

    def stage(self, offer: Offer, deadline: Deadline, digested: Mapping[str, jax.Array] | None = None) -> StageReport:
        """As `Replica.stage`; digested: as `LocalReplica.stage`."""
        attempt = self._service.staging(self.name, offer.policy)
        if isinstance(self.inner, LocalReplica):
            report = self.inner.stage(offer, deadline, digested)
        else:
            report = self.inner.stage(offer, deadline)
        self._service.staged(self.name, attempt)
        return report

    def flip(self, policy: PolicyVersion, deadline: Deadline) -> None:
        """As `Replica.flip`, once no request stands in the way. What it serves after a failure is asked at once; while
        nobody can tell, nothing is sent there."""
        self._service.flip(self.name, policy, lambda: self._install(policy, deadline), deadline)

    def _install(self, policy: PolicyVersion, deadline: Deadline) -> None:
        try:
            # What was sent to it before belongs to the version of before.
            self._service.workers[self.name].barrier(max(deadline.remaining(), 1e-3))
            self.inner.flip(policy, deadline)
        except BaseException:
            try:
                active = self.inner.active
            except Exception as error:
                self._service.leave_out(self.name, f"its answer to the flip to {policy} is lost: {error}")
            else:
                self._service.serves(self.name, active)
            raise
        self._service.serves(self.name, policy)

    def discard(self, version: int) -> None:
        """As `Replica.discard`; a flip that waits for requests under way is given up."""
        self._service.discard(self.name, version)
        self.inner.discard(version)
