"""Quantised weights in safetensors (GPTQ, AWQ, compressed-tensors, FP8): unpacked at load, or kept packed."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from foreword.errors import CheckpointError
from foreword.models.formats.checkpoint import FP8_BLOCK, Fp8Tensor, GroupedTensor, PackedTensor
from foreword.models.formats.fields import MAX_DIMENSION, ConfigFields

Parts = Mapping[str, Tensor]
"""Tensors of one matrix by name suffix: "qweight", "scales", ..."""


@dataclass(frozen=True)
class Scheme:
    """A packing format of matrices."""

    title: str
    marker: str  # suffix of the packed numbers; "weight" if plain matrices have it too
    needed: tuple[str, ...]  # required suffixes
    extra: tuple[str, ...]  # optional suffixes
    unpack: Callable[[Parts], Tensor]  # float32 [out, in]
    keep: Callable[[Parts], PackedTensor | None] = lambda _: None  # None: it must be unpacked


def unpacked_bits(packed: Tensor, bits: int, dim: int) -> Tensor:
    """Unpack int32 words, lowest bits first, into unsigned int32 numbers along `dim`."""
    each = 32 // bits
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    numbers: Tensor = (packed.unsqueeze(-1) >> shifts) & (2**bits - 1)  # [..., each]
    moved: Tensor = numbers.movedim(-1, dim + 1)
    shape = list(packed.shape)
    shape[dim] *= each
    return moved.reshape(shape)


def spread(scales: Tensor, columns: int) -> Tensor:
    groups = scales.shape[1]
    if columns % groups:
        raise ValueError(f"{columns} columns are not {groups} groups")
    return scales.float().repeat_interleave(columns // groups, dim=1)


def fp8_scheme(own: ConfigFields) -> Scheme:
    block = own.get("weight_block_size")
    if block is None:
        needed = ("weight", "weight_scale")
        return Scheme("8-bit floats", "weight", needed, ("input_scale",), unpack_rows, _keep_rows)
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

    def keep(parts: Parts) -> Fp8Tensor | None:
        weight, scales = parts["weight"], parts["weight_scale_inv"].float()
        whole = -(-weight.shape[0] // FP8_BLOCK), -(-weight.shape[1] // FP8_BLOCK)
        is_plain = rows == columns == FP8_BLOCK and tuple(scales.shape) == whole
        return Fp8Tensor(weight, scales, True) if is_plain and weight.dtype == torch.float8_e4m3fn else None

    return Scheme(
        "8-bit floats in blocks", "weight", ("weight", "weight_scale_inv"), ("input_scale",), unpack, keep
    )


def _keep_rows(parts: Parts) -> Fp8Tensor | None:
    weight, scales = parts["weight"], _column(parts["weight_scale"].float())
    fits = scales.shape in ((1, 1), (len(weight), 1)) and parts.get("weight_zero_point") is None
    if not fits or weight.dtype != torch.float8_e4m3fn:
        return None
    return Fp8Tensor(weight, scales.expand(len(weight), 1), False)


def unpack_rows(parts: Parts) -> Tensor:
    """Unpack 8-bit numbers with a scale, and possibly a zero point, per row or tensor."""
    weight, scale = parts["weight"].float(), parts["weight_scale"].float()
    if (zero := parts.get("weight_zero_point")) is not None:
        weight = weight - _column(zero.float())
    return weight * _column(scale)


def _column(scale: Tensor) -> Tensor:
    return scale.reshape(-1, 1) if scale.dim() < 2 else scale


def gptq_scheme(own: ConfigFields) -> Scheme:
    bits = own.count("bits")
    if bits not in (2, 4, 8):
        raise own.unsupported(f"GPTQ in {bits} bits")
    # The original format stores zeros less one.
    stores_less_one = own.text("checkpoint_format", "gptq") != "gptq_v2"
    return Scheme(
        f"GPTQ, {bits} bits",
        "qweight",
        ("qweight", "qzeros", "scales"),
        ("g_idx",),
        lambda parts: _unpack_gptq(parts, bits, int(stores_less_one)),
        lambda parts: _keep_gptq(parts, int(stores_less_one)) if bits == 4 else None,
    )


def _unpack_gptq(parts: Parts, bits: int, less: int) -> Tensor:
    levels = unpacked_bits(parts["qweight"], bits, dim=0)  # [in, out]
    zeros = unpacked_bits(parts["qzeros"], bits, dim=1) + less  # [groups, out]
    return _scaled(levels, zeros, parts)


def _scaled(levels: Tensor, zeros: Tensor, parts: Parts) -> Tensor:
    """Return float32 [out, in] from levels [in, out] and zeros [groups, out]."""
    scales, group = parts["scales"].float(), parts.get("g_idx")  # [groups, out], [in]
    if group is None:
        group = torch.arange(len(levels)) // -(-len(levels) // len(scales))
    group = group.long()
    return (scales[group] * (levels - zeros[group])).T.contiguous()


def _keep_gptq(parts: Parts, less: int) -> GroupedTensor | None:
    codes, scales = unpacked_bits(parts["qweight"], 4, dim=0), parts["scales"]  # [in, out], [groups, out]
    zeros = unpacked_bits(parts["qzeros"], 4, dim=1) + less
    size, order = len(codes) // len(scales), None
    if (group := parts.get("g_idx")) is not None:
        order = group.long().argsort(stable=True)
        if not torch.equal(group.long()[order], torch.arange(len(group)) // size):
            return None  # groups of different sizes
        if torch.equal(order, torch.arange(len(group))):
            order = None
        else:
            codes = codes[order]
    kept = GroupedTensor(_bytes(codes), scales.T.contiguous(), _bytes(zeros))
    return kept if order is None else replace(kept, order=order.int())


def _bytes(numbers: Tensor) -> Tensor:
    """Convert int [in, out] to uint8 [out, in]."""
    return numbers.to(torch.uint8).T.contiguous()


_ORDER = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])
"""Position of each of eight columns within a word."""


def awq_scheme(own: ConfigFields) -> Scheme:
    version = own.text("version", "gemm").lower()
    if own.count("bits", 4) != 4 or version != "gemm":
        raise own.unsupported(f"AWQ in {own.get('bits')} bits, version {version}")
    return Scheme("AWQ, 4 bits", "qweight", ("qweight", "qzeros", "scales"), (), _unpack_awq, _keep_awq)


def _unpack_awq(parts: Parts) -> Tensor:
    return _scaled(_in_order(parts["qweight"]), _in_order(parts["qzeros"]), parts)


def _keep_awq(parts: Parts) -> GroupedTensor:
    codes, zeros = _in_order(parts["qweight"]), _in_order(parts["qzeros"])
    return GroupedTensor(_bytes(codes), parts["scales"].T.contiguous(), _bytes(zeros))


def _in_order(packed: Tensor) -> Tensor:
    numbers = unpacked_bits(packed, 4, dim=1)
    return numbers.view(len(numbers), -1, 8)[..., _ORDER].reshape(numbers.shape)


_UNUSED = ("input_scale", "input_zero_point", "output_scale", "k_scale", "v_scale", "input_global_scale")
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def compressed_scheme(own: ConfigFields) -> Scheme:
    """Return the scheme of a quantization_config; all its groups must be packed alike."""
    kind = own.text("format")
    if kind in ("int-quantized", "float-quantized", "naive-quantized"):
        return Scheme(
            f"compressed-tensors, {kind}",
            "weight",
            ("weight", "weight_scale"),
            ("weight_zero_point", *_UNUSED),
            unpack_rows,
            _keep_rows,
        )
    if kind == "mxfp4-pack-quantized":
        return replace(mxfp4_scheme(own), extra=_UNUSED)
    if kind != "pack-quantized":
        raise own.unsupported(f"compressed-tensors' format {kind!r}")
    bits = _bits(own)
    return Scheme(
        f"compressed-tensors, {bits} bits",
        "weight_packed",
        ("weight_packed", "weight_scale"),
        ("weight_shape", "weight_zero_point", "weight_g_idx", *_UNUSED),
        lambda parts: unpack_words(parts, bits),
        lambda parts: _keep_words(parts) if bits == 4 else None,
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


def unpack_words(parts: Parts, bits: int) -> Tensor:
    """Unpack compressed-tensors' levels, eight of 4 bits in an int32, with a scale per group of columns."""
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


