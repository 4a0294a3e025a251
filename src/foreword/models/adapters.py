"""LoRA adapters: low-rank updates of a model's matrices, and the reader of PEFT directories."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foreword.errors import CheckpointError
from foreword.models.config import ModelConfig
from foreword.models.formats.checkpoint import opened_safetensors
from foreword.models.formats.hf.checkpoint import read_json_object
from foreword.models.layer_shapes import layer_shapes

MAX_RANK = 128  # maximum rank of an adapter
MODULES = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
"""Matrices of a layer that can be adapted, in the order that the kernels use."""

RECURRENT_MODULES = tuple(
    f"linear_attn.{name}"
    for name in ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "in_proj", "out_proj")
)
"""Matrices of a recurrent layer that can be adapted."""

ALL_MODULES = MODULES + RECURRENT_MODULES


@dataclass(frozen=True)
class Factors:
    """Low-rank update of one matrix: y += up (down x)."""

    down: Tensor  # float32 [rank, inputs], PEFT's A
    up: Tensor  # float32 [outputs, rank], PEFT's B times the adapter's scale (alpha / rank)

    @property
    def rank(self) -> int:
        return len(self.down)


@dataclass(frozen=True)
class Lora:
    """A LoRA adapter, independent of its file format."""

    factors: Mapping[tuple[int, str], Factors] = field(repr=False)  # by layer and module

    @property
    def rank(self) -> int:
        return max((factor.rank for factor in self.factors.values()), default=0)


def layer_modules(config: ModelConfig, layer: int) -> dict[str, tuple[int, ...]]:
    """Return module -> shape (outputs, inputs) of the matrices of a layer that can be adapted."""
    shapes = layer_shapes(config.layers[layer], config.hidden_size)
    return {module: shapes[name] for module in ALL_MODULES if (name := f"{module}.weight") in shapes}


CONFIG_FILE, TENSOR_FILE = "adapter_config.json", "adapter_model.safetensors"

_NAME = re.compile(r"base_model\.model\.model\.layers\.(\d+)\.(\w+\.\w+)\.lora_([AB])(?:\.default)?\.weight")
_EMBEDDINGS = ("embed_tokens", "lm_head")

_REFUSED = {
    "use_dora": "DoRA",
    "modules_to_save": "whole modules (modules_to_save)",
    "fan_in_fan_out": "transposed matrices (fan_in_fan_out)",
    "trainable_token_indices": "trained embeddings (trainable_token_indices)",
    "use_qalora": "QALoRA",
    "alora_invocation_tokens": "activated LoRA",
    "lora_bias": "biases of the factors (lora_bias)",
}
"""PEFT settings that change the computation and are not supported."""


def open_adapter(path: Path, config: ModelConfig) -> Lora:
    """Read the adapter in a folder and check it against the model; raise `CheckpointError` if invalid."""
    settings = _settings(path)
    tensors = _tensors(path / TENSOR_FILE)
    sides: dict[tuple[int, str], dict[str, Tensor]] = {}  # (layer, module) -> {"A": tensor, "B": tensor}
    for name, tensor in tensors.items():
        layer, module, side = _parse_name(name, path, config)
        sides.setdefault((layer, module), {})[side] = tensor
    # Report matrices that this model does not have before missing tensors.
    wanted = sorted(_expected(settings, config) | sides.keys())
    for layer, module in wanted:
        _check_matrix(path, config, layer, module)
    factors = {
        matrix: _factors(path, config, settings, matrix, pair["A"], pair["B"])
        for matrix, pair in sorted(sides.items())
        if len(pair) == 2
    }
    for matrix in wanted:
        if matrix not in factors:
            raise _missing(path, matrix, sides)
    if not factors:
        raise CheckpointError(f"{path}: the adapter has no tensors; get it again")
    return Lora(factors)


def _missing(
    path: Path, matrix: tuple[int, str], sides: Mapping[tuple[int, str], Mapping[str, Tensor]]
) -> CheckpointError:
    """Return the error for a matrix (layer, module) that lacks a factor."""
    layer, module = matrix
    if all(other_module != module for _, other_module in sides):
        short = module.rsplit(".", 1)[-1]
        return CheckpointError(
            f"{path}: {CONFIG_FILE} names {short} in target_modules, and {TENSOR_FILE} has no tensor for it; "
            "get the adapter again"
        )
    if layer > max(other_layer for other_layer, _ in sides):
        return CheckpointError(
            f"{path}: the adapter ends before layer {layer} of the model; it is an adapter of another model"
        )
    side = next(side for side in "AB" if side not in sides.get(matrix, {}))
    return CheckpointError(
        f"{path}: lora_{side} of layers.{layer}.{module} is missing; get the adapter again"
    )


def _check_matrix(path: Path, config: ModelConfig, layer: int, module: str) -> None:
    """Raise `CheckpointError` if the model has no such matrix, or if it cannot be adapted."""
    if not 0 <= layer < config.num_layers:
        raise CheckpointError(
            f"{path}: layers_to_transform names layer {layer}, and the model has {config.num_layers}"
        )
    spec = config.layers[layer]
    if (
        config.recurrent is not None
        and module not in layer_modules(config, layer)
        and spec.mlp.experts is None
    ):
        raise CheckpointError(
            f"{path}: layer {layer} of the model has no {module}; it is an adapter of another model"
        )
    if spec.attention.latent is not None and module.startswith("self_attn"):
        raise CheckpointError(f"{path}: adapters on latent attention ({module}) are not supported")
    if spec.mlp.experts is not None and module.startswith("mlp"):
        raise CheckpointError(
            f"{path}: adapters on the MLP of a mixture of experts ({module}) are not supported"
        )


def _settings(path: Path) -> Mapping[str, Any]:
    """Read the adapter's config; raise `CheckpointError` if it is invalid, or not supported."""
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a directory; give one with {CONFIG_FILE} and {TENSOR_FILE}")
    settings = read_json_object(path / CONFIG_FILE, f"a LoRA adapter ({CONFIG_FILE} and {TENSOR_FILE})")
    kind = settings.get("peft_type")
    if kind != "LORA":
        raise CheckpointError(f"{path}: an adapter of type {kind!r} is not supported; use one of type LORA")
    for key, what in _REFUSED.items():
        if settings.get(key):
            raise CheckpointError(f"{path}: {what} is not supported; use a plain LoRA adapter")
    _check_types(path, settings)
    if settings.get("bias", "none") != "none":
        raise CheckpointError(f"{path}: trained biases are not supported; use an adapter with bias none")
    for module in _named_modules(settings):
        if module.rsplit(".", 1)[-1] in _EMBEDDINGS:
            raise CheckpointError(f"{path}: adapted embeddings ({module}) are not supported")
        if _full_name(module) is None:
            known = ", ".join(name.rsplit(".", 1)[1] for name in MODULES)
            raise CheckpointError(f"{path}: unknown target module {module!r}; known are {known}")
    for key in ("r", "lora_alpha"):
        _check_positive(path, key, settings.get(key, 8))
    _check_patterns(path, settings)
    return settings


