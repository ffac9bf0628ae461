"""Which hosts the front connects to when a request names one: this machine, unless its operator lists others."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.errors import ConfigError, SyncError

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
LOOPBACK: tuple[Network, ...] = (ipaddress.ip_network("127.0.0.0/8"), ipaddress.ip_network("::1/128"))


@dataclass(frozen=True)
class AllowedHosts:
    """networks: of the addresses that may be connected to; names: that may be looked up, wherever they lead."""

    networks: tuple[Network, ...] = LOOPBACK
    names: frozenset[str] = frozenset()

    @classmethod
    def of(cls, words: Sequence[str]) -> AllowedHosts:
        """This machine, and what the words say: addresses, networks (10.1.0.0/16), names. Raises ConfigError for a word
        that is none of them."""
        networks, names = list(LOOPBACK), set()
        for word in words:
            try:
                networks.append(ipaddress.ip_network(word))
            except ValueError as error:
                if "/" in word or not word.replace("-", "").replace(".", "").isalnum() or word[0].isdigit():
                    raise ConfigError(
                        f"{word!r} is no host to allow ({error}); expected an address, a network such as 10.1.0.0/16, "
                        "or a name"
                    ) from error
                names.add(word.lower())
        return cls(tuple(networks), frozenset(names))

    def address(self, place: str) -> str:
        """ip:port to connect to for host:port. Only names on the list are looked up, and what is connected to is what
        was checked. Raises SyncError for a host that is not allowed, is not found, or a port that is none."""
        host, _, port = place.rpartition(":")
        host = host.removeprefix("[").removesuffix("]").lower()
        if not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
            raise SyncError(f"sync: {place!r} is no address to pull from; expected host:port")
        if host in self.names:
            found = self._look_up(host, int(port))
        else:
            found = self._checked("127.0.0.1" if host == "localhost" else host)
        return f"[{found}]:{port}" if ":" in found else f"{found}:{port}"

    def _checked(self, host: str) -> str:
        try:
            found = ipaddress.ip_address(host)
        except ValueError:
            raise self._refused(host) from None
        if isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped is not None:
            found = found.ipv4_mapped  # what would be connected to
        if not any(found in network for network in self.networks):
            raise self._refused(host)
        return str(found)

    @staticmethod
    def _look_up(host: str, port: int) -> str:
        try:
            return str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])
        except OSError as error:
            raise SyncError(f"sync: the host {host!r} is not found: {error}") from error

    def _refused(self, host: str) -> SyncError:
        known = ", ".join([*map(str, self.networks), *sorted(self.names)])
        return SyncError(
            f"sync: weights are not pulled from {host!r}; this service was allowed {known}. Start it with "
            "--offers-from HOST to allow more"
        )
