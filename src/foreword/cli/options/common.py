"""Options of several commands, and checks that import nothing heavy."""

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foreword.acceptance.params import GENERATION_CONFIGS
from foreword.cli.options.grouped import flag, late, option
from foreword.drafters.names import method_names, named_methods, split_methods
from foreword.errors import RequestError

if TYPE_CHECKING:
    from foreword.cluster.security import Security
    from foreword.drafters.config import SpeculationConfig
    from foreword.engine.adapters import LoRARequest

DTYPES = ("auto", "float32", "bfloat16", "float16", "int8", "stored", "q4", "q8_0")
BACKENDS = ("auto", "cpu", "cuda", "torch")
QUANTIZATIONS = ("auto", "none", "fp8", "int4")
KV_DTYPES = ("auto", "float32", "bfloat16", "fp8")

SpeculationOption = Annotated[
    str | None,
    typer.Option(
        "--speculation",
        metavar="auto|off|METHOD|JSON",
        help="Speculative decoding: auto (default: on where output is bit-identical), off, a drafter's name such as "
        'ngram or eagle3+ngram, or {"method": "ngram", "num_speculative_tokens": 5}.',
    ),
]
SpeculativeConfigOption = Annotated[str | None, typer.Option(metavar="JSON", help="vLLM's --speculation.")]


@dataclass(frozen=True)
class SpeculationOptions:
    """Drafting options."""

    speculation: SpeculationOption = None
    speculative_config: SpeculativeConfigOption = None

    def choice(self) -> str:
        return speculation_choice(self.speculation, self.speculative_config)


LoraOption = Annotated[Path | None, typer.Option(metavar="PATH", help="LoRA adapter: a PEFT folder.")]
SystemOption = Annotated[str | None, typer.Option(help="System message.")]


