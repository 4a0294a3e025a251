"""GPTQ: columns of a matrix under one scale and zero, in 2, 4 or 8 bits."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from foreword.models.formats.fields import ConfigFields
from foreword.models.formats.hf.packed.scheme import Parts, Scheme, unpacked_bits


def gptq_scheme(fields: ConfigFields, section: Mapping[str, Any]) -> Scheme:
    """The scheme that a quantization_config describes."""
    own = ConfigFields(section, fields.origin)
    bits = own.count("bits")
    if bits not in (2, 4, 8):
        raise own.unsupported(f"GPTQ in {bits} bits")
    kept_less_one = (
        own.text("checkpoint_format", "gptq") != "gptq_v2"
    )  # zeros; an accident that became the format
    return Scheme(
        f"GPTQ, {bits} bits",
        "qweight",
        ("qweight", "qzeros", "scales"),
        ("g_idx",),
        lambda parts: _unpack(parts, bits, int(kept_less_one)),
    )


def _unpack(parts: Parts, bits: int, less: int) -> Tensor:
    levels = unpacked_bits(parts["qweight"], bits, dim=0)  # [in, out]
    zeros = unpacked_bits(parts["qzeros"], bits, dim=1) + less  # [groups, out]
    scales = parts["scales"].float()  # [groups, out]
    group = parts.get("g_idx")
    if group is None:
        size = -(-len(levels) // len(scales))
        group = torch.arange(len(levels), dtype=torch.int32) // size
    group = group.long()
    return (scales[group] * (levels - zeros[group])).T.contiguous()
