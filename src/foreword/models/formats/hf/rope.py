"""Reads the rotary embedding of a config.json."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from foreword.models.architectures.architecture import Rope
from foreword.models.config import (
    FrequencyFactors,
    LinearRopeScaling,
    Llama3RopeScaling,
    RopeScaling,
    RopeSpec,
    YarnRopeScaling,
)
from foreword.models.formats.fields import MAX_DIMENSION, ConfigFields, is_positive_number
from foreword.models.rope import longrope_magnitude, yarn_magnitude

_LLAMA = Rope()
_LOCAL, _GLOBAL = "sliding_attention", "full_attention"  # sections of `rope_parameters`


def rope_spec(fields: ConfigFields, family: Rope = _LLAMA, head_dim: int | None = None) -> RopeSpec:
    """Return the rotary embedding of a config; without `head_dim`, raise for settings that depend on it."""
    rope = _rope_fields(fields, family)
    rotary_dim = _rotary_dim(rope, family, head_dim)
    scaling, magnitude = _scaling(rope, family, rotary_dim or head_dim)
    if head_dim is None and magnitude != 1:
        raise rope.unsupported(f"rope scaling {_kind(rope, family)!r}")
    return RopeSpec(rope.number("rope_theta", family.theta), scaling, magnitude, rotary_dim)


def local_rope_spec(fields: ConfigFields, family: Rope) -> RopeSpec | None:
    """Return the rotary embedding of layers with a window; None: that of all layers."""
    if family.local_theta is None:
        return None
    section = _sections(fields)["rope_parameters"].get(_LOCAL)
    if isinstance(section, Mapping):
        return RopeSpec(ConfigFields(section, fields.origin).number("rope_theta", family.local_theta))
    return RopeSpec(fields.number("rope_local_base_freq", family.local_theta))


def extended_context(stated: int, rope: RopeSpec) -> int:
    """Return the context length, extended if the config states YaRN and, as is common, the original length."""
    if isinstance(rope.scaling, YarnRopeScaling):
        extended = rope.scaling.original_context * rope.scaling.factor
        return max(stated, int(min(extended, MAX_DIMENSION)))
    return stated


def score_factor(fields: ConfigFields, family: Rope) -> float:
    """Return the factor of attention scores in DeepSeek's variant of YaRN; 1 in other configs."""
    rope = _rope_fields(fields, family)
    if _kind(rope, family) == "default" or not rope.get("mscale_all_dim"):
        return 1.0
    return yarn_magnitude(rope.number("factor"), rope.number("mscale_all_dim")) ** 2


def _sections(fields: ConfigFields) -> dict[str, Mapping[str, Any]]:
    """Return the sections of rotary settings by key; empty if missing."""
    sections = {key: fields.get(key) for key in ("rope_scaling", "rope_parameters")}
    for key, section in sections.items():
        if section is not None and not isinstance(section, Mapping):
            raise fields.malformed(key, "an object")
    return {key: section or {} for key, section in sections.items()}


def _rope_fields(fields: ConfigFields, family: Rope) -> ConfigFields:
    """Return the rotary settings, found as in transformers.

    They are in `rope_scaling`, or in `rope_parameters` since transformers 5. If both are present, `rope_scaling`
    counts. Settings that the section lacks are read from the top level.
    """
    merged: dict[str, Any] = {key: fields.get(key) for key in ("rope_theta", "partial_rotary_factor")}
    merged["max_position_embeddings"] = fields.get("max_position_embeddings")
    merged["original_max_position_embeddings"] = fields.get("max_position_embeddings")
    sections = _sections(fields)
    newer = sections["rope_parameters"]
    if family.local_theta is not None and isinstance(newer.get(_GLOBAL), Mapping):
        newer = newer[_GLOBAL]
    merged |= sections["rope_scaling"] or newer
    if (original := fields.get("original_max_position_embeddings")) is not None:
        merged["original_max_position_embeddings"] = original
    return replace(fields, values=merged)


