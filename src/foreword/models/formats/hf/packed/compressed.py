"""compressed-tensors (llm-compressor): int4 and int8 packed in words, int8 and fp8 as they are, MXFP4."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from foreword.models.formats.fields import ConfigFields
from foreword.models.formats.hf.packed.floats import unpack_rows
from foreword.models.formats.hf.packed.scheme import Parts, Scheme, spread, unpacked_bits

_UNUSED = ("input_scale", "input_zero_point", "output_scale", "k_scale", "v_scale", "input_global_scale")
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def compressed_scheme(fields: ConfigFields, section: Mapping[str, Any]) -> Scheme:
    """The scheme that a quantization_config describes; all its groups must be packed alike."""
    own = ConfigFields(section, fields.origin)
    kind = own.text("format")
    if kind in ("int-quantized", "float-quantized", "naive-quantized"):
        return Scheme(
            f"compressed-tensors, {kind}",
            "weight",
            ("weight", "weight_scale"),
            ("weight_zero_point", *_UNUSED),
            unpack_rows,
        )
    if kind == "mxfp4-pack-quantized":
        return Scheme("MXFP4", "weight_packed", ("weight_packed", "weight_scale"), _UNUSED, _unpack_mxfp4)
    if kind != "pack-quantized":
        raise own.unsupported(f"compressed-tensors' format {kind!r}")
    bits = _bits(own)
    return Scheme(
        f"compressed-tensors, {bits} bits",
        "weight_packed",
        ("weight_packed", "weight_scale"),
        ("weight_shape", "weight_zero_point", "weight_g_idx", *_UNUSED),
        lambda parts: _unpack_words(parts, bits),
    )


def _bits(own: ConfigFields) -> int:
    groups = own.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise own.malformed("config_groups", "an object with groups")
    weights = [group.get("weights") if isinstance(group, Mapping) else None for group in groups.values()]
    if not all(isinstance(entry, Mapping) for entry in weights):
        raise own.malformed("config_groups", "groups with weights")
    found = {ConfigFields(entry, own.origin).count("num_bits") for entry in weights if entry is not None}
    if len(found) != 1 or not found <= {2, 4, 8}:
        raise own.unsupported(f"weights of {sorted(found)} bits together")
    return found.pop()


def _unpack_words(parts: Parts, bits: int) -> Tensor:
    half = 2 ** (bits - 1)
    levels = unpacked_bits(parts["weight_packed"], bits, dim=1) - half  # [out, in]
    rows, columns = levels.shape
    if (shape := parts.get("weight_shape")) is not None:
        rows, columns = (int(size) for size in shape)
        levels = levels[:rows, :columns]
    scales, group = parts["weight_scale"], parts.get("weight_g_idx")

    def wide(numbers: Tensor) -> Tensor:
        return spread(numbers, columns) if group is None else numbers.float()[:, group.long()]

    values: Tensor = levels.float()
    if (zero := parts.get("weight_zero_point")) is not None:
        values = values - wide(unpacked_bits(zero, bits, dim=0)[:rows] - half)
    return values * wide(scales)


def _unpack_mxfp4(parts: Parts) -> Tensor:
    """Two numbers in a byte, the lower half first; a scale is a power of two for 32 of them."""
    packed, exponents = parts["weight_packed"], parts["weight_scale"]
    if packed.dtype != torch.uint8 or exponents.dtype != torch.uint8:
        raise ValueError(f"it is stored in {packed.dtype} and {exponents.dtype}, not in bytes")
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1).long()  # [out, in]
    values = _E2M1[codes & 7] * (1 - 2 * (codes >> 3))
    powers: Tensor = torch.exp2(exponents.float() - 127)
    return values * spread(powers, values.shape[1])
