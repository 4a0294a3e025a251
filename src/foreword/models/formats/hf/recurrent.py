"""Reads the recurrent layers of a config.json."""

import math
from enum import Enum, auto

from foreword.models.architectures.architecture import Architecture, RecurrentKeys
from foreword.models.config import Norms, RecurrentSpec
from foreword.models.formats.fields import ConfigFields


class LayerKind(Enum):
    """What a layer of a hybrid model has."""

    RECURRENT = auto()
    ATTENTION = auto()
    MLP = auto()
    EXPERTS = auto()


_KINDS = {
    **dict.fromkeys(("linear_attention", "mamba", "conv", "M"), LayerKind.RECURRENT),
    **dict.fromkeys(("full_attention", "attention", "*"), LayerKind.ATTENTION),
    **dict.fromkeys(("mlp", "-"), LayerKind.MLP),
    **dict.fromkeys(("moe", "E"), LayerKind.EXPERTS),
}
"""Names in `layer_types`, and letters of `hybrid_override_pattern`."""


def num_layers(fields: ConfigFields, family: Architecture) -> int:
    """Return the number of layers; Nemotron-H may state it by their kinds alone."""
    stated = _stated_kinds(fields) if family.recurrent is not None else None
    return fields.count("num_hidden_layers", len(stated) if isinstance(stated, list | str) else None)


def layer_kinds(fields: ConfigFields, family: Architecture, count: int) -> list[LayerKind]:
    """Return what the layers have: by a list of kinds, a list of attention layers, or a period."""
    keys, stated = family.recurrent, _stated_kinds(fields)
    if keys is None:
        return [LayerKind.ATTENTION] * count
    if stated is not None:
        if (
            not isinstance(stated, list | str)
            or len(stated) != count
            or not all(isinstance(k, str) for k in stated)
        ):
            raise fields.malformed("layer_types", f"a list of {count} names")
        if unknown := sorted(set(stated) - set(_KINDS)):
            raise fields.unsupported(f"a layer of type {unknown[0]!r}")
        kinds = [_KINDS[kind] for kind in stated]
        if family.norms is not Norms.SINGLE and {LayerKind.MLP, LayerKind.EXPERTS} & set(kinds):
            raise fields.unsupported("a layer with an MLP alone in this family")
        return kinds
    if keys.attention_layers is not None:
        named = fields.get(keys.attention_layers) or []
        if not isinstance(named, list) or not all(isinstance(index, int) for index in named):
            raise fields.malformed(keys.attention_layers, "a list of layers")
        attends = [index in named for index in range(count)]
    else:
        period = fields.count("full_attention_interval", keys.attention_period)
        attends = [(index + 1) % period == 0 for index in range(count)]
    return [LayerKind.ATTENTION if has else LayerKind.RECURRENT for has in attends]


def _stated_kinds(fields: ConfigFields) -> object:
    names = ("layer_types", "layers_block_type", "hybrid_override_pattern")
    return next((fields.get(name) for name in names if fields.get(name) is not None), None)


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
        norm_groups=fields.count(keys.key_heads) if keys.grouped_norm and keys.key_heads is not None else 1,
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
