"""Which transport takes weights to another process, by its name, where somebody chooses."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from lockstep.errors import SyncError

if TYPE_CHECKING:  # a choice can be read without jax
    from lockstep.sync.remote import RemoteTransport

TransportName = Literal["shared_memory", "transfer", "files"]
TRANSPORTS: tuple[TransportName, ...] = get_args(TransportName)


@dataclass(frozen=True)
class Way:
    """How weights get to a replica; both sides must take the same. folder: of `files`, where both sides find it (empty
    for the others)."""

    transport: TransportName = "shared_memory"
    folder: str = ""

    def make(self, owner: str, host: str = "127.0.0.1") -> RemoteTransport:
        """One side's half. owner: who leaves things there (a name that no other process uses). host: this side's
        address, which the other can reach. Raises SyncError where the transport cannot be had here."""
        if self.transport == "shared_memory":
            from lockstep.sync.shared_memory import SharedMemoryTransport

            return SharedMemoryTransport(owner.replace("-", "_"))
        if self.transport == "transfer":
            from lockstep.sync.transfer_server import TransferTransport

            return TransferTransport(host=host)
        if self.transport == "files" and self.folder:
            from lockstep.sync.files_transport import FilesTransport

            return FilesTransport(Path(self.folder))
        raise SyncError(
            f"sync: {self} is no way for weights; expected one of {', '.join(TRANSPORTS)}, files with a folder"
        )
