"""Quantised weights in safetensors (GPTQ, AWQ, compressed-tensors, FP8, MXFP4): dequantises or repacks them."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from foreword.errors import CheckpointError
from foreword.models.formats.checkpoint import FP8_BLOCK, Fp8Tensor, GroupedTensor, PackedTensor
from foreword.models.formats.fields import MAX_DIMENSION, ConfigFields

Parts = Mapping[str, Tensor]
"""The stored tensors of one matrix, by the suffix of their names: "qweight", "scales", ..."""


@dataclass(frozen=True)
class Scheme:
    """A format in which the matrices of a checkpoint are quantised."""

    title: str  # for users
    marker: str  # suffix of the quantised numbers; "weight" is also the suffix of plain matrices
    needed: tuple[str, ...]  # required suffixes
    extra: tuple[str, ...]  # optional suffixes
    unpack: Callable[[Parts], Tensor]  # returns the dequantised matrix, float32 [out, in]
    # Return the matrix in a form that kernels read; None: it must be dequantised.
    repack: Callable[[Parts], PackedTensor | None] = lambda _: None


def unpacked_bits(packed: Tensor, bits: int, dim: int) -> Tensor:
    """Unpack int32 words, lowest bits first, into non-negative int32 numbers along dimension `dim`."""
    per_word = 32 // bits
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    numbers: Tensor = (packed.unsqueeze(-1) >> shifts) & (2**bits - 1)  # [..., per_word]
    moved: Tensor = numbers.movedim(-1, dim + 1)
    shape = list(packed.shape)
    shape[dim] *= per_word
    return moved.reshape(shape)


def spread(scales: Tensor, columns: int) -> Tensor:
    """Repeat scales [rows, groups] for the columns of each group: float32 [rows, columns]."""
    groups = scales.shape[1]
    if columns % groups:
        raise ValueError(f"{columns} columns cannot be divided into {groups} groups")
    return scales.float().repeat_interleave(columns // groups, dim=1)


def fp8_scheme(quantization: ConfigFields) -> Scheme:
    """Return the scheme of 8-bit floats, with one scale per tensor or row, or one per block."""
    block = quantization.get("weight_block_size")
    if block is None:
        needed = ("weight", "weight_scale")
        return Scheme("8-bit floats", "weight", needed, ("input_scale",), unpack_rows, _repack_rows)
    is_pair = isinstance(block, list) and len(block) == 2 and all(type(size) is int for size in block)
    if not is_pair or not all(0 < size <= MAX_DIMENSION for size in block):
        raise quantization.malformed("weight_block_size", "two sizes")
    rows, columns = block

    def unpack(parts: Parts) -> Tensor:
        weight, scales = parts["weight"].float(), parts["weight_scale_inv"].float()
        expected = -(-weight.shape[0] // rows), -(-weight.shape[1] // columns)
        if tuple(scales.shape) != expected:
            raise ValueError(f"its scales have shape {tuple(scales.shape)}, not {expected}")
        row_scales = scales.repeat_interleave(min(rows, weight.shape[0]), dim=0)[: weight.shape[0]]
        all_scales = row_scales.repeat_interleave(min(columns, weight.shape[1]), dim=1)[:, : weight.shape[1]]
        return weight * all_scales

    def repack(parts: Parts) -> Fp8Tensor | None:
        weight, scales = parts["weight"], parts["weight_scale_inv"].float()
        expected = -(-weight.shape[0] // FP8_BLOCK), -(-weight.shape[1] // FP8_BLOCK)
        fits = rows == columns == FP8_BLOCK and tuple(scales.shape) == expected
        return Fp8Tensor(weight, scales, True) if fits and weight.dtype == torch.float8_e4m3fn else None

    return Scheme(
        "8-bit floats in blocks", "weight", ("weight", "weight_scale_inv"), ("input_scale",), unpack, repack
    )


def _repack_rows(parts: Parts) -> Fp8Tensor | None:
    """Return 8-bit floats with a scale per row; None: other 8-bit numbers, zero points, or scales of another shape."""
    weight, scales = parts["weight"], _column(parts["weight_scale"].float())
    fits = scales.shape in ((1, 1), (len(weight), 1)) and parts.get("weight_zero_point") is None
    if not fits or weight.dtype != torch.float8_e4m3fn:
        return None
    return Fp8Tensor(weight, scales.expand(len(weight), 1), False)


def unpack_rows(parts: Parts) -> Tensor:
    """Dequantise 8-bit numbers with a scale, and possibly a zero point, per row or tensor."""
    weight, scale = parts["weight"].float(), parts["weight_scale"].float()
    if (zero := parts.get("weight_zero_point")) is not None:
        weight = weight - _column(zero.float())
    return weight * _column(scale)


def _column(scale: Tensor) -> Tensor:
    """Return scales as a matrix with one column, to be multiplied with rows."""
    return scale.reshape(-1, 1) if scale.dim() < 2 else scale


def gptq_scheme(quantization: ConfigFields) -> Scheme:
    """Return the scheme of GPTQ in 2, 4 or 8 bits; only 4 bits can be repacked."""
    bits = quantization.count("bits")
    if bits not in (2, 4, 8):
        raise quantization.unsupported(f"GPTQ in {bits} bits")
    # The original format stores zero points minus one.
    zero_offset = 0 if quantization.text("checkpoint_format", "gptq") == "gptq_v2" else 1
    return Scheme(
        f"GPTQ, {bits} bits",
        "qweight",
        ("qweight", "qzeros", "scales"),
        ("g_idx",),
        lambda parts: _unpack_gptq(parts, bits, zero_offset),
        lambda parts: _repack_gptq(parts, zero_offset) if bits == 4 else None,
    )


def _unpack_gptq(parts: Parts, bits: int, zero_offset: int) -> Tensor:
    levels = unpacked_bits(parts["qweight"], bits, dim=0)  # [in, out]
    zeros = unpacked_bits(parts["qzeros"], bits, dim=1) + zero_offset  # [groups, out]
    return _scaled(levels, zeros, parts)


def _scaled(levels: Tensor, zeros: Tensor, parts: Parts) -> Tensor:
    """Dequantise levels [in, out] with zero points [groups, out] and the scales in `parts`: float32 [out, in]."""
    scales = parts["scales"].float()  # [groups, out]
    group = parts.get("g_idx")  # [in], the group of each input; None: groups are consecutive
    if group is None:
        group = torch.arange(len(levels)) // -(-len(levels) // len(scales))
    group = group.long()
    return (scales[group] * (levels - zeros[group])).T.contiguous()


def _repack_gptq(parts: Parts, zero_offset: int) -> GroupedTensor | None:
    codes, scales = unpacked_bits(parts["qweight"], 4, dim=0), parts["scales"]  # [in, out], [groups, out]
    zeros = unpacked_bits(parts["qzeros"], 4, dim=1) + zero_offset
    group_size, order = len(codes) // len(scales), None
    if (group := parts.get("g_idx")) is not None:
        by_group = group.long().argsort(stable=True)
        if not torch.equal(group.long()[by_group], torch.arange(len(group)) // group_size):
            return None  # groups of different sizes
        if not torch.equal(by_group, torch.arange(len(group))):
            codes, order = codes[by_group], by_group.int()
    return GroupedTensor(_bytes(codes), scales.T.contiguous(), _bytes(zeros), order)


def _bytes(numbers: Tensor) -> Tensor:
    """Convert int [in, out] to uint8 [out, in]."""
    return numbers.to(torch.uint8).T.contiguous()


_ORDER = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])
"""Index of each of eight consecutive columns within a word of AWQ."""


def awq_scheme(quantization: ConfigFields) -> Scheme:
    version = quantization.text("version", "gemm").lower()
    if quantization.count("bits", 4) != 4 or version != "gemm":
        raise quantization.unsupported(f"AWQ in {quantization.get('bits')} bits, version {version}")
    return Scheme("AWQ, 4 bits", "qweight", ("qweight", "qzeros", "scales"), (), _unpack_awq, _repack_awq)


def _unpack_awq(parts: Parts) -> Tensor:
    return _scaled(_in_order(parts["qweight"]), _in_order(parts["qzeros"]), parts)


def _repack_awq(parts: Parts) -> GroupedTensor:
    codes, zeros = _in_order(parts["qweight"]), _in_order(parts["qzeros"])
    return GroupedTensor(_bytes(codes), parts["scales"].T.contiguous(), _bytes(zeros))


def _in_order(packed: Tensor) -> Tensor:
    """Unpack AWQ's 4-bit numbers, and restore the order of the columns."""
    numbers = unpacked_bits(packed, 4, dim=1)
    return numbers.view(len(numbers), -1, 8)[..., _ORDER].reshape(numbers.shape)


