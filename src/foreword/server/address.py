"""Where a server listens, and who can reach it there."""

import ipaddress
import socket
from dataclasses import dataclass

from foreword.errors import RequestError


@dataclass(frozen=True)
class Address:
    """Where to listen."""

    host: str = "127.0.0.1"
    port: int = 8000  # 0: any that is free

    def check(self, has_key: bool, insecure: bool) -> None:
        """Refuse to be reachable from other machines without a key, unless that is what is wanted."""
        if not (has_key or insecure or _is_loopback(self.host)):
            raise RequestError(
                f"{self.host} can be reached from other machines: give an API key (--api-key or FOREWORD_API_KEY), "
                "or --insecure if you mean it"
            )

    def bind(self) -> socket.socket:
        """A listening socket."""
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        listening = socket.socket(family, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((self.host, self.port))
        except (OSError, OverflowError) as error:
            listening.close()
            raise RequestError(f"cannot listen on {self.host} port {self.port}: {error}") from None
        listening.listen(1024)
        return listening


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
