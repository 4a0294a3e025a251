"""Converts GGUF metadata about recurrent layers to the keys of a config.json."""

from typing import Any

from foreword.models.architectures.architecture import Architecture, RecurrentKeys
from foreword.models.config import Norms
from foreword.models.formats.fields import ConfigFields
from foreword.models.formats.gguf.file import GgufFile

_KV_HEADS, _MLP_SIZE, _RECURRENT = (
    "attention.head_count_kv",
    "feed_forward_length",
    "attention.recurrent_layers",
)


def recurrent_keys(keys: RecurrentKeys) -> dict[str, str]:
    """Return keys of config.json -> keys of the metadata (without the architecture's name), for a family."""
    if keys.heads is None:
        return {}
    stated = {
        keys.kernel: "ssm.conv_kernel",
        keys.heads: "ssm.time_step_rank",
        keys.key_heads: "ssm.group_count",
        keys.key_dim: "ssm.state_size",
        keys.value_dim: "ssm.inner_size",
    }
    return {key: name for key, name in stated.items() if key is not None}


def recurrent_values(
    file: GgufFile, fields: ConfigFields, family: Architecture, count: int
) -> dict[str, Any]:
    """Return values of a config.json: the sizes of recurrent layers, and the kind of each of the `count` layers."""
    assert family.recurrent is not None
    keys = family.recurrent
    values = {key: fields.get(name) for key, name in recurrent_keys(keys).items()}
    if keys.heads is not None and keys.value_dim is not None:
        heads, width = fields.count("ssm.time_step_rank"), fields.count("ssm.inner_size")
        if width % heads:
            raise fields.malformed("ssm.inner_size", f"a multiple of {heads} heads")
        values[keys.value_dim] = width // heads
    if keys.heads is not None and keys.conv_bias is not None:
        values[keys.conv_bias] = any(name.endswith(".ssm_conv1d.bias") for name in file.tensors)
    return values | _layers(file, fields, family, count)


def _layers(file: GgufFile, fields: ConfigFields, family: Architecture, count: int) -> dict[str, Any]:
    """Return `layer_types`, and the sizes that the metadata states for each layer: 0 in layers without them."""
    assert family.recurrent is not None
    kv_heads, is_single = _per_layer(fields, _KV_HEADS, count), family.norms is Norms.SINGLE
    listed = isinstance(fields.get(_KV_HEADS), list)
    values: dict[str, Any] = {"num_key_value_heads": _one_size(fields, _KV_HEADS, kv_heads)} if listed else {}
    if is_single:  # a layer has attention, an MLP or a recurrence alone
        widths = _per_layer(fields, _MLP_SIZE, count)
        kinds = [
            _kind_of_single(file, index, heads, width)
            for index, (heads, width) in enumerate(zip(kv_heads, widths, strict=True))
        ]
        return values | {"layer_types": kinds, "intermediate_size": _one_size(fields, _MLP_SIZE, widths)}
    if fields.get(_RECURRENT) is not None:
        has_attention = [not recurrent for recurrent in _per_layer(fields, _RECURRENT, count)]
    elif listed and (family.recurrent.attention_layers is not None or 0 in kv_heads):
        has_attention = [heads > 0 for heads in kv_heads]
    else:
        return values
    return values | {
        "layer_types": ["full_attention" if attends else "linear_attention" for attends in has_attention]
    }


def _kind_of_single(file: GgufFile, index: int, heads: int, width: int) -> str:
    """Return the kind of a layer with one sublayer, from its number of KV heads and the width of its MLP."""
    if width:
        return "moe" if f"blk.{index}.ffn_gate_inp.weight" in file.tensors else "mlp"
    return "full_attention" if heads else "linear_attention"


def _per_layer(fields: ConfigFields, key: str, count: int) -> list[int]:
    """Return a setting of each of the decoder's `count` layers; a stored list may also have values of MTP modules."""
    stored = fields.get(key)
    if not isinstance(stored, list):
        return [fields.whole(key, 0)] * count
    if len(stored) < count or not all(isinstance(value, int) and value >= 0 for value in stored):
        raise fields.malformed(key, f"a list of {count} whole numbers")
    return stored[:count]


def _one_size(fields: ConfigFields, key: str, sizes: list[int]) -> int:
    """Return the size that all layers have in which it is not 0."""
    distinct = sorted(set(sizes) - {0})
    if len(distinct) > 1:
        raise fields.unsupported(f"{key} of {distinct[0]} in some layers and {distinct[-1]} in others")
    return distinct[0] if distinct else 0
