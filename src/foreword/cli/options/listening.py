"""Options of commands that answer over HTTP: where they listen, and to whom."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foreword.cli.options.serve import api_keys, listed, origins

if TYPE_CHECKING:
    from foreword.server.address import Address

HostOption = Annotated[str, typer.Option(help="Address to listen on.")]
PortOption = Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any.")]
ApiKeyOption = Annotated[
    list[str] | None,
    typer.Option(
        help="API key that clients must send; repeatable. Default: FOREWORD_API_KEY (comma-separated)."
    ),
]
AllowedHostsOption = Annotated[
    str | None,
    typer.Option(
        help="Allowed Host headers, separated by commas; *: any. Default: this machine's names if it listens on "
        "127.0.0.1, else any."
    ),
]
CorsOriginsOption = Annotated[
    str | None,
    typer.Option(help="Allowed CORS origins, separated by commas, such as https://example.org; *: all."),
]
InsecureOption = Annotated[
    bool, typer.Option("--insecure", help="Listen beyond this machine without an API key.")
]
AccessLogOption = Annotated[bool, typer.Option("--access-log", help="Log every request.")]
DrainSecondsOption = Annotated[
    float, typer.Option(min=0, help="Seconds that SIGTERM waits for running answers.")
]


@dataclass(frozen=True)
class ListeningOptions:
    """Where a server listens, and to whom."""

    host: HostOption = "127.0.0.1"
    port: PortOption = 8000
    api_key: ApiKeyOption = None
    allowed_hosts: AllowedHostsOption = None
    cors_origins: CorsOriginsOption = None
    insecure: InsecureOption = False
    access_log: AccessLogOption = False
    drain_seconds: DrainSecondsOption = 30.0

    def address(self) -> "Address":
        """Return the address, if it may be listened on."""
        from foreword.server.address import Address

        address = Address(self.host, self.port)
        address.check(bool(api_keys(self.api_key)), self.insecure)
        return address

    def settings(self) -> dict[str, Any]:
        """Return the fields of `ServerSettings` that these options give."""
        return {
            "api_keys": api_keys(self.api_key),
            "allowed_hosts": self.address().allowed_hosts(listed(self.allowed_hosts)),
            "cors_origins": origins(self.cors_origins),
            "access_log": self.access_log,
            "drain_seconds": self.drain_seconds,
        }