def _keep_words(parts: Parts) -> GroupedTensor | None:
    codes = unpacked_bits(parts["weight_packed"], 4, dim=1)
    if (shape := parts.get("weight_shape")) is not None:
        codes = codes[: int(shape[0]), : int(shape[1])]
    if parts.get("weight_g_idx") is not None:
        return None
    zero = parts.get("weight_zero_point")
    zeros = None if zero is None else unpacked_bits(zero, 4, dim=0)[: len(codes)].to(torch.uint8)
    return GroupedTensor(codes.to(torch.uint8), parts["weight_scale"], zeros)


def _keep_mxfp4(parts: Parts) -> GroupedTensor | None:
    packed, exponents = parts["weight_packed"], parts["weight_scale"]
    if packed.dtype != torch.uint8 or exponents.dtype != torch.uint8:
        return None
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)
    return GroupedTensor(codes, torch.exp2(exponents.float() - 128), None, floats=True)


def _unpack_mxfp4(parts: Parts) -> Tensor:
    """Unpack two numbers per byte, low nibble first, with a power-of-two scale per 32."""
    packed, exponents = parts["weight_packed"], parts["weight_scale"]
    if packed.dtype != torch.uint8 or exponents.dtype != torch.uint8:
        raise ValueError(f"it is stored in {packed.dtype} and {exponents.dtype}, not in bytes")
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1).long()  # [out, in]
    values = _E2M1[codes & 7] * (1 - 2 * (codes >> 3))
    powers: Tensor = torch.exp2(exponents.float() - 127)
    return values * spread(powers, values.shape[1])


