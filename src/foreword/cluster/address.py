"""Addresses of draft nodes."""

import errno
import ipaddress
import socket
from dataclasses import dataclass
from pathlib import Path

from foreword.errors import AddressTaken, RequestError

_UNIX = "unix:"
_BACKLOG = 1024  # maximum number of connections that wait to be accepted


@dataclass(frozen=True)
class NodeAddress:
    """A TCP address, or the path of a UNIX socket."""

    host: str = ""
    port: int = 0
    path: str = ""  # of a UNIX socket; empty: TCP

    @staticmethod
    def parse(text: str) -> "NodeAddress":
        """Parse `host:port`, `[::1]:port` or `unix:/path`."""
        if text.startswith(_UNIX) and len(text) > len(_UNIX):
            return NodeAddress(path=text.removeprefix(_UNIX))
        host, _, port = text.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not host or not port.isdecimal() or int(port) > 65535:
            raise RequestError(f"a draft node's address is HOST:PORT or unix:/PATH, not {text!r}")
        return NodeAddress(host, int(port))

    def __str__(self) -> str:
        if self.path:
            return _UNIX + self.path
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach the address."""
        return bool(self.path) or is_loopback(self.host)

    def connect(self, timeout: float) -> socket.socket:
        """Return a connected socket; raise `OSError` on failure."""
        if self.path:
            connected = socket.socket(socket.AF_UNIX)
            try:
                connected.settimeout(timeout)
                connected.connect(self.path)
            except BaseException:
                connected.close()
                raise
            return connected
        connected = socket.create_connection((self.host, self.port), timeout)
        without_delay(connected)
        return connected

    def listen(self) -> socket.socket:
        """Return a listening socket; raise `RequestError` on failure."""
        listening = socket.socket(self._family)
        try:
            if self.path:
                _remove_left_over(Path(self.path))
                listening.bind(self.path)
                Path(self.path).chmod(0o600)
            else:
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listening.bind((self.host, self.port))
            listening.listen(_BACKLOG)
        except (OSError, OverflowError) as error:
            listening.close()
            if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
                taken = f"cannot listen on {self}: the address is in use; give another port"
                raise AddressTaken(taken) from None
            raise RequestError(f"cannot listen on {self}: {error}") from None
        return listening

    @property
    def _family(self) -> socket.AddressFamily:
        if self.path:
            return socket.AF_UNIX
        return socket.AF_INET6 if ":" in self.host else socket.AF_INET

    def bound(self, listening: socket.socket) -> "NodeAddress":
        """Return the address with the port of its listening socket. If `port` is 0, the system has chosen one."""
        return self if self.path else NodeAddress(self.host, listening.getsockname()[1])


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a host: a loopback address, or the name localhost."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def without_delay(connected: socket.socket) -> None:
    """Set up a TCP socket to send small messages immediately (no Nagle's algorithm), and to detect a lost peer."""
    if connected.family != socket.AF_UNIX:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def _remove_left_over(path: Path) -> None:
    """Remove the UNIX socket of a node that was killed, unless a process listens on the socket."""
    if not path.is_socket():
        return
    with socket.socket(socket.AF_UNIX) as client:
        try:
            client.connect(str(path))
        except OSError:
            path.unlink(missing_ok=True)