_UNUSED = ("input_scale", "input_zero_point", "output_scale", "k_scale", "v_scale", "input_global_scale")
"""Suffixes of compressed-tensors' scales for activations and KV cache, which are not quantised here."""

_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
"""Magnitudes of the 4-bit floats of MXFP4, by their lower three bits."""


def compressed_scheme(quantization: ConfigFields) -> Scheme:
    """Return the scheme of compressed-tensors' quantization_config; all its groups must have the same format."""
    packing = quantization.text("format")
    if packing in ("int-quantized", "float-quantized", "naive-quantized"):
        return Scheme(
            f"compressed-tensors, {packing}",
            "weight",
            ("weight", "weight_scale"),
            ("weight_zero_point", *_UNUSED),
            unpack_rows,
            _repack_rows,
        )
    if packing == "mxfp4-pack-quantized":
        return replace(mxfp4_scheme(quantization), extra=_UNUSED)
    if packing != "pack-quantized":
        raise quantization.unsupported(f"compressed-tensors' format {packing!r}")
    bits = _bits(quantization)
    return Scheme(
        f"compressed-tensors, {bits} bits",
        "weight_packed",
        ("weight_packed", "weight_scale"),
        ("weight_shape", "weight_zero_point", "weight_g_idx", *_UNUSED),
        lambda parts: unpack_words(parts, bits),
        lambda parts: _repack_words(parts) if bits == 4 else None,
    )


