"""Reads the experts and the recurrent layers of a config.json."""

import math
from enum import Enum, auto

from foreword.models.architectures.architecture import (
    Architecture,
    DenseLayers,
    ExpertKeys,
    Grouping,
    RecurrentKeys,
)
from foreword.models.config import CLAMPED_SLOPE, ExpertsSpec, GroupScore, Norms, RecurrentSpec
from foreword.models.formats.fields import MAX_DIMENSION, ConfigFields


def experts_spec(fields: ConfigFields, keys: ExpertKeys, normalize: bool) -> ExpertsSpec:
    """Return the routed experts of a config.json, checked for consistency."""
    if keys.normalize.key is None and not keys.normalize.always and fields.flag("norm_topk_prob", False):
        raise fields.unsupported("normalised weights of experts in this family (norm_topk_prob)")
    _require(fields, "scoring_func", keys.scores.value)
    groups, top_groups = _groups(fields, keys)
    if keys.clamp is not None and fields.number("swiglu_alpha", CLAMPED_SLOPE) != CLAMPED_SLOPE:
        raise fields.unsupported(f"swiglu_alpha other than {CLAMPED_SLOPE}")
    spec = ExpertsSpec(
        count=fields.count(next((key for key in keys.count if fields.get(key) is not None), keys.count[0])),
        per_token=fields.count(keys.per_token),
        size=fields.count(keys.size),
        scores=keys.scores,
        normalize=normalize,
        scale=1.0 if keys.scale is None else fields.number(keys.scale, 1.0),
        corrected=keys.corrected,
        groups=groups,
        top_groups=top_groups,
        group_score=keys.group_score,
        shared_gate=keys.shared_gate,
        bias=keys.bias,
        clamp=None if keys.clamp is None else fields.number(*keys.clamp),
    )
    return _checked(fields, keys, spec)


def shared_size(fields: ConfigFields, keys: ExpertKeys, experts: ExpertsSpec) -> int:
    """Return the intermediate size of the shared expert; 0: there is none."""
    if keys.shared_size is not None:
        return fields.count(keys.shared_size)
    if keys.shared_count is None:
        return 0
    size = fields.whole(keys.shared_count, 0) * experts.size
    if size > MAX_DIMENSION:
        raise fields.malformed(keys.shared_count, "a number of experts")
    return size


def dense_layers(fields: ConfigFields, keys: ExpertKeys | None, count: int) -> set[int]:
    """Return the indices of layers with a dense MLP, in a model with experts in the other layers."""
    if keys is None or keys.dense is DenseLayers.NONE:
        return set()
    if keys.dense is DenseLayers.FIRST:
        if fields.count("moe_layer_freq", 1) != 1:
            raise fields.unsupported("layers without experts between others (moe_layer_freq)")
        return set(range(min(count, fields.whole("first_k_dense_replace", 0))))
    step, named = fields.count("decoder_sparse_step", 1), fields.get("mlp_only_layers") or []
    if not isinstance(named, list) or not all(isinstance(index, int) for index in named):
        raise fields.malformed("mlp_only_layers", "a list of layers")
    return {index for index in range(count) if index in named or (index + 1) % step}


def _groups(fields: ConfigFields, keys: ExpertKeys) -> tuple[int, int]:
    """Return (number of groups of experts, number of groups from which a token selects)."""
    if keys.grouping is Grouping.BY_METHOD:
        method = fields.text("topk_method", "greedy")
        if method not in ("greedy", "group_limited_greedy"):
            raise fields.unsupported(f"choosing experts by {method!r} (topk_method)")
        if method == "greedy":
            return 1, 1
    elif keys.grouping is Grouping.NONE:
        return 1, 1
    else:
        _require(fields, "topk_method", "noaux_tc")
    groups = fields.count("n_group", 1)
    return groups, fields.count("topk_group", groups)


def _require(fields: ConfigFields, key: str, expected: str) -> None:
    """Raise `CheckpointError` if a text is present and not `expected`."""
    if fields.text(key, expected) != expected:
        raise fields.unsupported(f"{key} {fields.get(key)!r} in this family")


def _checked(fields: ConfigFields, keys: ExpertKeys, spec: ExpertsSpec) -> ExpertsSpec:
    """Return `spec`; raise `CheckpointError` if groups and experts per token do not fit together."""
    if spec.count % spec.groups:
        raise fields.malformed("n_group", f"a number that divides {spec.count} experts")
    if spec.top_groups > spec.groups:
        raise fields.malformed("topk_group", f"at most {spec.groups}, the number of groups")
    group_size = spec.count // spec.groups
    if spec.group_score is GroupScore.TOP2 and group_size < 2:
        raise fields.malformed("n_group", "few enough groups for two experts each")
    if spec.per_token > group_size * spec.top_groups:
        raise fields.malformed(
            keys.per_token, f"at most {group_size * spec.top_groups}, the experts to choose from"
        )
    return spec


class LayerKind(Enum):
    """Kind of a layer in a model with recurrent layers."""

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
"""Names in `layer_types`, and characters of `hybrid_override_pattern` -> kinds."""


def num_layers(fields: ConfigFields, family: Architecture) -> int:
    """Return the number of layers, by default the length of the list of their kinds."""
    stated = _stated_kinds(fields) if family.recurrent is not None else None
    return fields.count("num_hidden_layers", len(stated) if isinstance(stated, list | str) else None)


def layer_kinds(fields: ConfigFields, family: Architecture, count: int) -> list[LayerKind]:
    """Return the kind of each layer. Configs state a list of kinds, a list of attention layers, or a period."""
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
        has_attention = [index in named for index in range(count)]
    else:
        period = fields.count("full_attention_interval", keys.attention_period)
        has_attention = [(index + 1) % period == 0 for index in range(count)]
    return [LayerKind.ATTENTION if attends else LayerKind.RECURRENT for attends in has_attention]


def _stated_kinds(fields: ConfigFields) -> object:
    """Return the unchecked list (or text) of the layers' kinds, under any of its keys; None: there is none."""
    names = ("layer_types", "layers_block_type", "hybrid_override_pattern")
    return next((fields.get(name) for name in names if fields.get(name) is not None), None)


def recurrent_spec(fields: ConfigFields, keys: RecurrentKeys) -> RecurrentSpec:
    """Return the recurrent layers of a config.json."""
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
    """Return the size of a value; without a stated size, Mamba-2's expansion of the hidden size determines it."""
    if keys.value_dim is None:
        return hidden
    if fields.get(keys.value_dim) not in (None, "auto"):
        return fields.count(keys.value_dim)
    return fields.count("mamba_expand", 2) * hidden // heads


def _time_limits(fields: ConfigFields) -> tuple[float, float]:
    """Return (minimum, maximum) of Mamba-2's Δ."""
    limits = fields.get("time_step_limit")
    if limits is None:
        return 0.0, math.inf
    if not isinstance(limits, list):
        limits = []
    # transformers writes infinity as {"__float__": "Infinity"}.
    values = [n.get("__float__") if isinstance(n, dict) else n for n in limits]
    numbers = [float(n) for n in values if n == "Infinity" or (isinstance(n, int | float) and n >= 0)]
    if len(values) != 2 or len(numbers) != 2:
        raise fields.malformed("time_step_limit", "a list of two numbers")
    return numbers[0], numbers[1]
