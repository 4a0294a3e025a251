"""`foreword router`: one address for several targets."""

import asyncio
import logging
from dataclasses import dataclass
from typing import Annotated

import typer

from foreword.cli.console import stdout
from foreword.cli.options.grouped import options_command
from foreword.cli.options.serve import ListeningOptions, need_server_extra, port_option


@dataclass(frozen=True, kw_only=True)
class RouterListening(ListeningOptions):
    """The router's address."""

    port: int = port_option(8080)


@options_command
def router(
    *,
    targets: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT,...",
            help="Targets (foreword serve), or @FILE with one per line, reread periodically.",
        ),
    ],
    listening: RouterListening,
    max_requests: Annotated[int, typer.Option(min=1, help="Most requests in flight; more get 429.")] = 1024,
) -> None:
    """Route requests to the target that knows the longest prefix, or has the least load, and stream the answers.

    Example: foreword router --targets 127.0.0.1:8000,127.0.0.1:8001 --port 8080
    """
    address = listening.address()
    need_server_extra()
    from foreword.server.router.app import RouterRun
    from foreword.server.router.targets import Targets
    from foreword.server.settings import Limits, ServerSettings

    settings = ServerSettings(
        model_name="",  # each target has its own
        limits=Limits(running=max_requests, queued=0, connections=2 * max_requests),
        **listening.settings(),
    )
    known = Targets(targets)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx2").setLevel(logging.WARNING)  # it logs every health check
    with address.bind() as port:

        def show_ready(url: str) -> None:
            ready = sum(target.is_ready for target in known)
            stdout.print(
                f"routing on {url} to {len(list(known))} targets, {ready} of them ready",
                soft_wrap=True,
                markup=False,
            )

        asyncio.run(RouterRun(settings, known, port).run(show_ready))
