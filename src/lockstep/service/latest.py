"""What was published last. A service does not go back to an older version by itself: a caller that was answered under
version 7 is not answered under version 3 afterwards because a replica died.

While no replica serves what was published last, nothing is sent to any (`Protocol.latest`). Either it comes back (a
replica that has it staged flips, or whoever published it brings it to a replica that was started again), or it is lost:
then requests fail, saying so, until another version is published.
"""

from __future__ import annotations

from collections.abc import Callable

from lockstep.service.protocol import Protocol
from lockstep.service.state import Effect
from lockstep.types import PolicyVersion


class Latest:
    """Keeps `protocol.latest`. brings: whether whoever starts lost replicas again has a version, and brings it to them;
    None: nobody does."""

    def __init__(self, protocol: Protocol) -> None:
        self._protocol = protocol
        self.brings: Callable[[PolicyVersion], bool] | None = None

    def takes_over(self, name: str, active: PolicyVersion | None) -> None:
        """A replica says what it serves, before the protocol is told. A replica that served nothing may be brought to a
        version that others are just leaving; any other change is a publish, also one to a lower number: a new trainer
        counts anew."""
        protocol = self._protocol
        replica, latest = protocol.replicas[name], protocol.latest
        if active is None or active == replica.active or not replica.alive:
            return
        if latest is None or replica.active is not None or active.number > latest.number or not protocol.served(latest):
            protocol.latest = active

    @property
    def lost(self) -> PolicyVersion | None:
        """The version published last, where nobody can serve it again."""
        protocol, latest = self._protocol, self._protocol.latest
        if latest is None or protocol.closing or not protocol.behind:
            return None
        coming = any(r.alive and r.staged is not None and r.staged.policy == latest for r in protocol.replicas.values())
        return None if coming or (self.brings is not None and self.brings(latest)) else latest

    def ends(self) -> list[Effect]:
        """The ends of what waits, where that version is lost."""
        if (lost := self.lost) is None:
            return []
        waiting = [state.request.id for state in self._protocol.waiting]
        return [e for i in waiting for e in self._protocol.cancel(i, lost_words(lost), "failed")]


def lost_words(version: PolicyVersion) -> str:
    return (
        f"{version}, which was served last, is lost: no replica has it any more, and an older one is not served "
        "instead; let the trainer publish again, or stage and commit a newer version"
    )
