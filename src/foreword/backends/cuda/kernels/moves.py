"""Copies KV rows: the moves that commits have left pending."""

import triton
import triton.language as tl
from torch import Tensor

from foreword.kernels.launching import kernel


@kernel()
def _gather(
    memory, copies, buffer, row_stride, layer_stride, layers, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    copy, layer = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < WIDTH
    source = memory + layer * layer_stride + tl.load(copies + 2 * copy).to(tl.int64) * row_stride
    tl.store(
        buffer + (copy * layers + layer) * WIDTH + columns, tl.load(source + columns, mask=mask), mask=mask
    )


@kernel()
def _scatter(
    memory, copies, buffer, row_stride, layer_stride, layers, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    copy, layer = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < WIDTH
    target = memory + layer * layer_stride + tl.load(copies + 2 * copy + 1).to(tl.int64) * row_stride
    numbers = tl.load(buffer + (copy * layers + layer) * WIDTH + columns, mask=mask)
    tl.store(target + columns, numbers, mask=mask)


def move_rows(memory: Tensor, copies: Tensor) -> None:
    """Copy rows of memory [layers, physical rows, kv heads, dim]; `copies` is int32 [copies, 2], (from, to).

    All rows are read before any is written.
    """
    layers, _, kv_heads, dim = memory.shape
    width = kv_heads * dim
    if width == 0:  # the values of latent rows
        return
    buffer = memory.new_empty((len(copies), layers, width))
    for copy in (_gather, _scatter):
        copy[(len(copies), layers)](
            memory, copies, buffer, memory.stride(1), memory.stride(0), layers,
            WIDTH=width, BLOCK=triton.next_power_of_2(width),
        )  # fmt: skip
