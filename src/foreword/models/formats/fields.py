"""Typed access to a model's description: config.json, generation_config.json or GGUF metadata."""

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from foreword.errors import CheckpointError
from foreword.models.config import AttentionSpec, LayerSpec

MAX_DIMENSION = 2**31 - 1
"""Upper limit of counts; larger ones indicate damage."""


@dataclass(frozen=True)
class ConfigFields:
    """Values by key; errors about missing or malformed ones name the key and the file."""

    values: Mapping[str, Any]
    origin: str  # the file, for messages
    prefix: str = ""  # key prefix ("llama." in GGUF metadata)
    named: Mapping[str, str] = field(
        default_factory=dict
    )  # keys that the file spells differently -> spelling

    def get(self, key: str) -> Any:  # noqa: ANN401
        """Return the raw value; None if absent or null."""
        return self.values.get(self.prefix + key)

    def count(self, key: str, default: int | None = None) -> int:
        return self._integer(key, default, 1, "a positive whole number")

    def whole(self, key: str, default: int) -> int:
        return self._integer(key, default, 0, "a whole number")

    def _integer(self, key: str, default: int | None, least: int, expected: str) -> int:
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MAX_DIMENSION:
            raise self.malformed(key, expected)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._value(key, default)
        if not is_positive_number(value):
            raise self.malformed(key, "a positive number")
        return float(value)

    def optional_number(self, key: str | None) -> float | None:
        """Return a positive number; None if there is no such key."""
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
        shown = repr(self.get(key))[:60]
        return CheckpointError(
            f"{self.origin}: {self._spelled(key)} is {shown}, not {expected}; the file is damaged, get it again"
        )

    def unsupported(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.origin}: {what} is not supported; use another model")

    def section(self, key: str) -> "ConfigFields | None":
        """Return an object inside the description; None if there is none."""
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
                f"{self.origin}: {self._spelled(key)} is missing; the description is incomplete, get it again"
            )
        return default


def is_number(value: object) -> TypeGuard[int | float]:
    """Return whether the value is a number that fits a double; JSON integers are unbounded."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= sys.float_info.max


def is_positive_number(value: object) -> bool:
    return is_number(value) and value > 0


def check_heads(attention: AttentionSpec, origin: str) -> AttentionSpec:
    """Return `attention` if its sizes are consistent."""
    if attention.num_heads % attention.num_kv_heads:
        raise CheckpointError(
            f"{origin}: {attention.num_heads} query heads cannot share {attention.num_kv_heads} key/value heads; "
            "the file is damaged, get it again"
        )
    if attention.head_dim % 2:
        raise CheckpointError(
            f"{origin}: head size {attention.head_dim} is odd; rotary embeddings need an even one; use another"
        )
    return attention


def check_layers(names: Iterable[str], pattern: re.Pattern[str], count: int, origin: str) -> int:
    """Return `count` if the tensors belong to this many layers; `pattern` finds a name's layer number."""
    layers = {int(match[1]) for name in names if (match := pattern.match(name))}
    if len(layers) != count or max(layers) != count - 1:
        raise CheckpointError(
            f"{origin}: it has {len(layers)} of the model's {count} layers; get the file again"
        )
    return count


_EXPERT = re.compile(r"model\.layers\.(\d{1,9})\.mlp\.experts\.(\d{1,9})\.")


def check_experts(names: Iterable[str], layers: Sequence[LayerSpec], origin: str) -> None:
    """Raise `CheckpointError` if experts are missing, before memory is allocated for them."""
    if all(layer.mlp.experts is None for layer in layers):
        return
    found: dict[int, set[int]] = {}
    for match in filter(None, map(_EXPERT.match, names)):
        found.setdefault(int(match[1]), set()).add(int(match[2]))
    for index, layer in enumerate(layers):
        held, experts = len(found.get(index, ())), layer.mlp.experts
        if held != (experts.count if experts else 0):
            raise CheckpointError(
                f"{origin}: layer {index} has {held} experts and not {experts.count if experts else 0}; "
                "get the files again"
            )


HF_KEYS = {name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")}
"""Keys read from generation_config.json, as in vLLM; `do_sample` and others are not."""

GGUF_KEYS = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_p": "top_p",
    "general.sampling.top_k": "top_k",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}
"""Fields of llama.cpp's GGUF metadata."""


def sampling_values(values: Mapping[str, Any], names: Mapping[str, str], origin: str) -> dict[str, float]:
    """Return sampling parameters by our names; absent ones are omitted, non-numbers refused."""
    found: dict[str, float] = {}
    for key, name in names.items():
        value = values.get(key)
        if value is None:
            continue
        if not is_number(value):
            shown = repr(value)[:60]
            raise CheckpointError(f"{origin}: {key} is {shown}, not a number; get the file again")
        # GGUF stores 32-bit floats: round 0.949999988 back to 0.95.
        found[name] = value if isinstance(value, int) else float(f"{value:.7g}")
    return found
