"""AWQ: 4 bits, eight columns in a word in an order of its own."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from foreword.models.formats.fields import ConfigFields
from foreword.models.formats.hf.packed.scheme import Parts, Scheme, unpacked_bits

_ORDER = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])
"""For every column of eight, which number of the word it is."""


def awq_scheme(fields: ConfigFields, section: Mapping[str, Any]) -> Scheme:
    """The scheme that a quantization_config describes."""
    own = ConfigFields(section, fields.origin)
    version = own.text("version", "gemm").lower()
    if own.count("bits", 4) != 4 or version != "gemm":
        raise own.unsupported(f"AWQ in {own.get('bits')} bits, version {version}")
    return Scheme("AWQ, 4 bits", "qweight", ("qweight", "qzeros", "scales"), (), _unpack)


def _unpack(parts: Parts) -> Tensor:
    levels, zeros = _in_order(parts["qweight"]), _in_order(parts["qzeros"])  # [in, out], [groups, out]
    scales = parts["scales"].float()
    group = torch.arange(len(levels)) // -(-len(levels) // len(scales))
    return (scales[group] * (levels - zeros[group])).T.contiguous()


def _in_order(packed: Tensor) -> Tensor:
    numbers = unpacked_bits(packed, 4, dim=1)
    return numbers.view(len(numbers), -1, 8)[..., _ORDER].reshape(numbers.shape)
