"""Reads the recurrent layers of a config.json."""

import math

from foreword.models.architectures.architecture import RecurrentKeys
from foreword.models.config import RecurrentSpec
from foreword.models.formats.fields import ConfigFields

RECURRENT_TYPES = frozenset({"linear_attention", "mamba", "conv"})
ATTENTION_TYPES = frozenset({"full_attention", "attention"})
"""Names in `layer_types`."""


def recurrent_layers(fields: ConfigFields, keys: RecurrentKeys, count: int) -> list[bool]:
    """Return which layers are recurrent: by `layer_types`, a list of attention layers, or a period."""
    kinds = fields.get("layer_types") or fields.get("layers_block_type")
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != count or not all(isinstance(k, str) for k in kinds):
            raise fields.malformed("layer_types", f"a list of {count} names")
        if unknown := sorted(set(kinds) - RECURRENT_TYPES - ATTENTION_TYPES):
            raise fields.unsupported(f"a layer of type {unknown[0]!r}")
        return [kind in RECURRENT_TYPES for kind in kinds]
    if keys.attention_layers is not None:
        named = fields.get(keys.attention_layers) or []
        if not isinstance(named, list) or not all(isinstance(index, int) for index in named):
            raise fields.malformed(keys.attention_layers, "a list of layers")
        return [index not in named for index in range(count)]
    period = fields.count("full_attention_interval", keys.attention_period)
    return [(index + 1) % period != 0 for index in range(count)]


def recurrent_spec(fields: ConfigFields, keys: RecurrentKeys) -> RecurrentSpec:
    """Return the mixing of the recurrent layers."""
    hidden = fields.count("hidden_size")
    heads = 1 if keys.heads is None else fields.count(keys.heads)
    spec = RecurrentSpec(
        kind=keys.kind,
        kernel=fields.count(keys.kernel),
        heads=heads,
        value_dim=_value_dim(fields, keys, heads, hidden),
        key_heads=0 if keys.key_heads is None else fields.count(keys.key_heads),
        key_dim=0 if keys.key_dim is None else fields.count(keys.key_dim),
        conv_bias=keys.conv_bias is not None and fields.flag(keys.conv_bias, keys.conv_bias_default),
        bias=keys.bias is not None and fields.flag(keys.bias, False),
        time_limits=_time_limits(fields),
    )
    if spec.key_heads and spec.heads % spec.key_heads:
        raise fields.malformed(keys.key_heads or "", f"a number that divides {spec.heads} heads")
    return spec


def _value_dim(fields: ConfigFields, keys: RecurrentKeys, heads: int, hidden: int) -> int:
    if keys.value_dim is None:
        return hidden
    if fields.get(keys.value_dim) not in (None, "auto"):
        return fields.count(keys.value_dim)
    return fields.count("mamba_expand", 2) * hidden // heads


def _time_limits(fields: ConfigFields) -> tuple[float, float]:
    limits = fields.get("time_step_limit")
    if limits is None:
        return 0.0, math.inf
    # transformers writes infinity as {"__float__": "Infinity"}
    known = (
        [n.get("__float__") if isinstance(n, dict) else n for n in limits] if isinstance(limits, list) else []
    )
    numbers = [float(n) for n in known if n == "Infinity" or (isinstance(n, int | float) and n >= 0)]
    if len(known) != 2 or len(numbers) != 2:
        raise fields.malformed("time_step_limit", "a list of two numbers")
    return numbers[0], numbers[1]
