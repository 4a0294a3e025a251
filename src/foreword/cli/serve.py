"""`foreword serve`: answer over HTTP."""

import asyncio
import logging
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foreword.cli.console import (
    DEFAULT_MODEL,
    BackendOption,
    DeviceOption,
    DtypeOption,
    ModelArgument,
    TensorParallelOption,
    loading_bar,
    stderr,
    stdout,
)
from foreword.cli.options.cluster import (
    DraftersInsecureOption,
    DraftersOption,
    LabelsOption,
    LocalTenantsOption,
    TlsOption,
    TokenFileOption,
    node_options,
    with_nodes,
)
from foreword.cli.options.common import (
    GenerationConfigOption,
    SpeculationOption,
    SpeculativeConfigOption,
    one_of,
    speculation_choice,
)
from foreword.cli.options.listening import (
    AccessLogOption,
    AdminKeyOption,
    AllowedHostsOption,
    ApiKeyOption,
    CorsOriginsOption,
    DrainSecondsOption,
    HostOption,
    InsecureOption,
    PortOption,
)
from foreword.cli.options.serve import (
    admin_keys,
    api_keys,
    context_words,
    listed,
    memory_size,
    named_paths,
    need_server_extra,
    origins,
)
from foreword.cli.policy.options import PolicyOption, checked_policy

if TYPE_CHECKING:
    import socket

    from foreword.drafters.config import SpeculationConfig
    from foreword.server.settings import ServerSettings


log = logging.getLogger("foreword.server")


