"""The transport to another process over `jax.experimental.transfer`: the sender offers, the receiver pulls.

    sender = TransferTransport()                                      # in the trainer
    sender.send(7, plan, actor, numbers, deadline)
    ticket = sender.ticket(7)                                         # crosses over the control channel

    receiver = TransferTransport(on_round=tell_the_sender)            # in the sampler; the sender's `arrived` is called
    receiver.redeem(7, ticket)
    staged = receiver.receive(7, plan, rollout_shardings, numbers, deadline)

Every (round, sender, receiver) of the plan that has anything to move is one offer: the boxes, cut on the sending
device, in the type that crosses. The receiver pulls each offer onto the device that needs it, puts it into place, and
reports the round; so the sender holds the cuts of at most `window` rounds. Relays are carried out here as in one
process: they run between devices of the receiving one.

What the library does and does not do (jax 0.10.2, tried with processes killed at every point): a pull returns arrays
that become ready, or carry an error, later; its `timeout` has no effect, and a pull of what is never offered, or from
an address where nobody listens, never becomes ready. So nothing here waits for an array: it asks, until the deadline.
Dropping such an array is free. A peer that dies makes its pulls fail at once. Whoever reaches the port and guesses an
offer's 63-bit number can pull it: numbers are derived from a secret of the ticket, and addresses are loopback unless
told otherwise. Nothing is encrypted.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import jax
from jax.experimental import transfer
from jax.sharding import Sharding, SingleDeviceSharding

from lockstep.cluster.devices import HostMemory, in_host_memory
from lockstep.errors import SyncError
from lockstep.sync import local_device
from lockstep.sync.ends import check_destination, checked_source
from lockstep.sync.moves import Move, Prepared, prepare
from lockstep.sync.parts import Parts, cut, parts_of
from lockstep.sync.plan import SyncPlan
from lockstep.sync.transport import Deadline, Sent, Staged

TRANSFER_BYTES = 16 << 20  # per message on the socket; the library's default of 256 MiB halves the speed on one host
SOCKETS = 2
_POLL_S = (0.0002, 0.005)  # between two looks at what is under way: first, at most

Ticket = dict[str, Any]
Link = tuple[int, int]


def endpoint(client: Any, host: str) -> transfer.TransferServer:
    """This process's transfer server at `host`; one for all transports. Raises SyncError where none can be had."""
    return _endpoint(client, host)


@lru_cache(maxsize=16)
def _endpoint(client: Any, host: str) -> transfer.TransferServer:
    try:
        # Without addresses for the data the library takes both sides for one process, and aborts when they are not.
        return transfer.start_transfer_server(
            client,
            f"{host}:0",
            [f"{host}:0"] * SOCKETS,
            transfer_size=TRANSFER_BYTES,
            use_raw_buffers=in_host_memory(client.devices()),
        )
    except Exception as error:  # jaxlib's own kind, whatever the platform lacks
        raise SyncError(f"sync: no transfer server at {host!r} on {client.platform}: {error}") from error


@dataclass
class _Outbox:
    """What one `send` has to offer. cut: how far, in rounds. pulled: rounds that have arrived."""

    nonce: str
    plan: SyncPlan
    rounds: tuple[dict[Link, list[Move]], ...]
    shards: dict[str, dict[int, jax.Array]]
    server: transfer.TransferServer
    cut: int = 0
    pulled: set[int] = field(default_factory=set)


