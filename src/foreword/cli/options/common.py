"""Options of several commands, and checks that import nothing heavy."""

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foreword.acceptance.params import GENERATION_CONFIGS
from foreword.drafters.names import method_names, named_methods, split_methods
from foreword.errors import RequestError

if TYPE_CHECKING:
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
SpeculativeConfigOption = Annotated[
    str | None,
    typer.Option(metavar="JSON", help="vLLM's name for --speculation with a JSON object."),
]


@dataclass(frozen=True)
class SpeculationOptions:
    """Drafting options."""

    speculation: SpeculationOption = None
    speculative_config: SpeculativeConfigOption = None

    def choice(self) -> str:
        """Return the combined setting for `LLM`."""
        return speculation_choice(self.speculation, self.speculative_config)


LoraOption = Annotated[
    Path | None, typer.Option(metavar="PATH", help="LoRA adapter: a folder in PEFT's layout.")
]
SystemOption = Annotated[str | None, typer.Option(help="System message.")]
GenerationConfigOption = Annotated[
    str,
    typer.Option(
        metavar="auto|none",
        callback=lambda name: one_of("--generation-config", name, GENERATION_CONFIGS),
        help="Defaults of sampling parameters: auto (those published with the model) or none (Foreword's).",
    ),
]


def lora_request(path: Path | None) -> "LoRARequest | None":
    """Return the adapter of `--lora` for the library."""
    from foreword.engine.adapters import LoRARequest

    return None if path is None else LoRARequest(path.resolve().name or "lora", str(path))


def one_of(option: str, value: str, allowed: tuple[str, ...]) -> str:
    """Return the value if it is allowed."""
    if value not in allowed:
        raise RequestError(f"{option} must be {', '.join(allowed[:-1])} or {allowed[-1]}, not {value!r}")
    return value


def check_device(device: str) -> str:
    """Return the device's name if it is plausible."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
        raise RequestError(f"--device must be auto, cpu or cuda, not {device!r}")
    return device


def check_model(name: str) -> str:
    """Return the model's name if it is plausible; the hub is not queried."""
    from foreword.models.sources.resolve import check_name

    check_name(name)
    return name


def check_plot(path: Path | None) -> Path | None:
    """Return the picture's path if it can be drawn and written, so that a run does not fail at its end."""
    if path is not None:
        from foreword.bench.pictures import require_matplotlib

        require_matplotlib()
        if not path.parent.is_dir():
            raise RequestError(f"--plot {path} cannot be written: there is no directory {path.parent}")
    return path


def speculation_choice(speculation: str | None, speculative_config: str | None) -> str:
    """Return the combined setting of both options for `LLM`."""
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
    """Parse an option that is a JSON object."""
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
