"""Weights offered by one process and pulled by another: the same bits, or an error that says why not."""

from __future__ import annotations

import contextlib
import socket
import threading
from dataclasses import replace

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lockstep.errors import ConfigError, SyncError
from lockstep.serve.hosts import AllowedHosts
from lockstep.service import offers
from lockstep.service.controls import Source
from lockstep.service.offers import offer, pull
from lockstep.sync.transfer_server import TransferTransport


def anything(forms: object) -> None:
    """A check that nothing fails."""


@pytest.fixture(scope="module")
def weights() -> dict[str, object]:
    rng = np.random.default_rng(3)
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b"))
    cut = jax.device_put(
        rng.standard_normal((6, 8)).astype(ml_dtypes.bfloat16), NamedSharding(mesh, PartitionSpec("b"))
    )
    return {"cut": cut, "host": rng.standard_normal((3, 5)).astype(np.float32), "one": jax.numpy.float32(2.5)}


def test_what_is_pulled_is_what_was_offered(weights) -> None:
    """Sharded, in host memory, scalar; twice, and by two at once."""
    with offer(weights) as source:
        assert source == Source(**source.to_json()) and source.token not in repr(source)
        found: list[dict[str, np.ndarray]] = []
        asked: list[object] = []
        calls = [threading.Thread(target=lambda: found.append(pull(source, source.place, asked.append))) for _ in "ab"]
        for call in calls:
            call.start()
        for call in calls:
            call.join()
        found.append(pull(source, source.place, anything))
    assert asked[0] == {"cut": ((6, 8), "bfloat16"), "host": ((3, 5), "float32"), "one": ((), "float32")}
    assert len(found) == 3
    for tree in found:
        assert set(tree) == set(weights)
        for name, array in tree.items():
            wanted = np.asarray(weights[name])
            assert (array.dtype, array.shape, array.tobytes()) == (wanted.dtype, wanted.shape, wanted.tobytes())
    with pytest.raises(SyncError, match=f"cannot reach the offer at {source.place}"):
        pull(source, source.place, anything)


def test_who_does_not_know_what_is_offered_gets_nothing(weights) -> None:
    with offer(weights) as source:
        with pytest.raises(SyncError, match=r"token"):
            pull(replace(source, token="another secret, long enough"), source.place, anything)
        with pytest.raises(SyncError, match=f"digest {source.digest}, the request says {'0' * 32}; nothing is staged"):
            pull(replace(source, digest="0" * 32), source.place, anything)

        def refuse(forms: object) -> None:
            raise SyncError("sync: another model")

        with pytest.raises(SyncError, match="another model"):
            pull(source, source.place, refuse)
        assert set(pull(source, source.place, anything)) == set(weights), "and it is offered still"


def test_weights_that_change_on_the_way_are_found(weights, monkeypatch: pytest.MonkeyPatch) -> None:
    send = TransferTransport.send

    def altered(self, version, plan, source, *rest):
        other = np.array(source["host"])
        other[1, 2] = np.nextafter(other[1, 2], np.float32(9))
        return send(self, version, plan, source | {"host": jax.device_put(other, source["host"].sharding)}, *rest)

    monkeypatch.setattr(TransferTransport, "send", altered)
    with offer(weights) as source, pytest.raises(SyncError, match="in 1 of 3 leaves: host: the offer at"):
        pull(source, source.place, anything)


def test_an_offer_whose_process_ends_or_is_silent_is_said(weights, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offers, "CONNECT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        place = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(SyncError, match=f"waited .* for the offer at {place}"):
            pull(Source("transfer", place, "t" * 16, "0" * 32), place, anything)
        silent.settimeout(5)
        heard, _ = silent.accept()
        with heard:
            assert heard.recv(100) == b"", "nothing is sent to what does not greet as an offer"
    with contextlib.ExitStack() as stack:
        source = stack.enter_context(offer(weights))
        with pytest.raises(SyncError, match="lost the offer at"):
            pull(source, source.place, lambda forms: stack.close())
    with offer(weights) as source:
        monkeypatch.setattr(TransferTransport, "_offer", lambda *_: None)  # a pull of it never ends by itself
        with pytest.raises(SyncError, match="had not arrived"):
            pull(source, source.place, anything, seconds=1.0)


def test_what_cannot_be_offered_is_said() -> None:
    for weights, host, message in (
        ({}, "127.0.0.1", "no weights"),
        ({"x": [1.0]}, "127.0.0.1", "x is a list"),
        ({"x": np.ones(2, bool)}, "127.0.0.1", "x has type bool"),
        ({"x": np.ones(2, np.float32)}, "0.0.0.0", "no address that a service could pull from"),
    ):
        with pytest.raises(SyncError, match=message), offer(weights, host=host):
            pass


# -- which hosts


@given(st.ip_addresses())
@example("0.0.0.0")
@example("::ffff:10.0.0.1")
@example("169.254.169.254")
def test_only_this_machine_is_connected_to_unless_more_is_allowed(address) -> None:
    host = str(address)
    place = f"[{host}]:80" if ":" in host else f"{host}:80"
    local = host == "::1" or host.startswith(("127.", "::ffff:7f"))
    if local:
        AllowedHosts().address(place)
    else:
        with pytest.raises(SyncError, match="--offers-from"):
            AllowedHosts().address(place)
        if not host.startswith("::ffff:"):  # an IPv4 address in disguise is to be listed as what it is
            assert AllowedHosts.of([host]).address(place) == place


def test_names_are_looked_up_only_if_they_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []

    def look(host, port, **_):
        looked.append(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", ("10.9.8.7", port))]

    monkeypatch.setattr(socket, "getaddrinfo", look)
    allowed = AllowedHosts.of(["trainer.example", "10.0.0.0/24", "fd00::/8"])
    assert allowed.address("Trainer.example:7") == "10.9.8.7:7" and looked == ["trainer.example"]
    assert allowed.address("localhost:7") == "127.0.0.1:7"
    assert allowed.address("10.0.0.9:7") == "10.0.0.9:7" and allowed.address("[fd00::1]:7") == "[fd00::1]:7"
    for place in ("evil.example:7", "10.0.1.9:7", "2130706433:7", "127.1:7", "[::ffff:10.0.1.9]:7", "metadata:80"):
        with pytest.raises(SyncError, match="not pulled from"):
            allowed.address(place)
    for place in ("127.0.0.1:0", "127.0.0.1:65536", "127.0.0.1:", "127.0.0.1"):
        with pytest.raises(SyncError, match="expected host:port"):
            allowed.address(place)
    assert looked == ["trainer.example"]
    for word in ("10.0.0.1/24", "a b", "-", ""):
        with pytest.raises(ConfigError, match="no host to allow"):
            AllowedHosts.of([word])
