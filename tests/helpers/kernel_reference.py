"""Reference of the CPU kernels in plain torch, with the same rounding."""

import torch
from torch import Tensor

PANEL_ROWS = 8
ROTATION = 64


def hadamard(x: Tensor) -> Tensor:
    """Rotate blocks of 64 columns by an orthonormal Hadamard matrix, its own inverse: [..., 64 k]."""
    blocks = x.reshape(*x.shape[:-1], -1, PANEL_ROWS, PANEL_ROWS)
    mixed = _mix_eight(_mix_eight(blocks).transpose(-1, -2)) * 0.125
    return mixed.reshape(x.shape)


def _mix_eight(blocks: Tensor) -> Tensor:
    """Return butterfly sums and differences along the second last dimension of eight."""
    rows = list(blocks.unbind(-2))
    for span in (1, 2, 4):
        for low in range(8):
            if not low & span:
                first, second = rows[low], rows[low + span]
                rows[low], rows[low + span] = first + second, first - second
    return torch.stack(rows, -2)


def grouped(x: Tensor, group: int, rotated: bool) -> Tensor:
    """Return columns in zero-padded groups, rotated if wanted: [rows, groups, group]."""
    padded = torch.nn.functional.pad(x, (0, -x.shape[-1] % group))
    if rotated:
        padded = hadamard(padded)
    return padded.reshape(len(x), -1, group)


def quantize(x: Tensor, group: int, rotated: bool) -> tuple[Tensor, Tensor]:
    """Return 8-bit levels [rows, groups, group] and scales [rows, groups] of float32 rows."""
    values = grouped(x, group, rotated)
    largest = values.abs().amax(-1)
    inverse = torch.where(largest > 0, torch.full_like(largest, 127.0) / largest, 0.0)
    return (values * inverse.unsqueeze(-1)).round(), largest / 127.0


def fused_multiply_add(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Return a * b + c of float32 numbers, rounded once."""
    return (a.double() * b.double() + c.double()).float()


def multiply(
    levels: Tensor, scales: Tensor, x: tuple[Tensor, Tensor], minima: Tensor | None = None
) -> Tensor:
    """Return x W^T for quantised weights [out, groups, group] and inputs from `quantize`: [rows, out].

    An output is a sum over groups in column order; within a group the sum is exact in integers.
    """
    tokens, token_scales = x
    total = torch.zeros(len(tokens), len(levels))
    for g in range(levels.shape[1]):
        dots = (tokens[:, g].double() @ levels[:, g].double().T).float()  # integers below 2^22
        token_scale = token_scales[:, g : g + 1]
        total = fused_multiply_add(dots, scales[:, g] * token_scale, total)
        if minima is not None:
            token_sum = token_scale * tokens[:, g].sum(-1, keepdim=True)
            total = fused_multiply_add(minima[:, g].expand_as(total), token_sum, total)
    return total


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    return torch.nn.functional.silu(gate) * up
