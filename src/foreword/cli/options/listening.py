"""Options of commands that answer over HTTP: where they listen, and to whom."""

from typing import Annotated

import typer

HostOption = Annotated[str, typer.Option(help="Address to listen on.")]
PortOption = Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any.")]
ApiKeyOption = Annotated[
    list[str] | None,
    typer.Option(
        help="Key that clients must send; may be repeated. Default: FOREWORD_API_KEY (commas between)."
    ),
]
AdminKeyOption = Annotated[
    list[str] | None,
    typer.Option(
        help="Key that may switch speculation for all tenants (--speculation-switch), and opens all other routes; "
        "may be repeated. Default: FOREWORD_ADMIN_KEY (commas between)."
    ),
]
AllowedHostsOption = Annotated[
    str | None,
    typer.Option(
        help="Names that clients may call this server by, with commas; *: any. Default: this machine's own names "
        "where it listens on 127.0.0.1, any elsewhere."
    ),
]
CorsOriginsOption = Annotated[
    str | None,
    typer.Option(help="Web pages that may use this server, with commas: https://example.org; *: all."),
]
InsecureOption = Annotated[
    bool, typer.Option("--insecure", help="Listen beyond this machine without an API key.")
]
AccessLogOption = Annotated[bool, typer.Option("--access-log", help="Write a line for every request.")]
DrainSecondsOption = Annotated[float, typer.Option(min=0, help="How long SIGTERM waits for running answers.")]
