"""Reads the experts of a config.json."""

from foreword.models.architectures.architecture import DenseLayers, ExpertKeys, Grouping
from foreword.models.config import ExpertsSpec, GroupScore
from foreword.models.formats.fields import MAX_DIMENSION, ConfigFields


def experts_spec(fields: ConfigFields, keys: ExpertKeys, normalize: bool) -> ExpertsSpec:
    """Return the routed experts of a layer."""
    if keys.normalize.key is None and not keys.normalize.always and fields.flag("norm_topk_prob", False):
        raise fields.unsupported("normalised weights of experts in this family (norm_topk_prob)")
    _require(fields, "scoring_func", keys.scores.value)
    groups, top_groups = _groups(fields, keys)
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
        clamp=fields.optional_number(keys.clamp),
    )
    return _checked(fields, keys, spec)


def shared_size(fields: ConfigFields, keys: ExpertKeys, experts: ExpertsSpec) -> int:
    """Return the width of the shared expert; 0: none."""
    if keys.shared_size is not None:
        return fields.count(keys.shared_size)
    if keys.shared_count is None:
        return 0
    size = fields.whole(keys.shared_count, 0) * experts.size
    if size > MAX_DIMENSION:
        raise fields.malformed(keys.shared_count, "a number of experts")
    return size


def dense_layers(fields: ConfigFields, keys: ExpertKeys | None, count: int) -> set[int]:
    """Return the layers without experts."""
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
    """Return the number of expert groups, and of groups that a token may select from."""
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
    groups = 1 if fields.get("n_group") is None else fields.count("n_group")
    return groups, groups if fields.get("topk_group") is None else fields.count("topk_group")


def _require(fields: ConfigFields, key: str, expected: str) -> None:
    if fields.text(key, expected) != expected:
        raise fields.unsupported(f"{key} {fields.get(key)!r} in this family")


def _checked(fields: ConfigFields, keys: ExpertKeys, spec: ExpertsSpec) -> ExpertsSpec:
    if spec.count % spec.groups:
        raise fields.malformed("n_group", f"a number that divides {spec.count} experts")
    if spec.top_groups > spec.groups:
        raise fields.malformed("topk_group", f"at most {spec.groups}, the number of groups")
    each = spec.count // spec.groups
    if spec.group_score is GroupScore.TOP2 and each < 2:
        raise fields.malformed("n_group", "few enough groups for two experts each")
    if spec.per_token > each * spec.top_groups:
        raise fields.malformed(
            keys.per_token, f"at most {each * spec.top_groups}, the experts to choose from"
        )
    return spec
