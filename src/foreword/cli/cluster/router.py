"""`foreword router`: one address for several targets."""

import asyncio
import logging
from typing import Annotated

import typer

from foreword.cli.console import stdout
from foreword.cli.options.listening import (
    AccessLogOption,
    AllowedHostsOption,
    ApiKeyOption,
    CorsOriginsOption,
    DrainSecondsOption,
    HostOption,
    InsecureOption,
    PortOption,
)
from foreword.cli.options.serve import api_keys, listed, need_server_extra, origins


def router(
    targets: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT,...",
            help="Targets (foreword serve), or @FILE with one per line, reread periodically.",
        ),
    ],
    host: HostOption = "127.0.0.1",
    port: PortOption = 8080,
    api_key: ApiKeyOption = None,
    allowed_hosts: AllowedHostsOption = None,
    cors_origins: CorsOriginsOption = None,
    insecure: InsecureOption = False,
    max_requests: Annotated[int, typer.Option(min=1, help="Most requests in flight; more get 429.")] = 1024,
    access_log: AccessLogOption = False,
    drain_seconds: DrainSecondsOption = 30.0,
) -> None:
    """Route requests to the target that knows the longest prefix, or has the least load, and stream the answers.

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
