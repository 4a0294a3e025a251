"""Where a server listens, and who can reach it there."""

import ipaddress
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from foreword.cluster.address import cannot_listen
from foreword.errors import RequestError


@dataclass(frozen=True)
class Address:
    """Where to listen."""

    host: str = "127.0.0.1"
    port: int = 8000  # 0: any that is free

    def check(self, has_key: bool, insecure: bool) -> None:
        """Refuse to be reachable from other machines without a key, unless that is what is wanted."""
        if not (has_key or insecure or is_loopback(self.host)):
            raise RequestError(
                f"{self.host} can be reached from other machines: give an API key (--api-key or FOREWORD_API_KEY), "
                "or --insecure if you mean it"
            )

    def allowed_hosts(self, given: Sequence[str]) -> tuple[str, ...] | None:
        """Names that a `Host` header may have; None: any, which is the default beyond this machine."""
        if not (given or is_loopback(self.host)):
            return None
        return tuple(dict.fromkeys((host_name(self.host), *map(host_name, given))))

    def bind(self) -> socket.socket:
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        listening = socket.socket(family, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((self.host, self.port))
        except (OSError, OverflowError) as error:
            listening.close()
            raise cannot_listen(f"{self.host} port {self.port}", error) from None
        listening.listen(1024)
        return listening


def is_loopback(host: str) -> bool:
    """Whether only this machine can be meant."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def host_name(host: str) -> str:
    """A `Host` header without its port, in small letters; an IPv6 address without its brackets."""
    name, _, port = host.lower().rpartition(":")
    if not name or not (port.isdecimal() or not port) or (":" in name and not name.endswith("]")):
        name = host.lower()
    return name.removeprefix("[").removesuffix("]").removesuffix(".")
