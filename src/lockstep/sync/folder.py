"""Every published version as a folder that other processes follow: a replica that samples nothing.

    replica = FolderReplica("folder", mapping, DeltaFilesTransport(Path("weights"), keep=2))
    sync = WeightSync(leaves, [Route.local(sampler), replica.route()], base=base)

`stage` reads the version back off the disk and holds every leaf against its digest; `flip` names it in `CURRENT`, a
JSON object with `version`, `digest` (of the policy) and `folder`, which is replaced at once. What was not published is
removed by the transport's `release`. A follower needs nothing of lockstep: docs/transports.md has one.
"""

from __future__ import annotations

import json
import time

from lockstep.errors import SyncError
from lockstep.files import write_atomic
from lockstep.sync.digest import host_digest
from lockstep.sync.files_transport import FilesTransport
from lockstep.sync.hosted import said_as_sync_error
from lockstep.sync.layout import Layout, MeshShape
from lockstep.sync.mapping import FormatMap
from lockstep.sync.plan import Placed
from lockstep.sync.publish import Offer, StageReport, planned_links
from lockstep.sync.route import Route
from lockstep.sync.transport import Deadline
from lockstep.sync.verify import check_same
from lockstep.sync.weight_files import folder_of
from lockstep.types import PolicyVersion

CURRENT = "CURRENT"
STORE_DEVICE = 1 << 20  # the folder's number among a plan's devices, beyond any real one


class FolderReplica:
    """A `publish.Replica`. transport: writes the folders, and must be this replica's alone. mapping: what is stored."""

    def __init__(self, name: str, mapping: FormatMap, transport: FilesTransport, *, source: str = "actor") -> None:
        self.name = name
        self.transport = transport
        self._mapping, self._source = mapping, source
        self._active: PolicyVersion | None = None
        self._staged: PolicyVersion | None = None

    @property
    def active(self) -> PolicyVersion | None:
        """The version that this object made the current one last."""
        return self._active

    def placed(self) -> dict[str, Placed]:
        """Every leaf whole, on one device that is nobody's."""
        mesh = MeshShape((), (STORE_DEVICE,))
        return {
            path: Placed(target.shape, target.dtype, Layout(mesh, ((),) * len(target.shape)))
            for path, target in self._mapping.targets.items()
        }

    def route(self) -> Route:
        """For `WeightSync`."""
        return Route(self, self.transport, self.placed, self._mapping, serves=False)

    def stage(self, offer: Offer, deadline: Deadline) -> StageReport:
        """As `Replica.stage`. Nothing lies between the sender and its disk: bytes per link are the plan's, those
        written are what was read back."""
        self._staged = None
        if offer.probe is not None:
            raise SyncError(f"sync: a probe is asked for, but {self.name} only keeps versions; its route must say so")
        start = time.perf_counter()
        digests, held = {}, 0
        for path, leaf in self.transport.read_back(offer.policy.number):
            if not deadline.remaining():
                raise deadline.missed(self.name, "its own disk", f"{path} to be read back", offer.policy.number)
            digests[path], held = host_digest(leaf, path), held + leaf.nbytes
        check_same(offer.digests, digests, self._source, self.name)
        self._staged = offer.policy
        seconds = {"verify": time.perf_counter() - start}
        return StageReport(self.name, digests, planned_links(offer.plan), held, 0, seconds)

    def flip(self, policy: PolicyVersion, deadline: Deadline) -> None:
        """As `Replica.flip`: `CURRENT` names the version from now on."""
        if self._staged != policy:
            raise SyncError(
                f"sync: {self.name} was told to publish {policy}, but has {self._staged} written and verified"
            )
        folder = folder_of(self.transport.root, policy.number)
        current = {"version": policy.number, "digest": policy.digest, "folder": folder.name}
        with said_as_sync_error(f"{folder.parent / CURRENT}"):
            write_atomic(folder.parent / CURRENT, (json.dumps(current) + "\n").encode())
        self._active, self._staged = policy, None

    def discard(self, version: int) -> None:
        """As `Replica.discard`; the folder goes with the transport's `release`."""
        if self._staged is not None and self._staged.number == version:
            self._staged = None
