"""Typed access to a model's description: config.json, generation_config.json or GGUF metadata."""

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from foreword.errors import CheckpointError
from foreword.models.config import AttentionSpec, LayerSpec

MAX_DIMENSION = 2**31 - 1  # upper limit of counts; larger numbers indicate a damaged file


@dataclass(frozen=True)
class ConfigFields:
    """The settings in a file, read by key and type. Errors name the file and the key."""

    values: Mapping[str, Any]
    origin: str  # the file, for error messages
    prefix: str = ""  # common prefix of all keys ("llama." in GGUF metadata)
    # Key -> name in the file, for error messages, if `values` were converted from other keys.
    named: Mapping[str, str] = field(default_factory=dict)

    def get(self, key: str) -> Any:  # noqa: ANN401
        """Return the raw value; None if absent or null."""
        return self.values.get(self.prefix + key)

    def count(self, key: str, default: int | None = None) -> int:
        """Return a whole number above 0; without a default, raise if the key is missing."""
        return self._integer(key, default, 1, "a positive whole number")

    def whole(self, key: str, default: int) -> int:
        """Return a whole number, 0 or above."""
        return self._integer(key, default, 0, "a whole number")

    def _integer(self, key: str, default: int | None, least: int, expected: str) -> int:
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MAX_DIMENSION:
            raise self.malformed(key, expected)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a positive number; without a default, raise if the key is missing."""
        value = self._value(key, default)
        if not is_positive_number(value):
            raise self.malformed(key, "a positive number")
        return float(value)

    def optional_number(self, key: str | None) -> float | None:
        """Return a positive number; None if the key is None or missing."""
        return None if key is None or self.get(key) is None else self.number(key)

    def flag(self, key: str, default: bool) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.malformed(key, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self.malformed(key, "a string")
        return value

    def malformed(self, key: str, expected: str) -> CheckpointError:
        """Return the error for a value that is not as `expected`."""
        shown = repr(self.get(key))[:60]
        return CheckpointError(
            f"{self.origin}: {self._spelled(key)} is {shown}, not {expected}; the file is damaged, get it again"
        )

    def unsupported(self, feature: str) -> CheckpointError:
        """Return the error for a feature that is not supported."""
        return CheckpointError(f"{self.origin}: {feature} is not supported; use another model")

    def section(self, key: str) -> "ConfigFields | None":
        """Return the settings in a nested object; None if the value is not an object."""
        value = self.get(key)
        return ConfigFields(value, self.origin) if isinstance(value, Mapping) else None

    def _spelled(self, key: str) -> str:
        return self.named.get(key, self.prefix + key)

    def _value(self, key: str, default: Any) -> Any:  # noqa: ANN401
        value = self.get(key)
        if value is not None:
            return value
        if default is None:
            raise CheckpointError(
                f"{self.origin}: {self._spelled(key)} is missing; the file is incomplete, get it again"
            )
        return default


def is_number(value: object) -> TypeGuard[int | float]:
    """Return whether the value is a number that fits a double, as not every JSON integer does."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= sys.float_info.max


def is_positive_number(value: object) -> bool:
    return is_number(value) and value > 0


def check_heads(attention: AttentionSpec, origin: str) -> AttentionSpec:
    """Return `attention`; raise `CheckpointError` if its sizes are inconsistent."""
    if attention.num_heads % attention.num_kv_heads:
        raise CheckpointError(
            f"{origin}: {attention.num_heads} query heads cannot share {attention.num_kv_heads} key/value heads; "
            "the file is damaged, get it again"
        )
    if attention.head_dim % 2:
        raise CheckpointError(
            f"{origin}: head size {attention.head_dim} is odd, and rotary embeddings need an even one; "
            "use another model"
        )
    return attention


def check_layers(names: Iterable[str], pattern: re.Pattern[str], count: int, origin: str) -> int:
    """Return `count`; raise `CheckpointError` unless `names` have this many layers (group 1 of `pattern`: index)."""
    layers = {int(match[1]) for name in names if (match := pattern.match(name))}
    if len(layers) != count or max(layers) != count - 1:
        raise CheckpointError(
            f"{origin}: it has {len(layers)} of the model's {count} layers; get the file again"
        )
    return count


_EXPERT = re.compile(r"model\.layers\.(\d{1,9})\.mlp\.experts\.(\d{1,9})\.")


def check_experts(names: Iterable[str], layers: Sequence[LayerSpec], origin: str) -> None:
    """Raise `CheckpointError` if the tensors of a layer have another number of experts than its description."""
    if all(layer.mlp.experts is None for layer in layers):
        return
    experts_of: dict[int, set[int]] = {}  # by layer index
    for match in filter(None, map(_EXPERT.match, names)):
        experts_of.setdefault(int(match[1]), set()).add(int(match[2]))
    for index, layer in enumerate(layers):
        stored = len(experts_of.get(index, ()))
        expected = 0 if layer.mlp.experts is None else layer.mlp.experts.count
        if stored != expected:
            raise CheckpointError(
                f"{origin}: layer {index} has {stored} experts and not {expected}; get the files again"
            )


HF_KEYS = {name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")}
"""Keys of generation_config.json -> sampling parameters. Others, such as `do_sample`, are ignored, as in vLLM."""

GGUF_KEYS = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_p": "top_p",
    "general.sampling.top_k": "top_k",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}
"""Keys of GGUF metadata, as llama.cpp writes them -> sampling parameters."""


def sampling_values(values: Mapping[str, Any], names: Mapping[str, str], origin: str) -> dict[str, float]:
    """Return the sampling parameters in `values`; `names` maps keys to parameters. Raise if one is not a number."""
    parameters: dict[str, float] = {}
    for key, name in names.items():
        value = values.get(key)
        if value is None:
            continue
        if not is_number(value):
            shown = repr(value)[:60]
            raise CheckpointError(f"{origin}: {key} is {shown}, not a number; get the file again")
        # GGUF stores 32-bit floats: round 0.949999988 back to 0.95.
        parameters[name] = value if isinstance(value, int) else float(f"{value:.7g}")
    return parameters