def _bits(quantization: ConfigFields) -> int:
    """Return the bits per weight of compressed-tensors' config, the same in all groups."""
    groups = quantization.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise quantization.malformed("config_groups", "an object with groups")
    weights = [group.get("weights") if isinstance(group, Mapping) else None for group in groups.values()]
    if not all(isinstance(entry, Mapping) for entry in weights):
        raise quantization.malformed("config_groups", "groups with weights")
    widths = {
        ConfigFields(entry, quantization.origin).count("num_bits") for entry in weights if entry is not None
    }
    if len(widths) != 1 or not widths <= {2, 4, 8}:
        raise quantization.unsupported(f"weights of {sorted(widths)} bits together")
    return widths.pop()


def unpack_words(parts: Parts, bits: int) -> Tensor:
    """Dequantise compressed-tensors' levels, packed in int32 words, with a scale per group of columns."""
    half = 2 ** (bits - 1)
    levels = unpacked_bits(parts["weight_packed"], bits, dim=1) - half  # [out, in]
    rows, columns = levels.shape
    if (shape := parts.get("weight_shape")) is not None:
        rows, columns = (int(size) for size in shape)
        levels = levels[:rows, :columns]
    scales, group = parts["weight_scale"], parts.get("weight_g_idx")

    def per_column(numbers: Tensor) -> Tensor:
        return spread(numbers, columns) if group is None else numbers.float()[:, group.long()]

    values: Tensor = levels.float()
    if (zero := parts.get("weight_zero_point")) is not None:
        values = values - per_column(unpacked_bits(zero, bits, dim=0)[:rows] - half)
    return values * per_column(scales)


def _repack_words(parts: Parts) -> GroupedTensor | None:
    codes = unpacked_bits(parts["weight_packed"], 4, dim=1)
    if (shape := parts.get("weight_shape")) is not None:
        codes = codes[: int(shape[0]), : int(shape[1])]
    if parts.get("weight_g_idx") is not None:
        return None
    zero = parts.get("weight_zero_point")
    zeros = None if zero is None else unpacked_bits(zero, 4, dim=0)[: len(codes)].to(torch.uint8)
    return GroupedTensor(codes.to(torch.uint8), parts["weight_scale"], zeros)


