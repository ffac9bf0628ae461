from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from lockstep.errors import SyncError
from lockstep.sync.channel import Channel, Listener, connect, new_token
from lockstep.sync.transport import Deadline

TOKEN = new_token()


def soon(seconds: float = 10.0) -> Deadline:
    return Deadline.after(seconds)


@pytest.fixture(params=["tcp", "unix"])
def address(request, tmp_path: Path) -> str:
    return "127.0.0.1:0" if request.param == "tcp" else f"unix:{tmp_path}/s"


@pytest.fixture
def listener(address: str) -> Iterator[Listener]:
    with closing(Listener(address, TOKEN, here="sampler", max_bytes=10_000)) as found:
        yield found


def in_thread(call: Callable[[], object]) -> Callable[[], object]:
    """Start the call; the returned function waits for its result, or raises what it raised."""
    found: list = []

    def body() -> None:
        try:
            found.append((call(), None))
        except SyncError as error:
            found.append((None, error))

    thread = threading.Thread(target=body, daemon=True)
    thread.start()

    def result() -> object:
        thread.join(20)
        value, error = found[0]
        if error is not None:
            raise error
        return value

    return result


def pair(listener: Listener, token: str = TOKEN) -> tuple[Channel, Channel]:
    accepted = in_thread(lambda: listener.authenticate(listener.accept()))
    ours = connect(listener.address, token, here="trainer", there="sampler", deadline=soon(), max_bytes=10_000)
    return ours, accepted()


def test_messages_go_both_ways_and_names_are_known(listener):
    ours, theirs = pair(listener)
    with closing(ours), closing(theirs):
        assert theirs.there == "trainer"
        for message in ({}, {"a": [1, 2.5, None, "ü" * 1000]}):
            ours.send(message, soon())
            assert theirs.receive("it", 1, soon()) == message
        theirs.send({"x": 1}, soon())
        assert ours.alive() and ours.receive("it", 1, soon()) == {"x": 1}
        theirs.close()
        time.sleep(0.05)
        assert not ours.alive()


def test_another_token_is_refused_on_both_sides(listener):
    accepted = in_thread(lambda: listener.authenticate(listener.accept()))
    with pytest.raises(SyncError, match=r"lost sampler .*does it have another token"):
        connect(listener.address, new_token(), here="trainer", there="sampler", deadline=soon())
    with pytest.raises(SyncError, match="does not know the token"):
        accepted()


def test_a_listener_that_cannot_prove_itself_is_refused(address):
    """What answers at the address has read our proof, and still does not know the token."""
    with closing(socket.create_server(("127.0.0.1", 0))) as server:

        def impostor() -> None:
            sock, _ = server.accept()
            with closing(Channel(sock, "impostor", "trainer")) as channel:
                channel.send({"lockstep-sync": 1, "nonce": "00"}, soon())
                proof = channel.receive("it", 1, soon())["proof"]
                channel.send({"proof": proof}, soon())

        done = in_thread(impostor)
        where = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(SyncError, match="sampler does not know the token"):
            connect(where, TOKEN, here="trainer", there="sampler", deadline=soon())
        done()


@pytest.mark.parametrize("token", ["", "short", new_token()[:15]])
def test_a_token_that_can_be_guessed_is_refused(token):
    with pytest.raises(SyncError, match="too short"):
        Listener("127.0.0.1:0", token, here="sampler")


@pytest.mark.parametrize(
    ("frame", "match"),
    [
        ((20_000).to_bytes(8, "big"), "announces a message of 20000 bytes"),
        (b"GET / HTTP/1.1\r\n", "announces a message of 5135"),
        ((3).to_bytes(8, "big") + b"{x}", "no JSON"),
        ((2).to_bytes(8, "big") + b"\xff\xfe", "no JSON"),
        ((2).to_bytes(8, "big") + b"[]", "a list, expected an object"),
        ((9).to_bytes(8, "big") + b'{"a":NaN}', "NaN is no number of JSON"),
        ((6000).to_bytes(8, "big") + b"[" * 6000, "no JSON"),
        ((100).to_bytes(8, "big") + b'{"a"', "trainer lost sampler .*the weights, version 7.*closed"),
    ],
)
def test_what_is_no_message_is_refused_and_the_channel_closed(listener, frame, match):
    ours, theirs = pair(listener)
    with closing(ours), closing(theirs):
        theirs._socket.sendall(frame)
        theirs.close()
        with pytest.raises(SyncError, match=match):
            ours.receive("the weights", 7, soon())
        assert not ours.alive()


