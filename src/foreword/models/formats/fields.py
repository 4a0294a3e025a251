"""Typed reading of a model's description, from config.json, generation_config.json or GGUF metadata."""

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foreword.errors import CheckpointError
from foreword.models.config import AttentionSpec, LayerSpec

MAX_DIMENSION = 2**31 - 1
"""No count in a model's description is larger; what claims more is damaged."""


@dataclass(frozen=True)
class ConfigFields:
    """Values by key; a missing or malformed one is an error that names the key and the file."""

    values: Mapping[str, Any]  # keys as the file spells them
    origin: str  # the file, for messages
    prefix: str = ""  # put before every key ("llama." in GGUF metadata)

    def get(self, key: str) -> Any:  # noqa: ANN401
        """The raw value; None if it is absent or null."""
        return self.values.get(self.prefix + key)

    def count(self, key: str, default: int | None = None) -> int:
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= MAX_DIMENSION:
            raise self.malformed(key, "a positive whole number")
        return value

    def whole(self, key: str, default: int) -> int:
        """A count that may be zero."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_DIMENSION:
            raise self.malformed(key, "a whole number")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number above zero."""
        value = self._value(key, default)
        if not is_positive_number(value):
            raise self.malformed(key, "a positive number")
        return float(value)

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
        """The error for a value of the wrong kind."""
        shown = repr(self.get(key))[:60]
        return CheckpointError(
            f"{self.origin}: {self.prefix}{key} is {shown}, not {expected}; the file is damaged, get it again"
        )

    def unsupported(self, what: str) -> CheckpointError:
        """The error for a model that this decoder would compute wrongly."""
        return CheckpointError(f"{self.origin}: {what} is not supported; use another model")

    def _value(self, key: str, default: Any) -> Any:  # noqa: ANN401
        value = self.get(key)
        if value is not None:
            return value
        if default is None:
            raise CheckpointError(
                f"{self.origin}: {self.prefix}{key} is missing; the description is incomplete, get it again"
            )
        return default


def is_positive_number(value: object) -> bool:
    """Whether it is one that a double can hold: whole numbers of JSON have no bound."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return 0 < value <= sys.float_info.max


def check_heads(attention: AttentionSpec, origin: str) -> AttentionSpec:
    """Return `attention` if its numbers fit together."""
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
    """Return `count` if the tensors are those of this many layers; `pattern` finds the number of a layer in a name."""
    layers = {int(match[1]) for name in names if (match := pattern.match(name))}
    if len(layers) != count or max(layers) != count - 1:
        raise CheckpointError(
            f"{origin}: it has {len(layers)} of the model's {count} layers; get the file again"
        )
    return count


_EXPERT = re.compile(r"model\.layers\.(\d{1,9})\.mlp\.experts\.(\d{1,9})\.")


def check_experts(names: Iterable[str], layers: Sequence[LayerSpec], origin: str) -> None:
    """Refuse a model that does not have the experts it counts: a lie must not cost memory."""
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
"""Keys of generation_config.json that are read, as vLLM reads them; `do_sample` and the others are not."""

GGUF_KEYS = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_p": "top_p",
    "general.sampling.top_k": "top_k",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}
"""Where llama.cpp's converter puts the same."""


def sampling_values(values: Mapping[str, Any], names: Mapping[str, str], origin: str) -> dict[str, float]:
    """Sampling parameters by our names; absent and null ones are left out, what is no number is refused."""
    found: dict[str, float] = {}
    for key, name in names.items():
        value = values.get(key)
        if value is None:
            continue
        if not _is_number(value):
            shown = repr(value)[:60]
            raise CheckpointError(f"{origin}: {key} is {shown}, not a number; get the file again")
        # GGUF has 32 bits: 0.95 comes back as 0.949999988.
        found[name] = value if isinstance(value, int) else float(f"{value:.7g}")
    return found


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= sys.float_info.max  # whole numbers of JSON have no bound