def _repack_mxfp4(parts: Parts) -> GroupedTensor | None:
    """Return the codes, two per byte with the low nibble first, and halved scales: a power of two per 32 columns."""
    packed, exponents = parts["weight_packed"], parts["weight_scale"]
    if packed.dtype != torch.uint8 or exponents.dtype != torch.uint8:
        return None
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)
    # The bias is 128 instead of 127, since `GroupedTensor` has halved scales for float codes.
    return GroupedTensor(codes, torch.exp2(exponents.float() - 128), None, floats=True)


def _unpack_mxfp4(parts: Parts) -> Tensor:
    matrix = _repack_mxfp4(parts)
    if matrix is None:
        types = parts["weight_packed"].dtype, parts["weight_scale"].dtype
        raise ValueError(f"it is stored in {types[0]} and {types[1]}, not in bytes")
    codes = matrix.codes.long()  # [out, in]
    values = _E2M1[codes & 7] * (1 - 2 * (codes >> 3))
    return values * spread(2 * matrix.scales, values.shape[1])


def mxfp4_scheme(quantization: ConfigFields) -> Scheme:
    needed = ("weight_packed", "weight_scale")
    return Scheme("MXFP4", "weight_packed", needed, (), _unpack_mxfp4, _repack_mxfp4)


SCHEMES = {
    "mxfp4": mxfp4_scheme,
    "gptq": gptq_scheme,
    "awq": awq_scheme,
    "compressed-tensors": compressed_scheme,
    "fp8": fp8_scheme,
}
"""Functions that return the scheme of a quantization_config, by its `quant_method`."""


def scheme_of(fields: ConfigFields) -> Scheme | None:
    """Return the scheme of a model's matrices; None: plain floats."""
    section = fields.get("quantization_config") or fields.get("compression_config")
    if section is None:
        return None
    if not isinstance(section, Mapping):
        raise fields.malformed("quantization_config", "an object")
    quantization = ConfigFields(section, fields.origin)
    method = quantization.text("quant_method")
    if method not in SCHEMES:
        raise CheckpointError(
            f"{fields.origin}: weights quantised by {method[:60]!r} are not supported; use one of "
            f"{', '.join(SCHEMES)}, the unquantised model or a GGUF file"
        )
    return SCHEMES[method](quantization)


def packed_matrices(names: Iterable[str], scheme: Scheme | None) -> dict[str, dict[str, str]]:
    """Return tensor name -> its parts (suffix -> stored name); a plain tensor has one part with the suffix ""."""
    present = set(names)
    parts_of: dict[str, dict[str, str]] = {}
    used: set[str] = set()
    if scheme is not None:
        for name in sorted(present):
            stem, _, suffix = name.rpartition(".")
            if suffix != scheme.marker or not all(f"{stem}.{part}" in present for part in scheme.needed):
                continue
            suffixes = (*scheme.needed, *scheme.extra)
            parts = {part: f"{stem}.{part}" for part in suffixes if f"{stem}.{part}" in present}
            parts_of[f"{stem}.weight"] = parts
            used |= set(parts.values())
    return parts_of | {name: {"": name} for name in present - used}


def packed_stacks(parts_of: Mapping[str, dict[str, str]]) -> dict[str, dict[str, str]]:
    """Return the parts of all tensors. x_blocks and x_scales (stacked experts in MXFP4) become parts of x."""
    result = dict(parts_of)
    for name in parts_of:
        stem = name.removesuffix("_blocks")
        if stem != name and f"{stem}_scales" in result:
            blocks, scales = result.pop(name), result.pop(f"{stem}_scales")
            result[stem] = {"weight_packed": blocks[""], "weight_scale": scales[""]}
    return result


def unpacked(scheme: Scheme, parts: Parts, name: str, path: Path) -> Tensor:
    """Dequantise a matrix, float32 [out, in]; raise `CheckpointError` if its parts do not fit together."""
    try:
        return scheme.unpack(parts)
    except (RuntimeError, ValueError, IndexError) as error:  # inconsistent parts
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(
            f"{path}: tensor {name} cannot be read ({reason}); the file is damaged, get it again"
        ) from None
