"""8-bit floats: in blocks with a scale each (DeepSeek), by row, or with one scale for all."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from foreword.models.formats.fields import MAX_DIMENSION, ConfigFields
from foreword.models.formats.hf.packed.scheme import Parts, Scheme


def fp8_scheme(fields: ConfigFields, section: Mapping[str, Any]) -> Scheme:
    """The scheme that a quantization_config describes."""
    own = ConfigFields(section, fields.origin)
    block = own.get("weight_block_size")
    if block is None:
        return Scheme("8-bit floats", "weight", ("weight", "weight_scale"), ("input_scale",), unpack_rows)
    good = isinstance(block, list) and len(block) == 2 and all(type(size) is int for size in block)
    if not good or not all(0 < size <= MAX_DIMENSION for size in block):
        raise own.malformed("weight_block_size", "two sizes")
    rows, columns = block

    def unpack(parts: Parts) -> Tensor:
        weight, scales = parts["weight"].float(), parts["weight_scale_inv"].float()
        expected = -(-weight.shape[0] // rows), -(-weight.shape[1] // columns)
        if tuple(scales.shape) != expected:
            raise ValueError(f"its scales have shape {tuple(scales.shape)}, not {expected}")
        tall = scales.repeat_interleave(min(rows, weight.shape[0]), dim=0)[: weight.shape[0]]
        wide = tall.repeat_interleave(min(columns, weight.shape[1]), dim=1)[:, : weight.shape[1]]
        return weight * wide

    return Scheme(
        "8-bit floats in blocks", "weight", ("weight", "weight_scale_inv"), ("input_scale",), unpack
    )


def unpack_rows(parts: Parts) -> Tensor:
    """8-bit numbers with a scale, and perhaps a zero, per row or for all."""
    weight, scale = parts["weight"].float(), parts["weight_scale"].float()
    if (zero := parts.get("weight_zero_point")) is not None:
        weight = weight - _column(zero.float())
    return weight * _column(scale)


def _column(scale: Tensor) -> Tensor:
    return scale.reshape(-1, 1) if scale.dim() < 2 else scale
