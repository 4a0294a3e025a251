"""`foreword serve`: answer over HTTP."""

import asyncio
import logging
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foreword.cli.console import loading_bar, log_to_stderr, say, stderr
from foreword.cli.options import serve as options
from foreword.cli.options.common import one_of
from foreword.cli.options.grouped import flag, option, options_command
from foreword.cli.options.learn import LearnOptions
from foreword.cli.options.model import (
    DEFAULT_MODEL,
    ComputeOptions,
    GenerationConfigOption,
    ModelArgument,
    SpeculationOptions,
)
from foreword.cli.options.nodes import NodeOptions, with_nodes
from foreword.paths import user_path

if TYPE_CHECKING:
    import socket

    from foreword.models.formats.checkpoint import Checkpoint
    from foreword.server.settings import ServerSettings
    from foreword.wire.supervisor import SupervisorSettings


log = logging.getLogger("foreword.server")


@dataclass(frozen=True)
class ParsingOptions:
    """The model's name in the API, and parsing of requests and answers."""

    served_model_name: str | None = option(None, "Name of the model in the API.")
    strict_fields: bool = flag("Refuse requests with unknown fields instead of ignoring those.")
    tool_call_parser: str = option("auto", "Format of tool calls; auto: from the template.", metavar="NAME")
    reasoning_parser: str = option(
        "none",
        "Format of reasoning, such as qwen3 or deepseek_r1; auto: from the chat template; none: it is text.",
        metavar="NAME",
    )

    def settings(self, model: str) -> dict[str, Any]:
        """Return the fields of `ServerSettings` given by these options."""
        from foreword.server.api import reasoning, tool_blocks

        calls, thoughts = ("auto", *tool_blocks.FORMATS), ("auto", "none", *reasoning.FORMATS)
        return {
            "model_name": self.served_model_name or _short_name(model),
            "strict_fields": self.strict_fields,
            "tool_call_parser": one_of("--tool-call-parser", self.tool_call_parser, calls),
            "reasoning_parser": one_of("--reasoning-parser", self.reasoning_parser, thoughts),
        }


@dataclass(frozen=True)
class ApiOptions:
    """Permissions of clients."""

    admin_key: list[str] | None = option(
        None,
        "API key that may switch speculation for all tenants (--speculation-switch) and use all other routes; "
        "repeatable. Default: FOREWORD_ADMIN_KEY (comma-separated).",
    )
    lora_modules: list[str] | None = option(None, "LoRA adapters, such as a=x b=y.", metavar="NAME=PATH")
    allow_lora_loading: bool = flag("Let clients load and unload adapters by path.")
    hide_speculation: bool = flag("Omit acceptance from answers and /health.")
    stream_pacing: str = option("burst", "Stream tokens as burst (immediately) or even (padded, in time).")
    speculation_switch: bool = flag("Enable POST /speculation; with API keys it needs an --admin-key.")
    max_queued: int = option(64, "Most queued answers; more are refused with 429.", min=0)

    def settings(
        self, model: str, listening: options.ListeningOptions, parsing: ParsingOptions, running: int
    ) -> "ServerSettings":
        """Return the server's settings of all three groups; `running` is the limit of concurrent answers."""
        from foreword.server.settings import STREAM_PACINGS, Limits, ServerSettings

        listen_settings, parser_settings = listening.settings(), parsing.settings(model)
        return ServerSettings(
            admin_keys=options.admin_keys(self.admin_key, listen_settings["api_keys"]),
            limits=Limits(running=running, queued=self.max_queued),
            show_speculation=not self.hide_speculation,
            stream_pacing=one_of("--stream-pacing", self.stream_pacing, STREAM_PACINGS),
            allow_switch=self.speculation_switch,
            adapters=options.named_paths("--lora-modules", self.lora_modules, parser_settings["model_name"]),
            allow_adapter_loading=self.allow_lora_loading,
            **listen_settings,
            **parser_settings,
        )


