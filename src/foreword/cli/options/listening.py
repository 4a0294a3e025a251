"""Options of commands that answer over HTTP: where they listen, and to whom."""

from typing import Annotated

import typer

HostOption = Annotated[str, typer.Option(help="Address to listen on.")]
PortOption = Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any.")]
ApiKeyOption = Annotated[
    list[str] | None,
    typer.Option(
        help="API key that clients must send; repeatable. Default: FOREWORD_API_KEY (comma-separated)."
    ),
]
AdminKeyOption = Annotated[
    list[str] | None,
    typer.Option(
        help="API key that may switch speculation for all tenants (--speculation-switch) and use all other routes; "
        "repeatable. Default: FOREWORD_ADMIN_KEY (comma-separated)."
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
