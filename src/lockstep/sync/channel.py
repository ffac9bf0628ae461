"""JSON messages between two processes that know one secret: lengths in front, a deadline on every wait, no pickle.

    listener = Listener("127.0.0.1:0", token, here="rollout")
    channel = connect(listener.address, token, here="trainer", there="rollout", deadline=Deadline.after(10))
    channel.send({"do": "flip", "version": 12}, deadline)
    reply = channel.receive("the flip of", 12, deadline)

An address is `host:port` or `unix:/path/of/socket`. A frame is 8 bytes, big-endian: the length, then that many bytes of
UTF-8 JSON, one object. Both sides prove that they know the token (HMAC-SHA-256 over both sides' nonces, compared in
constant time) before either reads anything else from the other; the token itself never crosses. Nothing is encrypted:
across machines, put the connection into a tunnel.
"""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import json
import os
import secrets
import select
import socket
import stat
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.errors import SyncError
from lockstep.sync.transport import Deadline

PROTOCOL = 1
MAX_MESSAGE_BYTES = 64 << 20
_HELLO_BYTES = 4096  # nobody who has not proved anything makes us read more
_HELLO_S = 10.0
_MIN_TOKEN = 16
_WAITING_HELLOS = 16

Message = dict[str, Any]


def new_token() -> str:
    """A secret for one pair of processes; hand it over by a file or an environment variable, not on a command line."""
    return secrets.token_hex(32)


