"""Loads weights in the CUDA kernels' formats; layer matrices are packed if the checkpoint or an option says so."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from foreword.backends.choice import BackendChoice
from foreword.backends.cuda.expert_packing import packed_experts
from foreword.backends.cuda.kernels.fp8 import BLOCK, Fp8Weight
from foreword.backends.cuda.kernels.grouped import E2M1, INT4, INT8, GroupedWeight
from foreword.backends.cuda.kernels.mxfp4 import PackedExperts
from foreword.backends.cuda.packed_products import Matrix, PackedWeight, rounded_weight
from foreword.backends.support import require_supported
from foreword.backends.torch.heads import TargetMatrices, load_tensor
from foreword.backends.torch.weights import DecoderWeights, weights_from
from foreword.backends.weight_loader import LayerSource, WeightLoader
from foreword.models.formats.checkpoint import (
    Checkpoint,
    Fp8Tensor,
    GroupedTensor,
    PackedTensor,
    QuantizedTensor,
)
from foreword.models.heads.opening import Head
from foreword.progress import Progress

GROUP = 128
"""Columns per scale of matrices that are rounded to 4 bits here; also the kernels' maximum."""


class RoundedMatrices:
    """A source of tensors that rounds matrices one by one, so that only one is in memory unrounded."""

    def __init__(self, source: LayerSource, quantization: str) -> None:
        """`quantization` is "fp8" or "int4"."""
        self._source, self._quantization = source, quantization
        self.hidden_size = source.hidden_size
        self.tensor, self.floats, self.nothing = source.tensor, source.floats, source.nothing

    def matrix(self, names: Sequence[str]) -> Matrix:
        round_one = rounded_weight if self._quantization == "fp8" else rounded_to_4_bits
        parts = [part for name in names if (part := round_one(self._source.tensor(name))) is not None]
        whole = concatenated(parts) if len(parts) == len(names) else None
        return self._source.matrix(names) if whole is None else whole


class StoredMatrices(RoundedMatrices):
    """A source of tensors that keeps FP8 matrices as they are stored; with "int4", all packed matrices."""

    def __init__(self, source: WeightLoader, device: torch.device, quantization: str) -> None:
        """With `quantization` "auto", other matrices are not rounded."""
        super().__init__(source, quantization)
        self._loader, self._device = source, device

    def matrix(self, names: Sequence[str]) -> Matrix:
        parts = [part for name in names if (part := self._load_stored(name)) is not None]
        whole = concatenated(parts) if len(parts) == len(names) else None
        if whole is None:
            return super().matrix(names) if self._quantization != "auto" else self._source.matrix(names)
        for _ in names:
            self._loader.count()
        return whole

    def experts(self, names: Sequence[Sequence[str]]) -> PackedExperts | None:
        """Return packed experts if they are stored in MXFP4; None: they are not."""
        if self._loader.stored(names[0][0]) is None:
            return None
        stored = ([self._loader.stored(name) for name in expert] for expert in names)
        packed = packed_experts(stored, self._loader.dtype, self._device)
        for _ in (name for expert in names for name in expert if packed is not None):
            self._loader.count()
        return packed

    def _load_stored(self, name: str) -> PackedWeight | None:
        stored = self._loader.stored(name)
        if self._quantization != "int4" and not isinstance(stored, Fp8Tensor):
            return None  # "fp8" rounds the matrix like others; "auto" unpacks it, because bf16 is faster than 4 bits
        packed = None if stored is None else _pack_stored(stored, self._device)
        if packed is not None:
            self._loader.check_finite(name, bool(packed.scales.isfinite().all()))
        return packed


