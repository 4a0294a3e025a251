"""Models whose matrices are packed in the layouts that people publish."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from foreword.models.formats.hf.config import hf_config
from foreword.models.layer_shapes import expected_shapes

SETTINGS: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 40,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
GROUP = 32
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which column of eight the numbers of a word are, from the lowest bits on."""

Packed = tuple[dict[str, Tensor], Tensor]
"""Stored parts of a matrix, and the numbers that they stand for."""


def words(levels: Tensor, bits: int = 4) -> Tensor:
    """Numbers [n, each * k] -> int32 words [n, k], the first in the lowest bits."""
    each = 32 // bits
    rows = levels.long().view(len(levels), -1, each)
    total = sum(rows[..., place] << (bits * place) for place in range(each))
    return (
        (total & 0xFFFFFFFF)
        .to(torch.int64)
        .apply_(lambda word: word - 2**32 if word >= 2**31 else word)
        .int()
    )


def random_levels(rows: int, columns: int, highest: int = 15) -> Tensor:
    return torch.randint(0, highest + 1, (rows, columns))


def scales_of(rows: int, groups: int) -> Tensor:
    return (torch.rand(rows, groups) * 0.02 + 0.001).half()


def spread(per_group: Tensor) -> Tensor:
    return per_group.float().repeat_interleave(GROUP, dim=1)


def gptq(rows: int, columns: int) -> Packed:
    levels, zeros = random_levels(rows, columns), random_levels(rows, columns // GROUP, 14) + 1
    scales = scales_of(rows, columns // GROUP)
    group = torch.randperm(columns) // GROUP  # desc_act: columns of a group lie anywhere
    parts = {
        "qweight": words(levels).T.contiguous(),
        "qzeros": words((zeros - 1).T.contiguous()),
        "scales": scales.T.contiguous(),
        "g_idx": group.int(),
    }
    return parts, scales.float()[:, group] * (levels - zeros[:, group])


def awq(rows: int, columns: int) -> Packed:
    levels, zeros = random_levels(rows, columns), random_levels(rows, columns // GROUP)
    scales = scales_of(rows, columns // GROUP)

    def packed(numbers: Tensor) -> Tensor:  # [in or groups, out]
        return words(numbers.view(len(numbers), -1, 8)[..., list(AWQ_COLUMNS)].reshape(numbers.shape))

    parts = {
        "qweight": packed(levels.T.contiguous()),
        "qzeros": packed(zeros.T.contiguous()),
        "scales": scales.T.contiguous(),
    }
    return parts, spread(scales) * (levels - spread(zeros))


def compressed_int4(rows: int, columns: int) -> Packed:
    levels, zeros = random_levels(rows, columns), random_levels(rows, columns // GROUP)
    scales = scales_of(rows, columns // GROUP)
    parts = {
        "weight_packed": words(levels),
        "weight_scale": scales,
        "weight_shape": torch.tensor([rows, columns]),
        "weight_zero_point": words(zeros.T.contiguous()).T.contiguous(),
    }
    return parts, spread(scales) * (levels - spread(zeros))


def compressed_int8(rows: int, columns: int) -> Packed:
    levels, scales = random_levels(rows, columns, 255) - 128, scales_of(rows, 1)
    return {"weight": levels.to(torch.int8), "weight_scale": scales}, levels * scales.float()


def fp8_rows(rows: int, columns: int) -> Packed:
    values, scales = torch.randn(rows, columns).to(torch.float8_e4m3fn), torch.rand(rows, 1)
    return {"weight": values, "weight_scale": scales}, values.float() * scales


def fp8_blocks(rows: int, columns: int) -> Packed:
    values = torch.randn(rows, columns).to(torch.float8_e4m3fn)
    scales = torch.rand(-(-rows // 48), -(-columns // 48))
    wide = scales.repeat_interleave(48, 0)[:rows].repeat_interleave(48, 1)[:, :columns]
    return {"weight": values, "weight_scale_inv": scales}, values.float() * wide


def mxfp4(rows: int, columns: int) -> Packed:
    codes, exponents = random_levels(rows, columns), torch.randint(120, 130, (rows, columns // 32))
    numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])[codes]
    packed = (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8)
    parts = {"weight_packed": packed, "weight_scale": exponents.to(torch.uint8)}
    return parts, numbers * torch.exp2(exponents.float() - 127).repeat_interleave(32, dim=1)


_GROUPS = {"group_0": {"weights": {"num_bits": 4}}}
SCHEMES: dict[str, tuple[Callable[[int, int], Packed], dict[str, Any]]] = {
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True}),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "GEMM"}),
    "compressed int4": (
        compressed_int4,
        {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": _GROUPS},
    ),
    "compressed int8": (compressed_int8, {"quant_method": "compressed-tensors", "format": "int-quantized"}),
    "compressed fp8": (fp8_rows, {"quant_method": "compressed-tensors", "format": "float-quantized"}),
    "block fp8": (fp8_blocks, {"quant_method": "fp8", "weight_block_size": [48, 48]}),
    "mxfp4": (mxfp4, {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}),
}


def write_packed(path: Path, scheme: str) -> dict[str, Tensor]:
    """A model whose projections are packed; returns what all tensors stand for."""
    pack, section = SCHEMES[scheme]
    names = frozenset({"model.layers.0.input_layernorm.weight"})
    shapes = expected_shapes(hf_config(SETTINGS, names, path))
    stored: dict[str, Tensor] = {}
    numbers: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        if name.endswith("_proj.weight"):
            parts, numbers[name] = pack(*shape)
            stored |= {f"{name.removesuffix('weight')}{part}": tensor for part, tensor in parts.items()}
        else:
            stored[name] = numbers[name] = torch.randn(shape)
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(SETTINGS | {"quantization_config": section}))
    return numbers