def mxfp4_scheme(own: ConfigFields) -> Scheme:
    needed = ("weight_packed", "weight_scale")
    return Scheme("MXFP4", "weight_packed", needed, (), _unpack_mxfp4, _keep_mxfp4)


SCHEMES = {
    "mxfp4": mxfp4_scheme,
    "gptq": gptq_scheme,
    "awq": awq_scheme,
    "compressed-tensors": compressed_scheme,
    "fp8": fp8_scheme,
}
"""Readers by `quant_method`."""


def scheme_of(fields: ConfigFields) -> Scheme | None:
    """Return the scheme of a model's matrices; None: plain floats."""
    section = fields.get("quantization_config") or fields.get("compression_config")
    if section is None:
        return None
    if not isinstance(section, Mapping):
        raise fields.malformed("quantization_config", "an object")
    own = ConfigFields(section, fields.origin)
    method = own.text("quant_method")
    if method not in SCHEMES:
        raise CheckpointError(
            f"{fields.origin}: weights quantised by {method[:60]!r} are not supported; use one of "
            f"{', '.join(SCHEMES)}, the unquantised model or a GGUF file"
        )
    return SCHEMES[method](own)


def packed_matrices(names: Iterable[str], scheme: Scheme | None) -> dict[str, dict[str, str]]:
    """Return tensor name -> its parts (suffix -> stored name); a plain tensor has only the suffix ""."""
    present = set(names)
    parts_of: dict[str, dict[str, str]] = {}
    taken: set[str] = set()
    if scheme is not None:
        for name in sorted(present):
            stem, _, last = name.rpartition(".")
            if last != scheme.marker or not all(f"{stem}.{part}" in present for part in scheme.needed):
                continue
            known = (*scheme.needed, *scheme.extra)
            parts = {part: f"{stem}.{part}" for part in known if f"{stem}.{part}" in present}
            parts_of[f"{stem}.weight"] = parts
            taken |= set(parts.values())
    return parts_of | {name: {"": name} for name in present - taken}


def packed_stacks(parts_of: Mapping[str, dict[str, str]]) -> dict[str, dict[str, str]]:
    """Return the parts of all tensors, with blocks and scales of stacked experts as parts of one tensor."""
    found = dict(parts_of)
    for name in parts_of:
        stem = name.removesuffix("_blocks")
        if stem != name and f"{stem}_scales" in found:
            blocks, scales = found.pop(name), found.pop(f"{stem}_scales")
            found[stem] = {"weight_packed": blocks[""], "weight_scale": scales[""]}
    return found


def unpacked(scheme: Scheme, parts: Parts, name: str, path: Path) -> Tensor:
    try:
        return scheme.unpack(parts)
    except (RuntimeError, ValueError, IndexError) as error:  # inconsistent parts
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(
            f"{path}: tensor {name} cannot be read ({reason}); the file is damaged, get it again"
        ) from None
