"""Messages over a socket between lockstep and its worker processes: a length of eight bytes, then a pickle.

Only for sockets between processes of one run on one machine: unpickling runs what the sender says.
"""

from __future__ import annotations

import pickle
import socket
import struct
import time
from typing import Any

_LENGTH = struct.Struct(">Q")
_PIECE = 1 << 20


def send(sock: socket.socket, payload: bytes, seconds: float | None = None) -> None:
    """Send one message. Raises TimeoutError where it does not leave in time, OSError where the other end is gone."""
    sock.settimeout(seconds)  # of the whole `sendall`, which is what Python means by it
    sock.sendall(_LENGTH.pack(len(payload)) + payload)


def receive(sock: socket.socket, seconds: float | None = None) -> Any:
    """The next message. Raises TimeoutError where it is not there in time, EOFError where the other end is gone."""
    end = None if seconds is None else time.monotonic() + seconds
    (length,) = _LENGTH.unpack(_exactly(sock, _LENGTH.size, end))
    return pickle.loads(_exactly(sock, length, end))


def _exactly(sock: socket.socket, count: int, end: float | None) -> bytes:
    found = bytearray()
    while len(found) < count:
        left = None if end is None else end - time.monotonic()
        if left is not None and left <= 0:
            raise TimeoutError
        sock.settimeout(left)
        try:
            piece = sock.recv(min(_PIECE, count - len(found)))
        except ConnectionError as error:
            raise EOFError from error
        if not piece:
            raise EOFError
        found += piece
    return bytes(found)
