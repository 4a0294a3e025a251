"""`foreword router`: one address in front of several targets."""

import asyncio
import logging
from typing import Annotated

import typer

from foreword.cli.console import stdout
from foreword.cli.options.serve import api_keys, listed, need_server_extra, origins


def router(
    targets: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT,...",
            help="Targets (foreword serve), or @FILE with one in a line, read again and again.",
        ),
    ],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any.")] = 8080,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            help="Key that clients must send, as the targets know it; may be repeated. Default: FOREWORD_API_KEY."
        ),
    ] = None,
    allowed_hosts: Annotated[
        str | None, typer.Option(help="Names that clients may call this router by, with commas; *: any.")
    ] = None,
    cors_origins: Annotated[
        str | None, typer.Option(help="Web pages that may use this router, with commas; *: all.")
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Listen beyond this machine without an API key.")
    ] = False,
    max_requests: Annotated[
        int, typer.Option(min=1, help="Requests under way at once; more get 429.")
    ] = 1024,
    access_log: Annotated[bool, typer.Option("--access-log", help="Write a line for every request.")] = False,
    drain_seconds: Annotated[
        float, typer.Option(min=0, help="How long SIGTERM waits for running answers.")
    ] = 30.0,
) -> None:
    """Pass requests on to the target that knows their beginning, or has the least to do; answers as they come.

    Example: foreword router --targets 127.0.0.1:8000,127.0.0.1:8001 --port 8080
    """
    from foreword.server.address import Address

    keys, address = api_keys(api_key), Address(host, port)
    address.check(bool(keys), insecure)
    need_server_extra()
    from foreword.server.router.running import RouterRun
    from foreword.server.router.targets import Targets
    from foreword.server.settings import Limits, ServerSettings

    settings = ServerSettings(
        model_name="",  # the targets'
        api_keys=keys,
        allowed_hosts=address.allowed_hosts(listed(allowed_hosts)),
        cors_origins=origins(cors_origins),
        limits=Limits(running=max_requests, queued=0, connections=2 * max_requests),
        access_log=access_log,
        drain_seconds=drain_seconds,
    )
    known = Targets(targets)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx2").setLevel(logging.WARNING)  # a line for every look at a target
    with address.bind() as listening:

        def tell(url: str) -> None:
            ready = sum(target.is_ready for target in known)
            stdout.print(
                f"routing on {url} to {len(list(known))} targets, {ready} of them ready",
                soft_wrap=True,
                markup=False,
            )

        asyncio.run(RouterRun(settings, known, listening).run(tell))
