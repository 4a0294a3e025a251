"""Copies KV rows: the pending moves of commits."""

import triton
import triton.language as tl
from torch import Tensor

from foreword.kernels.launching import kernel


@kernel()
def _gather(memory, copies, kept, row_stride, layer_stride, layers, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    copy, layer = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    there = columns < WIDTH
    source = memory + layer * layer_stride + tl.load(copies + 2 * copy).to(tl.int64) * row_stride
    tl.store(
        kept + (copy * layers + layer) * WIDTH + columns, tl.load(source + columns, mask=there), mask=there
    )


@kernel()
def _scatter(
    memory, copies, kept, row_stride, layer_stride, layers, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    copy, layer = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    there = columns < WIDTH
    target = memory + layer * layer_stride + tl.load(copies + 2 * copy + 1).to(tl.int64) * row_stride
    numbers = tl.load(kept + (copy * layers + layer) * WIDTH + columns, mask=there)
    tl.store(target + columns, numbers, mask=there)


def move_rows(memory: Tensor, copies: Tensor) -> None:
    """Copy rows (from, to) of memory [layers, physical rows, kv heads, dim]; all are read before any is written."""
    layers, _, kv_heads, dim = memory.shape
    width = kv_heads * dim
    if width == 0:  # the values of latent rows
        return
    kept = memory.new_empty((len(copies), layers, width))
    for copy in (_gather, _scatter):
        copy[(len(copies), layers)](
            memory, copies, kept, memory.stride(1), memory.stride(0), layers,
            WIDTH=width, BLOCK=triton.next_power_of_2(width),
        )  # fmt: skip
