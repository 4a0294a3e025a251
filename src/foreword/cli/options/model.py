"""Options that select a model, its device and data types, its sampling defaults and its drafter.

Nothing heavy is imported.
"""

import json
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foreword.acceptance.params import GENERATION_CONFIGS
from foreword.cli.console import load_llm
from foreword.cli.options.common import JsonCommand, json_object, one_of
from foreword.cli.options.grouped import late, option
from foreword.drafters.names import method_names, named_methods, split_methods
from foreword.errors import RequestError

if TYPE_CHECKING:
    from foreword.engine.adapters import LoRARequest
    from foreword.engine.config import EngineConfig
    from foreword.engine.llm import LLM

DEFAULT_MODEL = "smollm2-135m"

DTYPES = ("auto", "float32", "bfloat16", "float16", "int8", "stored", "q4", "q8_0")
BACKENDS = ("auto", "cpu", "cuda", "torch")
QUANTIZATIONS = ("auto", "none", "fp8", "int4")
KV_DTYPES = ("auto", "float32", "bfloat16", "int8", "fp8")


def check_device(device: str) -> str:
    return check_device_of("--device", device)


def check_device_of(option: str, device: str) -> str:
    """Return the device given to an option; raise `RequestError` if it is not a device's name."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
        raise RequestError(f"{option} must be auto, cpu or cuda, not {device!r}")
    return device


def check_model(name: str) -> str:
    """Return the model's name if it is plausible; the hub is not queried."""
    from foreword.models.sources.resolve import check_name

    check_name(name)
    return name


_MODEL_HELP = "Model: built-in name, .gguf file, Hugging Face directory or hub id such as org/name."


def _complete_model(incomplete: str) -> list[str]:
    """Return the built-in models with this prefix, for shell completion; without any, the shell completes paths."""
    from foreword.models.sources.builtin import BUILTIN_MODELS

    return [model.name for model in BUILTIN_MODELS if model.name.startswith(incomplete)]


_checked_model: dict[str, Any] = {
    "callback": check_model,
    "autocompletion": _complete_model,
    "help": _MODEL_HELP,
}
ModelOption = Annotated[str, typer.Option("--model", "-m", **_checked_model)]
ModelArgument = Annotated[str, typer.Argument(**_checked_model)]


def _choice(option: str, allowed: tuple[str, ...], text: str, metavar: str | None = None) -> Any:  # noqa: ANN401
    """Return the annotation of an option that takes one of these values."""
    return typer.Option(callback=lambda value: one_of(option, value, allowed), help=text, metavar=metavar)


_DTYPE_HELP = (
    "Data type: auto, float32, bfloat16, float16; on the CPU kernels int8, stored, q8_0, float32. "
    "`foreword doctor` shows what auto is."
)
_WEIGHTS_HELP = "Weights on a GPU: auto (as the checkpoint has them), none (unpacked), fp8 or int4."
_KV_HELP = "Keys and values: auto; float32, bfloat16 or int8 on a CPU; fp8 on a GPU."
_DEFAULTS_HELP = "Defaults of sampling parameters: auto (the model's) or none (Foreword's)."
DtypeOption = Annotated[str, _choice("--dtype", DTYPES, _DTYPE_HELP)]
BackendOption = Annotated[str, _choice("--backend", BACKENDS, "Backend: auto, cpu, cuda or torch.")]
QuantizationOption = Annotated[str, _choice("--quantization", QUANTIZATIONS, _WEIGHTS_HELP)]
KvDtypeOption = Annotated[str, _choice("--kv-cache-dtype", KV_DTYPES, _KV_HELP)]
GenerationConfigOption = Annotated[
    str, _choice("--generation-config", GENERATION_CONFIGS, _DEFAULTS_HELP, "auto|none")
]
DeviceOption = Annotated[str, typer.Option(callback=check_device, help="Device: auto, cpu, cuda or cuda:1.")]


@dataclass(frozen=True, kw_only=True)
class DeviceOptions:
    """Device, data type and backend of a model."""

    dtype: DtypeOption = late("auto", 2)
    device: DeviceOption = late("auto", 2)
    backend: BackendOption = late("auto", 2)
    quantization: QuantizationOption = late("auto", 2)
    kv_cache_dtype: KvDtypeOption = late("auto", 2)

    @property
    def load_options(self) -> dict[str, Any]:
        """The options as keyword arguments of `LLM` and of loaders."""
        return {field.name: getattr(self, field.name) for field in fields(DeviceOptions)}


@dataclass(frozen=True, kw_only=True)
class ComputeOptions(DeviceOptions):
    """Device options of a model that may be split between processes."""

    tensor_parallel_size: int = option(1, "Processes that split the model, one per GPU.", min=1, last=2)


@dataclass(frozen=True, kw_only=True)
class ModelCommand(DeviceOptions, JsonCommand):
    """A command for a loaded model."""

    model: ModelOption = late(DEFAULT_MODEL, -1)

    def load(self, speculation: str | None = None, config: "EngineConfig | None" = None) -> "LLM":
        return load_llm(self.model, **self.load_options, speculation=speculation, config=config)


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
    """The two names of one option: Foreword's, and vLLM's."""

    speculation: SpeculationOption = None
    speculative_config: SpeculativeConfigOption = None

    def choice(self) -> str:
        return speculation_choice(self.speculation, self.speculative_config)


LoraOption = Annotated[Path | None, typer.Option(metavar="PATH", help="LoRA adapter: a PEFT folder.")]
SystemOption = Annotated[str | None, typer.Option(help="System message.")]


def lora_request(path: Path | None) -> "LoRARequest | None":
    from foreword.engine.adapters import LoRARequest

    return None if path is None else LoRARequest(path.resolve().name or "lora", str(path))


def speculation_choice(speculation: str | None, speculative_config: str | None) -> str:
    """Return auto, off, or a JSON object whose drafters exist, from the options of these names."""
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
    """Raise `RequestError` unless the text is a JSON object with known drafters."""
    method = json_object(option, text, '{"method": "ngram"}').get("method")
    known = method_names()
    for name in split_methods(method):
        if name not in known:
            also = ", auto and off" if option == "--speculation" else ""
            raise RequestError(f"{option}: there is no method {name!r}; there are {', '.join(known)}{also}")