def _check_types(path: Path, settings: Mapping[str, Any]) -> None:
    wanted = settings.get("target_modules")
    are_names = isinstance(wanted, list) and all(isinstance(module, str) for module in wanted)
    if wanted is not None and not isinstance(wanted, str) and not are_names:
        raise CheckpointError(f"{path}: target_modules must be names of modules, not {wanted!r}"[:300])
    if not isinstance(use_rslora := settings.get("use_rslora") or False, bool):
        raise CheckpointError(f"{path}: use_rslora must be true or false, not {use_rslora!r}"[:300])


def _named_modules(settings: Mapping[str, Any]) -> list[str]:
    """Return the modules that target_modules lists; none if it is a regular expression or "all-linear"."""
    wanted = settings.get("target_modules")
    return wanted if isinstance(wanted, list) else []


def _full_name(module: str) -> str | None:
    """Return the entry of `ALL_MODULES` that a PEFT module name stands for: "q_proj" or "self_attn.q_proj"."""
    return next((name for name in ALL_MODULES if name == module or name.endswith("." + module)), None)


def _expected(settings: Mapping[str, Any], config: ModelConfig) -> set[tuple[int, str]]:
    """Return the (layer, module) pairs that the adapter's config names and the model has."""
    layers = settings.get("layers_to_transform")
    if layers is None:
        layers = range(config.num_layers)
    elif isinstance(layers, int):
        layers = [layers]
    modules = [name for module in _named_modules(settings) if (name := _full_name(module)) is not None]
    return {
        (int(layer), module)
        for layer in layers
        for module in modules
        if not 0 <= layer < config.num_layers
        or config.recurrent is None
        or module in layer_modules(config, layer)
    }


def _tensors(file: Path) -> dict[str, Tensor]:
    """Read all tensors of an adapter, by stored name."""
    if not file.exists():
        folder = file.parent
        if any(folder.glob("adapter_model.bin")):
            raise CheckpointError(f"{folder} holds a pickled adapter, which can run code; use {TENSOR_FILE}")
        raise CheckpointError(f"{file} is missing; give a directory that holds a whole LoRA adapter")
    with opened_safetensors(file) as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - no mapping