@dataclass(frozen=True)
class EngineOptions:
    """Memory and batching of the engine, and when it is restarted."""

    max_model_len: int | None = option(None, "Most tokens of prompt and answer.", min=2)
    max_num_seqs: int = option(64, "Most concurrent answers.", min=1)
    max_num_batched_tokens: int | None = option(None, "Most tokens per target pass.", min=1)
    kv_cache_memory_bytes: str | None = option(None, "KV cache size, such as 2G. Default: 1G; GPU: the rest.")
    state_cache_bytes: str | None = option(
        None,
        "Size of the states of recurrent layers kept for the prefix cache, such as 2G. Default: a quarter of the KV"
        " cache.",
    )
    gpu_memory_utilization: float = option(0.9, "Fraction of GPU memory for weights, passes and KV together.")
    enforce_eager: bool = flag("Capture no CUDA graphs: quicker start, slower steps.")
    enable_prefix_caching: bool = option(True, "Reuse the KV of equal prefixes, within an API key.")
    acceptance_rule: str = option("coupled", "Acceptance rule: coupled, token, block or traversal.")
    hang_seconds: float = option(60.0, "Restart an engine without progress for these seconds.", min=1)
    engine_factory: str | None = option(None, "", hidden=True)

    def config(self) -> dict[str, Any]:
        """Return the fields of `EngineConfig` given by these options."""
        from foreword.acceptance.rules.rule import Rule

        Rule.parse(self.acceptance_rule)  # raises `RequestError` if there is no such rule
        of_supervisor = ("hang_seconds", "engine_factory")
        fields = {
            name: value
            for name, value in asdict(self).items()
            if name not in of_supervisor and value is not None
        }
        for name in fields.keys() & {"kv_cache_memory_bytes", "state_cache_bytes"}:
            fields[name] = options.memory_size(f"--{name.replace('_', '-')}", fields[name])
        return fields


@options_command
def serve(
    *,
    model: ModelArgument = DEFAULT_MODEL,
    listening: options.ListeningOptions,
    api: ApiOptions,
    parsing: ParsingOptions,
    drafting: SpeculationOptions,
    nodes: NodeOptions,
    speculation_policy: options.PolicyOption = None,
    learning: LearnOptions,
    generation_config: GenerationConfigOption = "auto",
    engine: EngineOptions,
    compute: ComputeOptions,
) -> None:
    """Serve a model over HTTP with OpenAI's API, by default on 127.0.0.1 only.

    Example: foreword serve --speculation '{"method": "ngram", "num_speculative_tokens": 8}'
    """
    # Check options and bind the port before importing torch.
    address, choice, remote = listening.address(), drafting.choice(), nodes.settings()
    settings = api.settings(model, listening, parsing, engine.max_num_seqs)
    config = engine.config()
    learning.check(speculation_policy, choice, compute.tensor_parallel_size, settings.has_keys)
    if speculation_policy is not None:
        config["speculation_policy"] = str(options.checked_policy(speculation_policy))
        settings = replace(settings, policy_file=config["speculation_policy"])
    with address.bind() as listening_socket:
        options.need_server_extra()
        start = {"config": config, "adapters": dict(settings.adapters)}
        settings, supervision, checkpoint = prepare(
            model, settings, choice, compute, engine, generation_config, remote, start, learning
        )
        _run(settings, supervision, checkpoint, listening_socket, engine)