def serve(
    model: ModelArgument = DEFAULT_MODEL,
    host: HostOption = "127.0.0.1",
    port: PortOption = 8000,
    api_key: ApiKeyOption = None,
    admin_key: AdminKeyOption = None,
    allowed_hosts: AllowedHostsOption = None,
    cors_origins: CorsOriginsOption = None,
    insecure: InsecureOption = False,
    lora_modules: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=PATH",
            help="LoRA adapters (PEFT folders) and their names: a=x b=y; repeatable.",
        ),
    ] = None,
    allow_lora_loading: Annotated[
        bool,
        typer.Option("--allow-lora-loading", help="Let clients load and unload adapters by path."),
    ] = False,
    served_model_name: Annotated[str | None, typer.Option(help="Name of the model in the API.")] = None,
    speculation: SpeculationOption = None,
    speculative_config: SpeculativeConfigOption = None,
    drafters: DraftersOption = None,
    drafters_insecure: DraftersInsecureOption = False,
    drafters_labels: LabelsOption = "",
    drafters_token_file: TokenFileOption = None,
    drafters_tls: TlsOption = None,
    local_tenants: LocalTenantsOption = "",
    speculation_policy: PolicyOption = None,
    generation_config: GenerationConfigOption = "auto",
    hide_speculation: Annotated[
        bool, typer.Option("--hide-speculation", help="Omit acceptance from answers and /health.")
    ] = False,
    stream_pacing: Annotated[
        str,
        typer.Option(help="Stream tokens as burst (immediately) or even (even cadence, padded)."),
    ] = "burst",
    speculation_switch: Annotated[
        bool,
        typer.Option(
            "--speculation-switch",
            help="Let POST /speculation switch speculation; with API keys it needs an --admin-key.",
        ),
    ] = False,
    strict_fields: Annotated[
        bool,
        typer.Option(
            "--strict-fields", help="Refuse requests with unknown fields instead of ignoring those."
        ),
    ] = False,
    max_model_len: Annotated[
        int | None, typer.Option(min=2, help="Most tokens of prompt and answer.")
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(min=1, help="Most tokens of one target pass; longer prompts take several.")
    ] = None,
    kv_cache_memory_bytes: Annotated[
        str | None,
        typer.Option(
            help="Size of the KV cache, such as 2G or 512M. Default: 1G; on a GPU what --gpu-memory-utilization leaves."
        ),
    ] = None,
    gpu_memory_utilization: Annotated[
        float, typer.Option(help="Fraction of GPU memory for weights, passes and KV together.")
    ] = 0.9,
    enforce_eager: Annotated[
        bool,
        typer.Option("--enforce-eager", help="Capture no CUDA graphs: quicker start, slower steps."),
    ] = False,
    enable_prefix_caching: Annotated[
        bool, typer.Option(help="Reuse the KV of equal prefixes, within an API key.")
    ] = True,
    acceptance_rule: Annotated[
        str, typer.Option(help="Acceptance rule: coupled, token, block or traversal.")
    ] = "coupled",
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Most concurrent answers.")] = 64,
    max_queued: Annotated[
        int, typer.Option(min=0, help="Most queued answers; more are refused with 429.")
    ] = 64,
    access_log: AccessLogOption = False,
    drain_seconds: DrainSecondsOption = 30.0,
    hang_seconds: Annotated[
        float, typer.Option(min=1, help="Restart an engine that makes no progress for this many seconds.")
    ] = 60.0,
    tool_call_parser: Annotated[
        str, typer.Option(metavar="NAME", help="Format of tool calls; auto: from the chat template.")
    ] = "auto",
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    backend: BackendOption = "auto",
    tensor_parallel_size: TensorParallelOption = 1,
    engine_factory: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Serve a model over HTTP with OpenAI's API, by default on 127.0.0.1 only.

    Example: foreword serve --speculation '{"method": "ngram", "num_speculative_tokens": 8}'
    """
    from foreword.acceptance.rules.rule import Rule
    from foreword.server.address import Address
    from foreword.server.api.tools.formats import FORMATS
    from foreword.server.settings import STREAM_PACINGS, Limits, ServerSettings

    # What can be refused is refused here, and the port taken, before torch is imported.
    keys, address = api_keys(api_key), Address(host, port)
    address.check(bool(keys), insecure)
    setting = speculation_choice(speculation, speculative_config)
    protection = (drafters_token_file, drafters_tls, drafters_insecure)
    nodes = node_options(drafters, drafters_labels, local_tenants, *protection)
    settings = ServerSettings(
        model_name=served_model_name or _short_name(model),
        api_keys=keys,
        admin_keys=admin_keys(admin_key, keys),
        allowed_hosts=address.allowed_hosts(listed(allowed_hosts)),
        cors_origins=origins(cors_origins),
        limits=Limits(running=max_num_seqs, queued=max_queued),
        strict_fields=strict_fields,
        show_speculation=not hide_speculation,
        stream_pacing=one_of("--stream-pacing", stream_pacing, STREAM_PACINGS),
        access_log=access_log,
        allow_switch=speculation_switch,
        drain_seconds=drain_seconds,
        tool_call_parser=one_of("--tool-call-parser", tool_call_parser, ("auto", *FORMATS)),
    )
    settings = replace(
        settings,
        adapters=named_paths("--lora-modules", lora_modules, settings.model_name),
        allow_adapter_loading=allow_lora_loading,
    )
    Rule.parse(acceptance_rule)
    config: dict[str, Any] = {
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "enable_prefix_caching": enable_prefix_caching,
        "acceptance_rule": acceptance_rule,
        "gpu_memory_utilization": gpu_memory_utilization,
        "enforce_eager": enforce_eager,
    }
    if speculation_policy is not None:
        config["speculation_policy"] = str(checked_policy(speculation_policy))
        settings = replace(settings, policy_file=config["speculation_policy"])
    if max_num_batched_tokens is not None:
        config["max_num_batched_tokens"] = max_num_batched_tokens
    if kv_cache_memory_bytes is not None:
        config["kv_cache_memory_bytes"] = memory_size("--kv-cache-memory-bytes", kv_cache_memory_bytes)
    listening = address.bind()
    start = {
        "dtype": dtype,
        "device": device,
        "backend": backend,
        "tensor_parallel_size": tensor_parallel_size,
        "config": config,
        "adapters": dict(settings.adapters),
    }
    with listening:
        need_server_extra()
        path = _fetched(model)
        invariant = _is_shape_invariant(path, dtype, device, backend, tensor_parallel_size)
        drafting = _drafting(path, setting, invariant, acceptance_rule)
        settings = replace(settings, speculation=with_nodes(drafting, nodes))
        _run(path, settings, listening, start, (engine_factory, hang_seconds), generation_config)


def _is_shape_invariant(path: Path, dtype: str, device: str, backend: str, ranks: int) -> bool:
    from foreword.backends.choice import choose_backend, fitted, parallel_backend, pick_device
    from foreword.backends.loading import is_shape_invariant
    from foreword.models.formats.checkpoint import open_checkpoint

    place, backend = pick_device(device), parallel_backend(backend, ranks)
    choice = choose_backend(backend, dtype, place)
    config = open_checkpoint(path).config
    return is_shape_invariant(fitted(choice, config, backend=backend, dtype=dtype, device=place))


def _drafting(path: Path, setting: str, invariant: bool, acceptance_rule: str) -> "SpeculationConfig | None":
    """Return the default drafter; requests are checked against it in this process."""
    from foreword.engine.drafting.default_speculation import choose_speculation
    from foreword.models.formats.checkpoint import open_checkpoint
    from foreword.models.heads.shipped import find_head

    checkpoint = open_checkpoint(path)
    head = find_head(checkpoint, checkpoint.tokenizer())
    return choose_speculation(setting, invariant, acceptance_rule, head).config


def _fetched(model: str) -> Path:
    from foreword.models.sources.resolve import resolve_model

    with loading_bar() as on_stage:
        return resolve_model(model, on_progress=on_stage)


def _run(
    path: Path,
    settings: "ServerSettings",
    listening: "socket.socket",
    start: dict[str, Any],
    watch: tuple[str | None, float],
    generation_config: str,
) -> None:
    from foreword.engine.loader import sampling_defaults
    from foreword.models.formats.checkpoint import open_checkpoint
    from foreword.server.running import ServerRun
    from foreword.server.settings import FREE_METHODS
    from foreword.wire.frames import Start
    from foreword.wire.supervisor import DEFAULT_FACTORY, SupervisorSettings

    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    if settings.allow_switch and settings.api_keys and not settings.admin_keys:
        log.warning(
            "POST /speculation is refused for all API keys; give --admin-key to use --speculation-switch"
        )
    speculation = settings.speculation
    if speculation is not None:
        start["speculation"] = speculation.as_mapping()
        settings = replace(settings, methods=FREE_METHODS | set(speculation.method))
    checkpoint = open_checkpoint(path)
    settings = replace(settings, sampling=sampling_defaults(checkpoint, generation_config))
    factory, hang_seconds = watch
    supervision = SupervisorSettings(
        Start(str(path), **start), factory or DEFAULT_FACTORY, hang_seconds=hang_seconds
    )
    run = ServerRun(settings, supervision, checkpoint.tokenizer(), listening)
    stderr.print(f"[dim]loading {settings.model_name} ...[/dim]")
    with ExitStack() as until_ready:
        on_stage = until_ready.enter_context(loading_bar())

        def tell(url: str, max_model_len: int) -> None:
            until_ready.close()  # the bar goes before the line comes
            asked = start["config"]["max_model_len"]
            _tell_ready(url, settings, context_words(max_model_len, checkpoint.config.context_length, asked))

        asyncio.run(run.run(tell, on_stage))


def _tell_ready(url: str, settings: "ServerSettings", context: str) -> None:
    guard = "API key required" if settings.api_keys else "no API key"
    drafting = settings.default_method or "no"
    sampling = f", {settings.sampling} unless a request says otherwise" if settings.sampling.values else ""
    stdout.print(
        f"{settings.model_name} is ready on {url} ({guard}, {drafting} drafting, {context}{sampling})",
        soft_wrap=True,
    )


def _short_name(model: str) -> str:
    """A path's last part; other names as they are."""
    path = Path(model).expanduser()
    is_path = model.startswith((".", "/", "~")) or path.suffix == ".gguf"
    return (path.stem if path.suffix == ".gguf" else path.resolve().name) if is_path else model