class TransferTransport:
    """One pair of sender and receiver; either side needs only its own half.

    host: address to offer at, or to receive at; others must be able to reach it, so 127.0.0.1 serves one machine.
    window: rounds whose cuts the sender keeps ready. on_round: called with (version, round) when a round is in place.
    """

    name = "transfer"

    def __init__(
        self, *, host: str = "127.0.0.1", window: int = 2, on_round: Callable[[int, int], None] | None = None
    ) -> None:
        assert window >= 1, window
        self.on_round = on_round
        self._host, self._window = host, window
        self._outboxes: dict[int, _Outbox] = {}
        self._tickets: dict[int, Ticket] = {}
        self._prepared: tuple[str, Prepared] | None = None
        self._memory = HostMemory()

    # -- the sender ----------------------------------------------------------------------------------------------------

    def send(
        self,
        version: int,
        plan: SyncPlan,
        source: Mapping[str, jax.Array],
        numbers: Mapping[int, jax.Device],
        deadline: Deadline,
        digest: str = "",
    ) -> Sent:
        """As `Transport.send`: offers the first rounds; the others follow as rounds arrive. An earlier offer of this
        version is withdrawn."""
        start = time.perf_counter()
        self.release(version, False)
        leaves = checked_source(plan, source, version)
        shards = {
            path: {shard.device.id: shard.data for shard in local_device.in_default_memory(leaf).addressable_shards}
            for path, leaf in leaves.items()
        }
        rounds = tuple(_links(moves) for moves in self._prepare(plan).rounds)
        client = next(iter(numbers.values())).client
        box = _Outbox(secrets.token_hex(16), plan, rounds, shards, endpoint(client, self._host))
        self._outboxes[version] = box
        for _ in range(self._window):
            self._offer_round(box)
        return Sent({}, time.perf_counter() - start)

    def ticket(self, version: int) -> Ticket:
        """What the receiver needs to know, as JSON: where, which plan, and the secret that offers are numbered with."""
        box = self._outboxes.get(version)
        if box is None:
            raise SyncError(f"sync: version {version} was not sent over {self.name!r}, so there is no ticket for it")
        return {"address": box.server.address(), "nonce": box.nonce, "plan": box.plan.hash}

    def arrived(self, version: int, round_number: int) -> None:
        """The receiver has a round in place: its cuts are free, the next one is offered. Late and repeated reports are
        harmless."""
        box = self._outboxes.get(version)
        if box is None or round_number in box.pulled or not 0 <= round_number < len(box.rounds):
            return
        box.pulled.add(round_number)
        self._offer_round(box)

    def forget(self) -> None:
        """As `Transport.forget`: every version is whole anyway."""

    def release(self, version: int, published: bool) -> None:
        """As `Transport.release`: what was offered and not pulled is replaced by nothing."""
        box = self._outboxes.pop(version, None)
        if box is None:
            return
        for number in range(box.cut):
            if number not in box.pulled:
                for link in box.rounds[number]:
                    self._offer(box, number, link, [])

    def _offer_round(self, box: _Outbox) -> None:
        if box.cut == len(box.rounds):
            return
        number = box.cut
        for link, moves in box.rounds[number].items():
            cuts = [
                cut(box.shards[move.source][move.sender], move, box.plan.leaves[move.target].wire_dtype, self._memory)
                for move in moves
            ]
            self._offer(box, number, link, cuts)
        box.cut += 1

    def _offer(self, box: _Outbox, number: int, link: Link, arrays: list[jax.Array]) -> None:
        """A second offer under one number takes the first one's place."""
        box.server.await_pull(_number_of(box.nonce, number, link), arrays)

    # -- the receiver --------------------------------------------------------------------------------------------------

    def redeem(self, version: int, ticket: Mapping[str, Any]) -> None:
        """Take note of where `version` is to be pulled from. Raises SyncError for what is no ticket."""
        wanted = {"address", "nonce", "plan"}
        if set(ticket) != wanted or not all(isinstance(value, str) for value in ticket.values()):
            raise SyncError(f"sync: a ticket for transport {self.name!r} has {', '.join(sorted(wanted))} as texts; "
                            f"got {sorted(ticket)}")  # fmt: skip
        self._tickets[version] = dict(ticket)

    def receive(
        self,
        version: int,
        plan: SyncPlan,
        destination: Mapping[str, Sharding],
        numbers: Mapping[int, jax.Device],
        deadline: Deadline,
    ) -> Staged:
        """As `Transport.receive`. A ticket is good for one attempt."""
        start = time.perf_counter()
        ticket = self._tickets.pop(version, None)
        if ticket is None or ticket["plan"] != plan.hash:
            held = "none was redeemed" if ticket is None else f"the one there is for plan {ticket['plan']}"
            raise SyncError(f"sync: plan {plan.hash} of version {version} needs a ticket from its sender; {held}")
        check_destination(plan, destination, numbers, self.name)
        client = next(iter(numbers.values())).client
        server, address = endpoint(client, self._host), ticket["address"]
        prepared = self._prepare(plan)
        parts = parts_of(plan, prepared, numbers, self._memory)
        pulling = _Pulling(version, plan, parts, numbers, deadline, address)
        try:
            connection = server.connect(address)
            for number, moves in enumerate(prepared.rounds):
                what = f"round {number + 1} of {len(prepared.rounds)}"
                pulling.pull(connection, ticket["nonce"], number, _links(moves), what)
                pulling.relay(moves)
                pulling.wait(parts.pending(), f"{what} to be put into place")
                if self.on_round is not None:
                    self.on_round(version, number)
            tree = parts.assembled(destination)
            pulling.wait(list(tree.values()), "the leaves to be put together")
        except (RuntimeError, ValueError) as error:  # jaxlib's errors are RuntimeErrors; an address can be no address
            raise SyncError(f"sync: version {version} could not be pulled from {address}: {error}") from error
        return Staged(tree, pulling.link_bytes, time.perf_counter() - start)

    def _prepare(self, plan: SyncPlan) -> Prepared:
        if self._prepared is None or self._prepared[0] != plan.hash:
            self._prepared = plan.hash, prepare(plan)
        return self._prepared[1]