def prepare(
    model: str,
    settings: "ServerSettings",
    speculation: str,
    compute: ComputeOptions,
    engine: EngineOptions,
    generation_config: str,
    nodes: dict[str, Any],
    start: dict[str, Any],
    learning: LearnOptions,
) -> "tuple[ServerSettings, SupervisorSettings, Checkpoint]":
    """Fetch the model; return the complete settings of its server and of its engine, and the opened model.

    The default drafter is chosen here, since the server's process checks requests against it. `start` has fields of the
    engine's `Start` message that the other arguments do not give.
    """
    from foreword.backends.choice import choose_backend, parallel_backend, pick_device
    from foreword.backends.loading import is_shape_invariant
    from foreword.engine.drafting.default_speculation import choose_speculation
    from foreword.engine.loader import sampling_defaults
    from foreword.learn.settings import FACTORY, policy_path
    from foreword.models.formats.checkpoint import open_checkpoint
    from foreword.models.heads.shipped import find_head
    from foreword.models.sources.resolve import resolve_model
    from foreword.server.model_files import ModelFiles
    from foreword.wire.frames import Start
    from foreword.wire.supervisor import DEFAULT_FACTORY, SupervisorSettings

    with loading_bar() as on_stage:
        path = resolve_model(model, on_progress=on_stage)
    checkpoint, device = open_checkpoint(path), pick_device(compute.device)
    backend = parallel_backend(compute.backend, compute.tensor_parallel_size)
    choice = choose_backend(backend, compute.dtype, device)
    head = find_head(checkpoint, checkpoint.tokenizer())
    local = choose_speculation(speculation, is_shape_invariant(choice), engine.acceptance_rule, head)
    learn = learning.settings(checkpoint, local)
    drafting, sampling = with_nodes(local.config, nodes), sampling_defaults(checkpoint, generation_config)
    files = ModelFiles.of(checkpoint, engine.max_model_len)
    settings = replace(settings, speculation=drafting, model_files=files, sampling=sampling)
    mapping = None if drafting is None else drafting.as_mapping()
    factory = engine.engine_factory or DEFAULT_FACTORY
    if learn:
        settings = replace(settings, policy_file=str(policy_path(Path(learn["directory"]))))
        factory = engine.engine_factory or FACTORY
    started = Start(str(path), **asdict(compute), speculation=mapping, learning=learn, **start)
    return settings, SupervisorSettings(started, factory, hang_seconds=engine.hang_seconds), checkpoint


def _run(
    settings: "ServerSettings",
    supervision: "SupervisorSettings",
    checkpoint: "Checkpoint",
    listening: "socket.socket",
    engine: EngineOptions,
) -> None:
    """Serve on the bound port until a signal; show progress until the engine is ready."""
    from foreword.server.app import ServerRun

    log_to_stderr()
    if settings.allow_switch and settings.api_keys and not settings.admin_keys:
        log.warning("POST /speculation is refused for all API keys: --speculation-switch needs --admin-key")
    if supervision.start.learning and settings.api_keys and not settings.admin_keys:
        log.warning("POST /learn (rollback) is refused for all API keys: --learn needs --admin-key")
    run = ServerRun(settings, supervision, checkpoint.tokenizer(), listening)
    stderr.print(f"[dim]loading {settings.model_name} ...[/dim]")
    with ExitStack() as until_ready:
        on_stage = until_ready.enter_context(loading_bar())

        def show_ready(url: str, max_model_len: int) -> None:
            until_ready.close()  # remove the bar before printing
            context = options.context_words(
                max_model_len, checkpoint.config.context_length, engine.max_model_len
            )
            _show_ready(url, settings, context)

        asyncio.run(run.run(show_ready, on_stage))


def _show_ready(url: str, settings: "ServerSettings", context: str) -> None:
    """Print that the server is ready, its address and its defaults; `context` describes the context length."""
    access = "API key required" if settings.api_keys else "no API key"
    drafting = settings.default_method or "no"
    sampling = f", {settings.sampling} unless a request says otherwise" if settings.sampling.values else ""
    say(f"{settings.model_name} is ready on {url} ({access}, {drafting} drafting, {context}{sampling})")


def _short_name(model: str) -> str:
    """Return the last component of a path, or another name unchanged."""
    path = user_path(model)
    if path.suffix == ".gguf":
        return path.stem
    return path.resolve().name if model.startswith((".", "/", "~")) else model