def concatenated(parts: Sequence[PackedWeight]) -> PackedWeight | None:
    """Concatenate the rows of matrices that read the same input; None: their packing differs."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, Fp8Weight):
        fp8_parts = [
            part for part in parts if isinstance(part, Fp8Weight) and part.in_blocks == first.in_blocks
        ]
        are_aligned = all(len(part) % BLOCK == 0 for part in fp8_parts[:-1])
        if len(fp8_parts) < len(parts) or (first.in_blocks and not are_aligned):
            return None
        # As bytes, because torch cannot concatenate 8-bit floats on every device.
        values = torch.cat([part.values.view(torch.uint8) for part in fp8_parts]).view(first.values.dtype)
        return Fp8Weight(values, torch.cat([part.scales for part in fp8_parts]), first.in_blocks)
    grouped_parts = [
        part for part in parts if isinstance(part, GroupedWeight) and _have_same_format(part, first)
    ]
    if len(grouped_parts) < len(parts):
        return None

    def concatenate(name: str) -> Tensor:
        return torch.cat([getattr(part, name) for part in grouped_parts], dim=1)

    return replace(
        first,
        codes=concatenate("codes"),
        scales=concatenate("scales"),
        zeros=None if first.zeros is None else concatenate("zeros"),
        mins=None if first.mins is None else concatenate("mins"),
    )


def _have_same_format(first: GroupedWeight, other: GroupedWeight) -> bool:
    formats = [(part.kind, part.group, part.zeros is None, part.mins is None) for part in (first, other)]
    if formats[0] != formats[1]:
        return False
    orders = [order for order in (first.order, other.order) if order is not None]
    return not orders or (len(orders) == 2 and torch.equal(*orders))


def _pack_stored(stored: PackedTensor | QuantizedTensor, device: torch.device) -> PackedWeight | None:
    """Return a stored matrix on the device in the kernels' layout; None: the kernels cannot read its format."""
    if isinstance(stored, Fp8Tensor):
        return Fp8Weight(stored.values.to(device), stored.scales.to(device).contiguous(), stored.in_blocks)
    if isinstance(stored, GroupedTensor):
        return _grouped(stored, device)
    # Copied if it is read-only (a mapped file), because torch warns about such memory.
    blocks = torch.from_numpy(np.require(stored.data, requirements=("C", "W"))).to(device)
    if stored.kind in SUPER_BLOCKS:
        return SUPER_BLOCKS[stored.kind](blocks)
    width = {"Q4_0": 16, "Q8_0": 32}.get(stored.kind)
    if width is None:
        return None
    by_group = blocks.view(len(blocks), -1, 2 + width).transpose(0, 1)  # [groups, N, bytes]
    scales = by_group[..., :2].contiguous().view(torch.float16).squeeze(-1)
    codes = by_group[..., 2:].contiguous()
    if stored.kind == "Q8_0":
        return GroupedWeight(codes.view(torch.int8), scales, None, None, INT8)
    return GroupedWeight(codes, scales, None, None)


def _grouped(stored: GroupedTensor, device: torch.device) -> GroupedWeight | None:
    columns, groups = stored.codes.shape[1], stored.scales.shape[1]
    size, times = columns // groups, max(1, columns // groups // GROUP)
    if columns % groups or (size not in (32, 64) and size % GROUP):
        return None

    def by_group(numbers: Tensor) -> Tensor:
        return numbers.to(device).repeat_interleave(times, dim=1).T.contiguous()

    return GroupedWeight(
        _pairs(stored.codes.to(device), min(size, GROUP)),
        by_group(stored.scales),
        None if stored.zeros is None else by_group(stored.zeros),
        None if stored.order is None else stored.order.to(device),
        E2M1 if stored.floats else INT4,
    )


def _q4_k(blocks: Tensor) -> GroupedWeight:
    """Convert blocks of 256 entries: two float16, eight scales and minima of 6 bits, 4-bit codes in pairs of 32."""
    rows = len(blocks)
    parts = blocks.view(rows, -1, 144)
    whole, bits = parts[..., :4].contiguous().view(torch.float16).float(), parts[..., 4:16]
    low, high, more = bits[..., :4], bits[..., 4:8], bits[..., 8:]
    scales = torch.cat((low & 63, (more & 15) | (low >> 6) << 4), dim=-1)
    mins = torch.cat((high & 63, (more >> 4) | (high >> 6) << 4), dim=-1)
    halves = parts[..., 16:].reshape(rows, -1, 4, 32)
    codes = torch.stack((halves & 15, halves >> 4), dim=3).view(rows, -1)

    def by_group(numbers: Tensor, index: int) -> Tensor:
        products: Tensor = numbers * whole[..., index : index + 1]
        return products.half().view(rows, -1).T.contiguous()

    return GroupedWeight(_pairs(codes, 32), by_group(scales, 0), None, None, mins=by_group(mins, 1))


