"""`foreword draft-node`: draft for targets on this machine or others."""

import json
import logging
from typing import Annotated, Any

import typer

from foreword.cli.console import (
    DEFAULT_MODEL,
    BackendOption,
    DeviceOption,
    DtypeOption,
    ModelOption,
    stage_bar,
    stderr,
    stdout,
)
from foreword.cli.options.cluster import LabelsOption, TlsOption, TokenFileOption, tls_files
from foreword.cli.options.common import json_object


def draft_node(
    model: ModelOption = DEFAULT_MODEL,
    method: Annotated[
        str,
        typer.Option(
            help="Drafter: draft_model (--model itself), layer_skip, suffix, or several as suffix+ngram."
        ),
    ] = "draft_model",
    options: Annotated[
        str | None,
        typer.Option(metavar="JSON", help='Settings of the drafter as a JSON object: {"tree_width": 3}.'),
    ] = None,
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Address to listen on, or unix:/PATH; port 0: any.")
    ] = "127.0.0.1:8400",
    capacity: Annotated[int, typer.Option(min=1, help="Most concurrent requests of all targets.")] = 256,
    kv_tokens: Annotated[
        int, typer.Option(min=16, help="Size of a draft model's KV cache in tokens, over all requests.")
    ] = 32_768,
    run_ahead: Annotated[
        bool, typer.Option(help="Draft on while a target verifies; no gain for fast, near nodes.")
    ] = True,
    labels: LabelsOption = "",
    token_file: TokenFileOption = None,
    tls: TlsOption = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Listen beyond this machine without token and TLS.")
    ] = False,
    drain_seconds: Annotated[
        float, typer.Option(min=0, help="Seconds that SIGTERM waits until targets use other nodes.")
    ] = 10.0,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    backend: BackendOption = "auto",
) -> None:
    """Serve drafts to targets, which use `foreword serve --drafters HOST:PORT`. A node cannot change a text.

    Example: foreword draft-node --model smollm2-135m --listen 127.0.0.1:8400
    """
    from foreword.cluster.settings import need_frames, parse_labels

    need_frames()
    from foreword.cluster.address import NodeAddress
    from foreword.cluster.pools.running import Stopping
    from foreword.cluster.security import Security, TlsFiles
    from foreword.drafters.config import SpeculationConfig
    from foreword.drafters.registry import drafter_kinds
    from foreword.engine.loader import load_model
    from foreword.wire.draft_node import NodeSettings, check_methods, make_node

    address, files = NodeAddress.parse(listen), tls_files(tls)
    security = Security.of(str(token_file or ""), None if files is None else TlsFiles(*files))
    security.check(address, insecure)
    settings: dict[str, Any] = {} if options is None else json_object("--options", options)
    names = method.split("+")
    check_methods(names)  # before anybody asks for what they would need
    given = {"method": names, **settings}
    kinds = drafter_kinds()
    if any(name in kinds and kinds[name].build_on_node is not None for name in names):
        given["model"] = model
    config = SpeculationConfig.parse(json.dumps(given))
    where = NodeSettings(address, security, capacity, kv_tokens, run_ahead, parse_labels(labels))
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    stderr.print(f"[dim]loading {model} ...[/dim]")
    with stage_bar() as on_stage:
        loaded = load_model(
            model,
            dtype=dtype,
            device=device,
            backend=backend,
            progress=lambda *done: on_stage("loading", *done),
        )
    node = make_node(loaded, config, where)
    stopping = Stopping().listen()
    node.start()
    stdout.print(f"{method} of {model} drafts on {node.address}", soft_wrap=True, markup=False)
    stopping.wait()
    node.drain(drain_seconds)
    node.close()