def _kind(rope: ConfigFields, family: Rope) -> str:
    """Return the type of scaling by its current name."""
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind == "su" or (kind == "yarn" and family.yarn_is_longrope):
        return "longrope"
    return kind


def _rotary_dim(rope: ConfigFields, family: Rope, head_dim: int | None) -> int | None:
    """Return the number of rotated dimensions of a head; None: all."""
    fraction = rope.number("partial_rotary_factor", family.partial)
    if fraction == 1.0:
        return None
    if head_dim is None:
        raise rope.unsupported("rotating a part of each head (partial_rotary_factor)")
    dim = int(head_dim * fraction) if fraction < 1 else 0
    if dim < 2 or dim % 2:
        raise rope.malformed("partial_rotary_factor", f"a fraction that is an even part of {head_dim}")
    return dim


def _scaling(rope: ConfigFields, family: Rope, dim: int | None) -> tuple[RopeScaling | None, float]:
    """Return the frequency scaling, and the factor of the rotated dimensions; `dim` is their number."""
    kind = _kind(rope, family)
    if any(isinstance(value, Mapping) for value in rope.values.values()):
        raise rope.unsupported("rope settings that differ between layers")
    match kind:
        # Dynamic scaling applies beyond the stated context length, which is the limit here.
        case "default" | "dynamic":
            return None, 1.0
        case "linear":
            return LinearRopeScaling(rope.number("factor")), 1.0
        case "llama3":
            scaling = Llama3RopeScaling(
                factor=rope.number("factor"),
                low_freq_factor=rope.number("low_freq_factor"),
                high_freq_factor=rope.number("high_freq_factor"),
                original_context=rope.count("original_max_position_embeddings"),
            )
            return scaling, 1.0
        case "yarn":
            return _yarn(rope, family.yarn_truncates)
        case "longrope" if dim is not None:
            return _longrope(rope, dim)
    raise rope.unsupported(f"rope scaling {kind!r}")


def _yarn(rope: ConfigFields, truncates: bool) -> tuple[YarnRopeScaling, float]:
    """Return YaRN's frequency scaling, and the factor of the rotated dimensions."""
    factor = rope.number("factor")
    if rope.number("rope_theta", 10000.0) <= 1:
        raise rope.malformed("rope_theta", "above one, which YaRN needs")
    if rope.get("attention_factor") is not None:
        magnitude = rope.number("attention_factor")
    elif rope.get("mscale") and rope.get("mscale_all_dim"):
        weights = rope.number("mscale"), rope.number("mscale_all_dim")
        magnitude = yarn_magnitude(factor, weights[0]) / yarn_magnitude(factor, weights[1])
    else:
        magnitude = yarn_magnitude(factor)
    scaling = YarnRopeScaling(
        factor,
        rope.count("original_max_position_embeddings"),
        rope.number("beta_fast", 32.0),
        rope.number("beta_slow", 1.0),
        rope.flag("truncate", truncates),
    )
    return scaling, magnitude


def _longrope(rope: ConfigFields, dim: int) -> tuple[FrequencyFactors, float]:
    """Return the divisors of the frequencies, and the factor of the rotated dimensions.

    LongRoPE has divisors for short and for long texts. The context length decides, as in vLLM and llama.cpp, because
    KV rows that are already rotated could not change when a text grows.
    """
    original = rope.count("original_max_position_embeddings")
    context = rope.count("max_position_embeddings")
    if original < 2:
        raise rope.malformed("original_max_position_embeddings", "at least 2")
    factor = rope.number("factor") if rope.get("factor") is not None else context / original
    magnitude = rope.number("attention_factor", longrope_magnitude(factor, original))
    return FrequencyFactors(
        _numbers(rope, "long_factor" if context > original else "short_factor", dim // 2)
    ), magnitude


def _numbers(rope: ConfigFields, key: str, count: int) -> tuple[float, ...]:
    values = rope.get(key)
    if not isinstance(values, list) or len(values) != count or not all(map(is_positive_number, values)):
        raise rope.malformed(key, f"a list of {count} positive numbers")
    return tuple(map(float, values))