def _q6_k(blocks: Tensor) -> GroupedWeight:
    """Convert blocks of 256 entries: the low 4 bits and the high 2 bits of codes, 16 scales of 8 bits, a float16."""
    rows = len(blocks)
    parts = blocks.view(rows, -1, 210)
    low, high = parts[..., :128].reshape(rows, -1, 2, 64), parts[..., 128:192].reshape(rows, -1, 2, 32)
    scales, whole = parts[..., 192:208], parts[..., 208:]
    grouped_parts = torch.cat((low & 15, low >> 4), dim=-1)  # entries 0 to 127 of each half
    twos = torch.cat([high >> shift & 3 for shift in (0, 2, 4, 6)], dim=-1)
    codes = ((grouped_parts | twos << 4).to(torch.int8) - 32).view(rows, -1, 16)
    steps = scales.contiguous().view(torch.int8) * whole.contiguous().view(torch.float16).float()
    by_group = steps.half().view(rows, -1).T.contiguous()
    return GroupedWeight(codes.transpose(0, 1).contiguous(), by_group, None, None, INT8)


SUPER_BLOCKS = {"Q4_K": _q4_k, "Q6_K": _q6_k}
"""Converters of GGUF's blocks of 256 entries, by kind; each block has several groups."""


def _pairs(codes: Tensor, group: int) -> Tensor:
    """Pack codes [N, K] two to a byte, as `GroupedWeight` stores them."""
    halves = codes.view(len(codes), -1, 2, group // 2)
    return (halves[:, :, 0] | halves[:, :, 1] << 4).transpose(0, 1).contiguous()


def rounded_to_4_bits(weight: Tensor) -> GroupedWeight | None:
    """Round a matrix [N, K] to integers from -8 to 7 with a scale per group of columns; None: K is not divisible."""
    rows, columns = weight.shape
    size = next((size for size in (GROUP, 64, 32) if columns % size == 0), None)
    if size is None:
        return None
    groups = weight.view(rows, -1, size).float()
    scales = groups.abs().amax(-1).clamp(min=1e-6) / 7.5
    codes = ((groups / scales.unsqueeze(-1)).round().clamp(-8, 7) + 8).to(torch.uint8).view(rows, columns)
    return GroupedWeight(_pairs(codes, size), scales.T.contiguous().half(), None, None)


def load_matrix(head: Head, name: str, target: TargetMatrices, quantization: str) -> Matrix:
    """Load a head's tensor. Matrices stored in 8 bits stay packed; with `quantization` "fp8", others are rounded."""
    is_matrix = name.endswith(("_proj.weight", "fc.weight", "lm_head.weight"))
    stored = head.packed_int8(name) if is_matrix and quantization != "none" else None
    if (
        stored is not None
        and stored.group in (16, 32, 64, GROUP)
        and stored.levels.shape[1] % stored.group == 0
    ):
        levels = stored.levels.to(target.device)
        by_group = levels.view(len(levels), -1, stored.group).transpose(0, 1).contiguous()
        return GroupedWeight(by_group, stored.scales.to(target.device).T.contiguous(), None, None, INT8)
    tensor = load_tensor(head, name, target)
    return rounded_weight(tensor) if is_matrix and quantization == "fp8" else tensor


def load_packed(
    checkpoint: Checkpoint, choice: BackendChoice, device: torch.device, progress: Progress | None = None
) -> DecoderWeights[Matrix]:
    """Load a decoder's weights; embedding, output matrix and norms have the choice's dtype."""
    require_supported(checkpoint.config)
    loader = WeightLoader(checkpoint, choice.torch_dtype, device, progress)
    if choice.quantization == "none":
        return weights_from(loader, checkpoint.config)
    return weights_from(StoredMatrices(loader, device, choice.quantization), checkpoint.config)
