"""Weights that a process holds, offered at an address, so that a service can stage them.

    with offer(weights) as source:              # name -> array: the leaves' own names, or Hugging Face's
        client.stage(source, 7)                 # over HTTP: {"source": source.to_json(), "number": 7}
    client.commit(7)                            # the service has them: the offer may end

Who pulls connects to the offer's `channel`, which takes only those who know its secret, asks what there is, and sends
the plan by which it wants it. The weights then go from one process's CPU to the other's over `TransferTransport`, by
rounds, so neither side holds more than the weights and two rounds of them. What arrived is held against the digests of
the leaves, and these against the one digest that came with the request.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lockstep.cluster.devices import cpu_device, in_host_memory
from lockstep.errors import SyncError
from lockstep.service.controls import Source
from lockstep.sync.arrays import device_numbers, layout_of, placed
from lockstep.sync.channel import Channel, Listener, Message, connect, new_token
from lockstep.sync.digest import host_digest
from lockstep.sync.ends import numbers_from, renumbered
from lockstep.sync.hosted import gather
from lockstep.sync.mapping import Form
from lockstep.sync.plan import Placed
from lockstep.sync.planner import make_plan
from lockstep.sync.transfer_server import TransferTransport
from lockstep.sync.transport import Deadline
from lockstep.sync.verify import check_same, tree_digest
from lockstep.sync.wire import places_from_json, places_to_json, plan_from_json, plan_to_json

CONNECT_S = 10.0  # for an offer to answer at all
PULL_S = 1800.0  # for all of it
_VERSION = 0  # of an offer: it has one content
_FIRST_DEVICE = 1 << 21  # device numbers of who pulls, in plans: none of the offer's


@contextlib.contextmanager
def offer(weights: Mapping[str, Any], *, host: str = "127.0.0.1", port: int = 0) -> Iterator[Source]:
    """Offer these weights while the block runs; they must not change meanwhile.

    weights: name -> jax or numpy array, all that a version replaces and nothing else: the leaves' own names (an
    adapter's, say) or the model's Hugging Face names; float32, bfloat16 or float16. What is not on the CPU is copied
    there. host, port: where; an address of this machine that the service can reach, and is allowed to
    (`lockstep serve --offers-from`). Neither side encrypts.

    Yields the source to stage: it has the address, a secret of this offer alone, and the digest of the weights. Raises
    SyncError for weights that cannot be offered, and where nothing can listen there.
    """
    if host in ("0.0.0.0", "::", ""):
        raise SyncError(f"offer: {host!r} is no address that a service could pull from; name one of this machine")
    tree = {name: _on_cpu(name, array) for name, array in weights.items()}
    if not tree:
        raise SyncError("offer: there are no weights to offer")
    digests = {name: host_digest(gather(name, leaf), name) for name, leaf in tree.items()}
    token = new_token()
    # Where to listen is the caller's word, so a machine's other addresses need no second one.
    listener = Listener(f"{host}:{port}", token, here="the offer", allow_remote=True)
    serving = _Serving(listener, tree, digests)
    try:
        yield Source("transfer", listener.address, token, tree_digest(digests))
    finally:
        serving.close()


def _on_cpu(name: str, array: Any) -> jax.Array:
    if isinstance(array, jax.Array):
        if array.is_fully_addressable and in_host_memory(list(array.sharding.device_set)):
            return array
        array = gather(name, array)
    if not isinstance(array, np.ndarray):
        raise SyncError(f"offer: {name} is a {type(array).__name__}; expected a jax or numpy array")
    return jax.device_put(array, cpu_device())


class _Serving:
    """Answers whoever pulls, each in a thread and with a transport of its own."""

    def __init__(self, listener: Listener, tree: Mapping[str, jax.Array], digests: Mapping[str, str]) -> None:
        self._listener, self._tree, self._digests = listener, tree, digests
        self._open: set[Channel] = set()
        self._threads: set[threading.Thread] = set()
        self._closed = False
        self._acceptor = threading.Thread(target=self._accept, name="offer", daemon=True)
        self._acceptor.start()

    def close(self) -> None:
        """Nothing is offered any more when this returns."""
        self._closed = True
        self._listener.close()
        self._acceptor.join()
        for channel in list(self._open):
            channel.close()
        for thread in list(self._threads):
            thread.join()

    def _accept(self) -> None:
        while (sock := self._listener.accept()) is not None:
            thread = threading.Thread(target=self._serve, args=(sock,), name="offer", daemon=True)
            self._threads.add(thread)
            thread.start()

    def _serve(self, sock: Any) -> None:
        """One connection. What goes wrong with it is told to the other side where it can be; it is that side's
        caller who must know."""
        try:
            with contextlib.suppress(SyncError):  # who does not know the secret, or hangs up, as at the end all do
                channel = self._listener.authenticate(sock)
                self._open.add(channel)
                try:
                    if not self._closed:  # `close` may not have seen this one
                        self._converse(channel)
                finally:
                    self._open.discard(channel)
                    channel.close()
        finally:
            self._threads.discard(threading.current_thread())

    def _converse(self, channel: Channel) -> None:
        deadline = Deadline.after(PULL_S)
        transport = TransferTransport(host=channel.local_host)
        try:
            while True:
                request = channel.receive("what it asks of the offer", -1, deadline)
                if request.get("do") == "arrived":
                    transport.arrived(_VERSION, int(request["round"]))
                    continue
                try:
                    answer = self._answer(transport, request, deadline)
                except SyncError as error:
                    answer = {"error": str(error).removeprefix("sync: ")}
                channel.send(answer, deadline)
        finally:
            transport.release(_VERSION, False)

    def _answer(self, transport: TransferTransport, request: Message, deadline: Deadline) -> Message:
        if request.get("do") == "describe":
            places = {name: placed(leaf) for name, leaf in self._tree.items()}
            return {"places": places_to_json(places), "digests": dict(self._digests)}
        if request.get("do") == "send":
            plan = plan_from_json(request.get("plan"))
            numbers = device_numbers(leaf.sharding for leaf in self._tree.values())
            transport.send(_VERSION, plan, self._tree, numbers, deadline)
            return {"ticket": transport.ticket(_VERSION)}
        raise SyncError(f"sync: {request.get('do')!r} is nothing that an offer is asked; expected describe or send")


def pull(
    source: Source, address: str, check: Callable[[Mapping[str, Form]], None], seconds: float = PULL_S
) -> dict[str, np.ndarray]:
    """The weights of an offer, name -> array in this process's memory, verified leaf by leaf.

    address: ip:port, of `source.place`, and where it is allowed to connect; nothing is connected to elsewhere. check:
    raises unless shapes and dtypes by name are what is wanted; nothing is moved before. Raises SyncError where nobody
    answers in time, who answers does not know the secret, the weights are not those of `source.digest`, or what arrived
    is not what was offered.
    """
    deadline = Deadline.after(seconds)
    name = f"the offer at {source.place}"
    channel = connect(address, source.token, here="the service", there=name, deadline=deadline.at_most(CONNECT_S))
    try:
        places, digests = _described(_ask(channel, {"do": "describe"}, "what it offers", deadline), name)
        if (found := tree_digest(digests)) != source.digest:
            raise SyncError(
                f"sync: {name} has weights of digest {found}, the request says {source.digest}; nothing is staged"
            )
        check({path: (place.shape, place.dtype) for path, place in places.items()})
        tree = _received(channel, places, address.rpartition(":")[0], deadline)
    finally:
        channel.close()
    arrays = {path: np.asarray(leaf) for path, leaf in tree.items()}
    check_same(digests, {path: host_digest(array, path) for path, array in arrays.items()}, name, "the service")
    return arrays


def _received(channel: Channel, places: Mapping[str, Placed], host: str, deadline: Deadline) -> dict[str, jax.Array]:
    whole = NamedSharding(Mesh(np.array([cpu_device()]), ("device",)), PartitionSpec())
    where = dict.fromkeys(places, whole)
    numbers = numbers_from(_FIRST_DEVICE, [whole])
    wanted = {path: Placed(p.shape, p.dtype, layout_of(whole, p.shape)) for path, p in places.items()}
    plan = make_plan(places, renumbered(wanted, numbers))
    answer = _ask(channel, {"do": "send", "plan": plan_to_json(plan)}, "to send them", deadline)
    transport = TransferTransport(
        host=channel.local_host,
        on_round=lambda version, number: channel.send({"do": "arrived", "round": number}, deadline, version),
    )
    ticket = answer.get("ticket")
    if not isinstance(ticket, dict) or not isinstance(ticket.get("address"), str):
        raise SyncError(f"sync: {channel.there} answers without the ticket of a transfer")
    # Whatever it says: the host is the one that was allowed.
    transport.redeem(_VERSION, ticket | {"address": f"{host}:{ticket['address'].rpartition(':')[2]}"})
    return transport.receive(_VERSION, plan, where, numbers, deadline).tree


def _ask(channel: Channel, message: Message, what: str, deadline: Deadline) -> Message:
    channel.send(message, deadline)
    answer = channel.receive(what, -1, deadline)
    if "error" in answer:
        raise SyncError(f"sync: {channel.there}: {str(answer['error'])[:2000]}")
    return answer


def _described(answer: Message, name: str) -> tuple[dict[str, Placed], dict[str, str]]:
    places, digests = places_from_json(answer.get("places")), answer.get("digests")
    if (
        not isinstance(digests, dict)
        or set(digests) != set(places)
        or not all(isinstance(d, str) for d in digests.values())
    ):
        raise SyncError(f"sync: {name} does not give a digest for each of the leaves that it offers")
    return places, digests