def _parse_name(name: str, path: Path, config: ModelConfig) -> tuple[int, str, str]:
    """Return (layer, module, "A" or "B") of a tensor, or raise `CheckpointError`."""
    match = _NAME.fullmatch(name)
    if match is None or match[2] not in ALL_MODULES:
        reason = "is not supported"
        if "lora_magnitude_vector" in name:
            reason = "belongs to DoRA, which is not supported"
        elif "lora_embedding" in name or any(part in name for part in _EMBEDDINGS):
            reason = "adapts embeddings, which is not supported"
        raise CheckpointError(
            f"{path}: tensor {name} {reason}; use a plain LoRA adapter of the layers' matrices"
        )
    layer = int(match[1])
    if layer >= config.num_layers:
        raise CheckpointError(
            f"{path}: tensor {name} is for layer {layer}, and the model has {config.num_layers}"
        )
    return layer, match[2], match[3]


def _factors(
    path: Path,
    config: ModelConfig,
    settings: Mapping[str, Any],
    matrix: tuple[int, str],
    down: Tensor,
    up: Tensor,
) -> Factors:
    """Return the scaled factors of one matrix, or raise `CheckpointError` if they do not fit model or config."""
    layer, module = matrix
    outputs, inputs = layer_modules(config, layer)[module]
    rank = len(down) if down.ndim == 2 else 0
    where = f"{path}: layers.{layer}.{module}"
    for side, tensor, shape in (("A", down, (rank, inputs)), ("B", up, (outputs, rank))):
        if tuple(tensor.shape) != shape:
            raise CheckpointError(
                f"{where}: lora_{side} has shape {tuple(tensor.shape)}, and {shape} fits the model; "
                "it is an adapter of another model"
            )
        if not tensor.dtype.is_floating_point or not bool(tensor.sum(dtype=torch.float32).isfinite()):
            raise CheckpointError(f"{where}: lora_{side} holds no finite floats; get the adapter again")
    if not 1 <= rank <= MAX_RANK:
        raise CheckpointError(f"{where}: rank {rank} is not supported; the most is {MAX_RANK}")
    if rank != (stated := _of_module(settings, "rank_pattern", "r", 8, matrix)):
        raise CheckpointError(f"{where}: the factors have rank {rank}, and {CONFIG_FILE} says {stated:g}")
    alpha = _of_module(settings, "alpha_pattern", "lora_alpha", 8, matrix)
    scale = alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)
    factors = Factors(down.float().contiguous(), (up.float() * scale).contiguous())
    if not bool((factors.down.abs().max() * factors.up.abs().max() * inputs).isfinite()):
        raise CheckpointError(f"{where}: the factors are too large to compute with; get the adapter again")
    return factors


def _of_module(
    settings: Mapping[str, Any], patterns: str, key: str, default: float, matrix: tuple[int, str]
) -> float:
    """Return a setting of a module: the value of the first pattern that its name ends with, else that of `key`."""
    name = f"model.layers.{matrix[0]}.{matrix[1]}"
    for pattern, value in (settings.get(patterns) or {}).items():
        if f".{name}".endswith("." + _plain_name(pattern)):
            return float(value)
    return float(settings.get(key, default))


def _plain_name(pattern: str) -> str:
    """Return the name that a pattern stands for. PEFT's patterns are regular expressions, but mostly escaped names."""
    return pattern.removeprefix("^").removesuffix("$").replace("\\.", ".")


def _check_patterns(path: Path, settings: Mapping[str, Any]) -> None:
    for key in ("rank_pattern", "alpha_pattern"):
        given = settings.get(key) or {}
        if not isinstance(given, Mapping):
            raise CheckpointError(f"{path}: {key} must map modules to numbers, not {given!r}")
        for pattern, value in given.items():
            if not re.fullmatch(r"[\w.]+", _plain_name(pattern)):
                raise CheckpointError(f"{path}: {key}: {pattern!r} is not the name of a module")
            _check_positive(path, f"{key} of {pattern}", value)
    layers = settings.get("layers_to_transform")
    listed = layers if isinstance(layers, list) else [layers]
    if layers is not None and not all(type(layer) is int for layer in listed):
        raise CheckpointError(f"{path}: layers_to_transform must be numbers of layers, not {layers!r}")


def _check_positive(path: Path, key: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
        raise CheckpointError(f"{path}: {key} must be a positive number, not {value!r}"[:300])