def test_what_cannot_be_sent_says_so(listener):
    ours, theirs = pair(listener)
    with closing(ours), closing(theirs):
        for bad, match in (
            ({"a": float("nan")}, "not JSON"),
            ({"a": object()}, "not JSON"),
            ({"a": "x" * 10_000}, "more"),
        ):
            with pytest.raises(SyncError, match=match):
                ours.send(bad, soon())
        ours.send({"still": "works"}, soon())
        assert theirs.receive("it", 1, soon()) == {"still": "works"}


def test_silence_and_dribble_meet_the_deadline(listener):
    ours, theirs = pair(listener)
    with closing(ours), closing(theirs):
        theirs._socket.sendall((100).to_bytes(8, "big"))
        stop = threading.Event()

        def dribble() -> None:
            while not stop.wait(0.05):
                theirs._socket.sendall(b" ")

        done = in_thread(dribble)
        start = time.monotonic()
        with pytest.raises(SyncError, match=r"trainer waited 0\.\d s for sampler \(the weights, version 7\)"):
            ours.receive("the weights", 7, soon(0.3))
        assert time.monotonic() - start < 3
        stop.set()
        done()


def test_a_reader_that_does_not_read_meets_the_deadline(address):
    with closing(Listener(address, TOKEN, here="sampler", max_bytes=1 << 28)) as listener:
        accepted = in_thread(lambda: listener.authenticate(listener.accept()))
        ours = connect(listener.address, TOKEN, here="trainer", there="sampler", deadline=soon(), max_bytes=1 << 28)
        with closing(ours), closing(accepted()), pytest.raises(SyncError, match=r"waited .* for sampler .*to read"):
            ours.send({"a": "x" * (1 << 26)}, soon(0.2), 3)


def test_nobody_there_is_an_error_at_once_and_silence_one_at_the_deadline(tmp_path):
    for where in ("127.0.0.1:1", f"unix:{tmp_path}/none"):
        with pytest.raises(SyncError, match=r"trainer cannot reach sampler at .*is it running"):
            connect(where, TOKEN, here="trainer", there="sampler", deadline=soon())
    with closing(socket.create_server(("127.0.0.1", 0))) as mute:
        where = f"127.0.0.1:{mute.getsockname()[1]}"
        with pytest.raises(SyncError, match=r"trainer waited 0\.\d s for sampler \(its greeting"):
            connect(where, TOKEN, here="trainer", there="sampler", deadline=soon(0.2))


def test_another_protocol_is_named():
    with closing(socket.create_server(("127.0.0.1", 0))) as server:

        def other() -> None:
            sock, _ = server.accept()
            body = json.dumps({"lockstep-sync": 2, "nonce": "00"}).encode()
            with closing(sock):
                sock.sendall(len(body).to_bytes(8, "big") + body)
                sock.recv(1)

        done = in_thread(other)
        with pytest.raises(SyncError, match="both sides must run the same release"):
            where = f"127.0.0.1:{server.getsockname()[1]}"
            connect(where, TOKEN, here="trainer", there="sampler", deadline=soon())
        done()


@pytest.mark.parametrize(
    "bad", ["", "127.0.0.1", "host:", ":80", "127.0.0.1:70000", "1.2.3.4:x", "0.0.0.0:0", "[::]:0"]
)
def test_addresses_that_are_none_or_not_ours_alone_are_refused(bad):
    with pytest.raises(SyncError, match=r"is no address|other machines may reach"):
        Listener(bad, TOKEN, here="sampler")


def test_a_socket_file_whose_owner_was_killed_is_replaced_and_one_in_use_is_not(tmp_path):
    where = f"unix:{tmp_path}/s"
    abandoned = socket.socket(socket.AF_UNIX)
    abandoned.bind(f"{tmp_path}/s")
    abandoned.close()
    with closing(Listener(where, TOKEN, here="sampler")):
        assert (tmp_path / "s").stat().st_mode & 0o777 == 0o600
        with pytest.raises(SyncError, match="cannot listen at"):
            Listener(where, TOKEN, here="another")
    assert not (tmp_path / "s").exists()


def test_strangers_that_say_nothing_do_not_keep_others_out(listener):
    family = socket.AF_UNIX if listener.address.startswith("unix:") else socket.AF_INET
    host, _, port = listener.address.rpartition(":")
    target = port if family == socket.AF_UNIX else (host, int(port))
    strangers = [socket.socket(family) for _ in range(5)]
    try:
        for stranger in strangers:
            stranger.connect(target)
            in_thread(lambda: listener.authenticate(listener.accept()))
        ours, theirs = pair(listener)
        ours.close()
        theirs.close()
    finally:
        for stranger in strangers:
            stranger.close()