class Channel:
    """One authenticated connection. Not for several threads at a time, except `close`.

    here, there: the two sides' names, for errors. After an error on either direction the channel is closed: a stream
    that has been left in the middle of a frame has no next frame.
    """

    def __init__(self, sock: socket.socket, here: str, there: str, max_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self._socket, self.here, self.there, self._max = sock, here, there, max_bytes
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, message: Mapping[str, Any], deadline: Deadline, version: int = -1) -> None:
        """Raises SyncError when it cannot be JSON, is too long, or is not taken off our hands in time."""
        try:
            body = json.dumps(message, allow_nan=False, separators=(",", ":")).encode()
        except (TypeError, ValueError) as error:
            raise SyncError(f"sync: a message to {self.there} is not JSON: {error}") from error
        if len(body) > self._max:
            raise SyncError(
                f"sync: a message to {self.there} has {len(body)} bytes, more than the {self._max} that are allowed; "
                f"raise max_bytes on both sides"
            )
        try:
            self._socket.settimeout(max(deadline.remaining(), 1e-3))
            self._socket.sendall(len(body).to_bytes(8, "big") + body)
        except TimeoutError as error:
            self.close()
            raise deadline.missed(self.here, self.there, "to read a message", version) from error
        except OSError as error:
            self.close()
            raise self._lost("to read a message", version, deadline, error) from error

    def receive(self, what: str, version: int, deadline: Deadline) -> Message:
        """The next message. what: what we wait for, for errors. Raises SyncError at the deadline, when the other side
        is gone, and for anything that is not one JSON object of bounded size."""
        try:
            size = int.from_bytes(self._exactly(8, deadline), "big")
            if size > self._max:
                self.close()
                raise SyncError(
                    f"sync: {self.there} announces a message of {size} bytes to {self.here}; at most {self._max} are "
                    f"read. Is something else talking on this port?"
                )
            body = self._exactly(size, deadline)
        except TimeoutError as error:
            self.close()
            raise deadline.missed(self.here, self.there, what, version) from error
        except OSError as error:
            self.close()
            raise self._lost(what, version, deadline, error) from error
        try:
            message = json.loads(body, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            self.close()
            raise SyncError(f"sync: {self.there} sent {self.here} {size} bytes that are no JSON: {error}") from error
        if not isinstance(message, dict):
            self.close()
            raise SyncError(f"sync: {self.there} sent {self.here} a {type(message).__name__}, expected an object")
        return message

    def alive(self) -> bool:
        """Whether the connection stands, as far as can be seen from here without waiting."""
        try:
            readable, _, _ = select.select([self._socket], [], [], 0)
            return not readable or self._socket.recv(1, socket.MSG_PEEK) != b""
        except (OSError, ValueError):  # reset, or closed by us
            return False

    @property
    def local_host(self) -> str:
        """This side's address of the connection, a numeric one: the other side's machine can reach it."""
        host = str(self._socket.getsockname()[0])
        return f"[{host}]" if ":" in host else host

    def close(self) -> None:
        """Also wakes a thread that waits in `receive`. Twice is harmless."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _exactly(self, size: int, deadline: Deadline) -> bytes:
        data = bytearray()
        while len(data) < size:
            self._socket.settimeout(max(deadline.remaining(), 1e-3))
            part = self._socket.recv(min(size - len(data), 1 << 20))
            if not part:
                raise ConnectionError("the connection was closed")
            if not deadline.remaining():
                raise TimeoutError
            data += part
        return bytes(data)

    def _lost(self, what: str, version: int, deadline: Deadline, error: OSError) -> SyncError:
        waited = time.monotonic() - deadline.started
        return SyncError(
            f"sync: {self.here} lost {self.there} after waiting {waited:.1f} s for it ({what}, version {version}): "
            f"{error}. Has the process died? Nothing was published by this"
        )


def connect(
    address: str, token: str, *, here: str, there: str, deadline: Deadline, max_bytes: int = MAX_MESSAGE_BYTES
) -> Channel:
    """Connect and authenticate. Raises SyncError when nobody answers in time, or whoever does has another token."""
    _check_token(token)
    family, where = _parse(address)
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.settimeout(max(deadline.remaining(), 1e-3))
        sock.connect(where)
    except TimeoutError as error:
        sock.close()
        raise deadline.missed(here, there, f"to accept a connection at {address}", -1) from error
    except OSError as error:
        sock.close()
        raise SyncError(f"sync: {here} cannot reach {there} at {address}: {error}; is it running there?") from error
    channel = Channel(sock, here, there, _HELLO_BYTES)
    nonce = secrets.token_hex(16)
    try:
        hello = channel.receive("its greeting", -1, deadline)
        if hello.get("lockstep-sync") != PROTOCOL or not isinstance(hello.get("nonce"), str):
            raise SyncError(
                f"sync: what listens at {address} greets with {str(hello)[:80]}; expected lockstep-sync {PROTOCOL}: "
                f"both sides must run the same release"
            )
        proof = _proof(token, "connects", hello["nonce"], nonce)
        channel.send({"name": here, "nonce": nonce, "proof": proof}, deadline)
        answer = channel.receive("its proof (does it have another token?)", -1, deadline)
        _check_proof(answer, _proof(token, "listens", hello["nonce"], nonce), there)
    except BaseException:
        channel.close()
        raise
    channel._max = max_bytes
    return channel


class Listener:
    """Waits for connections at an address. address: where it really listens (port 0 is replaced by the one given)."""

    def __init__(
        self, address: str, token: str, *, here: str, allow_remote: bool = False, max_bytes: int = MAX_MESSAGE_BYTES
    ) -> None:
        """allow_remote: whether to listen where other machines can connect. Raises SyncError when it may not or cannot
        listen there."""
        _check_token(token)
        family, where = _parse(address)
        if family != socket.AF_UNIX and not allow_remote and not is_loopback(where[0]):
            raise SyncError(
                f"sync: {here} was asked to listen at {address}, which other machines may reach; messages are "
                f"authenticated but not encrypted. Use 127.0.0.1, or say allow_remote=True"
            )
        self._token, self._here, self._max = token, here, max_bytes
        self._path = Path(where) if family == socket.AF_UNIX else None
        self._hellos = threading.BoundedSemaphore(_WAITING_HELLOS)
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        try:
            if self._path is not None:
                _remove_stale(self._path)
            else:
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind(where)
            if self._path is not None:
                self._path.chmod(stat.S_IRUSR | stat.S_IWUSR)
            self._socket.listen(_WAITING_HELLOS)
        except OSError as error:
            self._socket.close()
            raise SyncError(f"sync: {here} cannot listen at {address}: {error}; choose another address") from error
        name = self._socket.getsockname()
        host = f"[{name[0]}]" if family == socket.AF_INET6 else name[0]
        self.address = address if self._path is not None else f"{host}:{name[1]}"

    def accept(self) -> socket.socket | None:
        """The next connection, not yet authenticated; None once closed."""
        try:
            sock, _ = self._socket.accept()
        except OSError:
            return None
        return sock

    def authenticate(self, sock: socket.socket) -> Channel:
        """Greet, and let the other side prove itself, within seconds. Raises SyncError, with the connection closed."""
        deadline = Deadline.after(_HELLO_S)
        channel = Channel(sock, self._here, "whoever connected", _HELLO_BYTES)
        if not self._hellos.acquire(blocking=False):
            channel.close()
            raise SyncError(f"sync: {self._here} has {_WAITING_HELLOS} connections that have not proved themselves")
        try:
            nonce = secrets.token_hex(16)
            channel.send({"lockstep-sync": PROTOCOL, "nonce": nonce}, deadline)
            answer = channel.receive("its proof", -1, deadline)
            theirs = answer.get("nonce")
            if not isinstance(theirs, str) or not isinstance(answer.get("name"), str):
                raise SyncError(f"sync: {self._here} was answered {str(answer)[:80]}, expected a name and a nonce")
            _check_proof(answer, _proof(self._token, "connects", nonce, theirs), "whoever connected")
            channel.send({"proof": _proof(self._token, "listens", nonce, theirs)}, deadline)
        except BaseException:
            channel.close()
            raise
        finally:
            self._hellos.release()
        channel.there, channel._max = answer["name"], self._max
        return channel

    def close(self) -> None:
        """Stop listening; connections that stand stay. Twice is harmless."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)
            self._path = None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _check_token(token: str) -> None:
    if len(token) < _MIN_TOKEN:
        raise SyncError(f"sync: a token of {len(token)} characters is too short; use new_token(), or {_MIN_TOKEN}")


def _proof(token: str, role: str, listener_nonce: str, connector_nonce: str) -> str:
    text = f"lockstep-sync {PROTOCOL} {role} {listener_nonce} {connector_nonce}"
    return hmac.new(token.encode(), text.encode(), "sha256").hexdigest()


def _check_proof(message: Message, expected: str, who: str) -> None:
    proof = message.get("proof")
    if not isinstance(proof, str) or not hmac.compare_digest(proof.encode(), expected.encode()):
        raise SyncError(f"sync: {who} does not know the token; give both sides the same one")


def _parse(address: str) -> tuple[socket.AddressFamily, Any]:
    if address.startswith("unix:"):
        return socket.AF_UNIX, address.removeprefix("unix:")
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not (port.isascii() and port.isdigit() and int(port) < 65536):
        raise SyncError(f"sync: {address!r} is no address; expected host:port (port 0: any) or unix:/path")
    return (socket.AF_INET6 if ":" in host else socket.AF_INET), (host, int(port))


def is_loopback(host: str) -> bool:
    """Whether an address stays on this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _remove_stale(path: Path) -> None:
    """A socket file whose listener was killed would keep the next one from starting."""
    if not path.exists() or not stat.S_ISSOCK(os.stat(path).st_mode):
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