class _Pulling:
    """One receive under way. link_bytes: of what has arrived, measured on the arrays."""

    def __init__(
        self,
        version: int,
        plan: SyncPlan,
        parts: Parts,
        numbers: Mapping[int, jax.Device],
        deadline: Deadline,
        address: str,
    ) -> None:
        self._version, self._plan, self._parts, self._numbers = version, plan, parts, numbers
        self._deadline, self._address = deadline, address
        self.link_bytes: dict[Link, int] = {}

    def pull(
        self,
        connection: transfer.TransferConnection,
        nonce: str,
        number: int,
        links: Mapping[Link, list[Move]],
        what: str,
    ) -> None:
        """Pull a round's offers, all at the same time, wait for them, put them into place."""
        under_way = {
            link: connection.pull(_number_of(nonce, number, link), [self._form(move) for move in moves])
            for link, moves in links.items()
        }
        count = sum(map(len, links.values()))

        def missed(left: int) -> SyncError:
            missing = f"{what}: {left} of {count} boxes had not arrived"
            return self._deadline.missed("the receiver", f"the sender at {self._address}", missing, self._version)

        _wait([array for arrays in under_way.values() for array in arrays], missed, self._deadline)
        for link, moves in links.items():
            for move, block in zip(moves, under_way[link], strict=True):
                self._count(link, block.nbytes)
                self._parts.take(move, block)

    def relay(self, moves: tuple[Move, ...]) -> None:
        """What this round passes on between devices of this process."""
        for move in moves:
            if move.relay:
                self._count((move.sender, move.receiver), self._parts.relay(move))

    def wait(self, arrays: list[jax.Array], what: str) -> None:
        """Until this process's own devices are done: only then is staged memory free, and the round has arrived."""
        _wait(
            arrays, lambda _: self._deadline.missed("the receiver", "its devices", what, self._version), self._deadline
        )

    def _form(self, move: Move) -> jax.ShapeDtypeStruct:
        place = SingleDeviceSharding(self._numbers[move.receiver])
        return jax.ShapeDtypeStruct(move.shape, self._plan.leaves[move.target].wire_dtype, sharding=place)

    def _count(self, link: Link, size: int) -> None:
        self.link_bytes[link] = self.link_bytes.get(link, 0) + size


def _links(moves: tuple[Move, ...]) -> dict[Link, list[Move]]:
    """A round's moves from one process to the other, by link, in an order that both sides find by themselves."""
    found: dict[Link, list[Move]] = {}
    for move in moves:
        if not move.relay:
            found.setdefault((move.sender, move.receiver), []).append(move)
    for boxes in found.values():
        boxes.sort(key=lambda move: (move.target, move.write))
    return found


def _number_of(nonce: str, number: int, link: Link) -> int:
    """The library's number of an offer: 63 bits that only who knows the nonce can tell."""
    text = f"{nonce} {number} {link[0]} {link[1]}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def _wait(arrays: list[jax.Array], missed: Callable[[int], SyncError], deadline: Deadline) -> None:
    """Until all are there. Raises what `missed` makes of the number that is not at the deadline, and RuntimeError for
    one that carries an error."""
    pause, most = _POLL_S
    waiting = list(arrays)
    while waiting := [array for array in waiting if not array.is_ready()]:  # type: ignore[attr-defined]
        if not deadline.remaining():
            raise missed(len(waiting))
        time.sleep(pause)
        pause = min(most, 2 * pause)
    jax.block_until_ready(arrays)