def one_of(option: str, value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise RequestError(f"{option} must be {', '.join(allowed[:-1])} or {allowed[-1]}, not {value!r}")
    return value


def choices(option: str, allowed: tuple[str, ...], text: str, metavar: str | None = None) -> Any:  # noqa: ANN401
    """Return the annotation of an option with these values."""
    return typer.Option(callback=lambda value: one_of(option, value, allowed), help=text, metavar=metavar)


_DEFAULTS_HELP = "Defaults of sampling parameters: auto (the model's) or none (Foreword's)."
GenerationConfigOption = Annotated[
    str, choices("--generation-config", GENERATION_CONFIGS, _DEFAULTS_HELP, "auto|none")
]


def lora_request(path: Path | None) -> "LoRARequest | None":
    from foreword.engine.adapters import LoRARequest

    return None if path is None else LoRARequest(path.resolve().name or "lora", str(path))


def check_device(device: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
        raise RequestError(f"--device must be auto, cpu or cuda, not {device!r}")
    return device


def check_model(name: str) -> str:
    """Return the model's name if it is plausible; the hub is not queried."""
    from foreword.models.sources.resolve import check_name

    check_name(name)
    return name


def check_plot(path: Path | None) -> Path | None:
    """Return the plot's path; raise `RequestError` before a long run if the plot cannot be written."""
    if path is not None:
        from foreword.bench.pictures import require_matplotlib

        require_matplotlib()
        if not path.parent.is_dir():
            raise RequestError(f"--plot {path} cannot be written: there is no directory {path.parent}")
    return path


def speculation_choice(speculation: str | None, speculative_config: str | None) -> str:
    if speculation is not None and speculative_config is not None:
        raise RequestError("--speculation and --speculative-config exclude each other; give one")
    if speculative_config is not None:
        _check_speculation("--speculative-config", speculative_config)
        return speculative_config
    if speculation is None or speculation in ("auto", "off"):
        return speculation or "auto"
    if not speculation.lstrip().startswith("{"):
        speculation = json.dumps(named_methods(speculation))
    _check_speculation("--speculation", speculation)
    return speculation


def _check_speculation(option: str, text: str) -> None:
    """Raise `RequestError` for a value that is no object and names no drafter."""
    method = json_object(option, text, '{"method": "ngram"}').get("method")
    known = method_names()
    for name in split_methods(method):
        if name not in known:
            also = ", auto and off" if option == "--speculation" else ""
            raise RequestError(f"{option}: there is no method {name!r}; there are {', '.join(known)}{also}")


def json_object(option: str, text: str, example: str | None = None) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{option} is not JSON: {error}") from None
    if not isinstance(value, dict):
        advice = "" if example is None else f" such as {example}"
        raise RequestError(f"{option} must be a JSON object{advice}")
    return value


def read_bytes(path: Path) -> bytes:
    """Return a file's bytes; `-` is standard input."""
    try:
        return sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror}") from None


def read_text(path: Path) -> str:
    """Return a file's text; `-` is standard input."""
    try:
        text = sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8")
        return text.removeprefix("\ufeff")  # byte order mark
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise RequestError(f"{path} cannot be read: {reason}") from None


DRAFT_TOKENS = 5
"""Default number of draft tokens requested from nodes per pass."""

TokenFileOption = Annotated[
    Path | None, typer.Option(help="Cluster token's file. Default: FOREWORD_CLUSTER_TOKEN.")
]
TlsOption = Annotated[str | None, typer.Option(metavar="CERT,KEY,CA", help="PEM files of the cluster.")]


def labels_option() -> Any:  # noqa: ANN401
    return option("", "Location of this process; near nodes are preferred.", metavar="host=A,rack=B,zone=C")


def tls_files(text: str | None) -> tuple[str, str, str] | None:
    if text is None:
        return None
    files = [entry.strip() for entry in text.split(",")]
    if len(files) != 3 or not all(files):
        raise RequestError("TLS takes three files with commas: certificate, key, authority")
    return files[0], files[1], files[2]


@dataclass(frozen=True, kw_only=True)
class SecurityOptions:
    """Protection of connections between targets and nodes."""

    token_file: TokenFileOption = late(None, 1)
    tls: TlsOption = late(None, 1)

    def security(self) -> "Security":
        from foreword.cluster.security import Security, TlsFiles

        files = tls_files(self.tls)
        return Security.of(str(self.token_file or ""), None if files is None else TlsFiles(*files))


@dataclass(frozen=True)
class NodeOptions:
    """Draft nodes of a target, and their protection."""

    drafters: str | None = option(
        None,
        "Draft nodes (foreword draft-node), or @FILE with one per line, reread periodically; the "
        "drafter of --speculation is the fallback.",
        metavar="HOST:PORT,...",
    )
    drafters_insecure: bool = flag("Connect to nodes on other machines without token and TLS.")
    drafters_labels: str = labels_option()
    drafters_token_file: TokenFileOption = None
    drafters_tls: TlsOption = None
    local_tenants: str = option("", "Tenants whose texts are not sent to draft nodes, such as a*,b?.")

    def settings(self) -> dict[str, Any]:
        """Return the options as keys of a speculation config; empty without draft nodes."""
        from foreword.cluster.settings import RemoteConfig

        files = tls_files(self.drafters_tls)
        if self.drafters is None:
            if self.drafters_labels or self.drafters_token_file or files or self.local_tenants:
                raise RequestError("--drafters-..., --local-tenants: give --drafters too, or leave them out")
            return {}
        given: dict[str, Any] = {
            "drafters": self.drafters,
            "labels": self.drafters_labels,
            "local_tenants": self.local_tenants,
        }
        if self.drafters_token_file is not None:
            given["token_file"] = str(self.drafters_token_file)
        if files is not None:
            given |= dict(zip(("tls_certificate", "tls_key", "tls_authority"), files, strict=True))
        given["insecure"] = self.drafters_insecure
        RemoteConfig(**given).security()  # refuses unprotected nodes before a model is loaded
        return given


def with_nodes(config: "SpeculationConfig | None", nodes: dict[str, Any]) -> "SpeculationConfig | None":
    """Return a configuration that prefers nodes, with the local drafter as fallback."""
    from foreword.drafters.config import SpeculationConfig
    from foreword.speculation.drafting import DraftSource

    if not nodes:
        if config is not None:
            for name in config.methods_of(DraftSource.REMOTE):
                config.settings_of(name).security()
        return config
    if config is None:
        return SpeculationConfig.parse({"method": "remote", "num_speculative_tokens": DRAFT_TOKENS, **nodes})
    if config.methods_of(DraftSource.REMOTE):
        raise RequestError("--drafters and a --speculation by remote exclude each other; give one")
    return SpeculationConfig.parse({**config.as_mapping(), "method": ["remote", *config.method], **nodes})
