"""`foreword serve`: answer over HTTP."""

import asyncio
import logging
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foreword.cli.console import (
    DEFAULT_MODEL,
    BackendOption,
    DeviceOption,
    DtypeOption,
    stage_bar,
    stderr,
    stdout,
)
from foreword.errors import RequestError

if TYPE_CHECKING:
    from foreword.drafters.config import SpeculationConfig
    from foreword.server.settings import ServerSettings


def serve(
    model: Annotated[
        str, typer.Argument(help="Built-in name, .gguf file, Hugging Face directory or hub id.")
    ] = DEFAULT_MODEL,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any.")] = 8000,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            help="Key that clients must send; may be repeated. Default: FOREWORD_API_KEY (commas between)."
        ),
    ] = None,
    allowed_hosts: Annotated[
        str | None,
        typer.Option(
            help="Names that clients may call this server by, with commas; *: any. Default: this machine's own names "
            "where it listens on 127.0.0.1, any elsewhere."
        ),
    ] = None,
    cors_origins: Annotated[
        str | None,
        typer.Option(help="Web pages that may use this server, with commas: https://example.org; *: all."),
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Listen beyond this machine without an API key.")
    ] = False,
    served_model_name: Annotated[str | None, typer.Option(help="What clients call the model.")] = None,
    speculative_config: Annotated[
        str | None,
        typer.Option(help='Who guesses ahead, as JSON: {"method": "ngram", "num_speculative_tokens": 5}.'),
    ] = None,
    hide_speculation: Annotated[
        bool, typer.Option("--hide-speculation", help="Leave acceptance out of answers and /health.")
    ] = False,
    stream_pacing: Annotated[
        str,
        typer.Option(help="How streams send tokens: burst (as they come) or even (even cadence, padded)."),
    ] = "burst",
    speculation_switch: Annotated[
        bool, typer.Option("--speculation-switch", help="Let POST /speculation turn guessing on and off.")
    ] = False,
    max_model_len: Annotated[
        int | None, typer.Option(min=2, help="Most tokens of prompt and answer.")
    ] = None,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Answers that are worked on at once.")] = 64,
    max_queued: Annotated[
        int, typer.Option(min=0, help="Answers that may wait; more are refused with 429.")
    ] = 64,
    drain_seconds: Annotated[
        float, typer.Option(min=0, help="How long SIGTERM waits for running answers.")
    ] = 30.0,
    hang_seconds: Annotated[
        float, typer.Option(min=1, help="An engine that does not move for so long is killed and restarted.")
    ] = 60.0,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    backend: BackendOption = "auto",
    engine_factory: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Serve a model over HTTP with OpenAI's API, on this machine only unless told otherwise.

    Example: foreword serve --speculative-config '{"method": "ngram"}'
    """
    from foreword.server.address import Address

    keys = _keys(api_key)
    address = Address(host, port)
    address.check(bool(keys), insecure)
    _need_server_extra()
    from foreword.drafters.overrides import FREE_METHODS
    from foreword.models.formats.opening import open_checkpoint
    from foreword.models.sources.resolve import resolve_model
    from foreword.server.running import ServerRun
    from foreword.server.settings import Limits, ServerSettings
    from foreword.wire.frames import Start
    from foreword.wire.supervisor import DEFAULT_FACTORY, SupervisorSettings

    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    speculation = _parsed(speculative_config)
    settings = ServerSettings(
        model_name=served_model_name or _short_name(model),
        api_keys=keys,
        allowed_hosts=address.allowed_hosts(_listed(allowed_hosts)),
        cors_origins=_origins(cors_origins),
        limits=Limits(running=max_num_seqs, queued=max_queued),
        methods=FREE_METHODS | set(() if speculation is None else speculation.method),
        speculation=speculation,
        show_speculation=not hide_speculation,
        stream_pacing=_pacing(stream_pacing),
        allow_switch=speculation_switch,
        drain_seconds=drain_seconds,
    )
    with stage_bar() as on_stage:
        path = resolve_model(model, on_progress=on_stage)
    tokenizer = open_checkpoint(path).tokenizer()
    config = {"max_model_len": max_model_len, "max_num_seqs": max_num_seqs}
    wanted = None if speculation is None else speculation.as_mapping()
    start = Start(str(path), dtype, device, backend, wanted, config)
    supervision = SupervisorSettings(start, engine_factory or DEFAULT_FACTORY, hang_seconds=hang_seconds)
    run = ServerRun(settings, supervision, tokenizer, address)
    stderr.print(f"[dim]loading {settings.model_name} ...[/dim]")
    asyncio.run(run.run(lambda url: _tell_ready(url, settings)))


def _tell_ready(url: str, settings: "ServerSettings") -> None:
    guard = "API key required" if settings.api_keys else "no API key"
    drafting = settings.default_method or "no"
    stdout.print(f"{settings.model_name} is ready on {url} ({guard}, {drafting} drafting)", soft_wrap=True)


def _need_server_extra() -> None:
    try:
        import fastapi  # noqa: F401
        import msgspec  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise RequestError(
            f"the server needs more packages ({error.name}): pip install 'foreword[server]'"
        ) from None


def _keys(given: list[str] | None) -> tuple[str, ...]:
    keys = tuple(given or os.environ.get("FOREWORD_API_KEY", "").split(","))
    kept = tuple(key.strip() for key in keys if key.strip())
    if given and len(kept) != len(given):
        raise RequestError("an API key is empty; leave --api-key out or give one")
    return kept


def _listed(option: str | None) -> list[str]:
    return [entry.strip() for entry in (option or "").split(",") if entry.strip()]


def _origins(option: str | None) -> tuple[str, ...]:
    origins = tuple(origin.lower().rstrip("/") for origin in _listed(option))
    for origin in origins:
        if origin not in ("*", "null") and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/?#@]+", origin):
            raise RequestError(f"--cors-origins takes origins such as https://example.org, not {origin!r}")
    return origins


def _pacing(name: str) -> str:
    from foreword.server.api.pacing import PACINGS

    if name not in PACINGS:
        raise RequestError(f"--stream-pacing must be {' or '.join(PACINGS)}, not {name!r}")
    return name


def _parsed(speculative_config: str | None) -> "SpeculationConfig | None":
    from foreword.drafters.config import SpeculationConfig

    return None if speculative_config is None else SpeculationConfig.parse(speculative_config)


def _short_name(model: str) -> str:
    """A path's last part; other names as they are."""
    path = Path(model).expanduser()
    is_path = model.startswith((".", "/", "~")) or path.suffix == ".gguf"
    return (path.stem if path.suffix == ".gguf" else path.resolve().name) if is_path else model
