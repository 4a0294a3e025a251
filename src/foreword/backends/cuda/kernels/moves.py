"""Copies KV rows: the moves that commits have left pending."""

import triton
import triton.language as tl
from torch import Tensor

from foreword.kernels.launching import kernel


@kernel()
def _copy_rows(
    memory, copies, buffer, row_stride, layer_stride, layers,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, WRITES: tl.constexpr,
):  # fmt: skip
    """Copy one row of one layer from memory to the buffer; WRITES: from the buffer to memory."""
    copy, layer = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < WIDTH
    row = tl.load(copies + 2 * copy + (1 if WRITES else 0)).to(tl.int64)
    at = memory + layer * layer_stride + row * row_stride + columns
    buffer_at = buffer + (copy * layers + layer) * WIDTH + columns
    if WRITES:
        tl.store(at, tl.load(buffer_at, mask=mask), mask=mask)
    else:
        tl.store(buffer_at, tl.load(at, mask=mask), mask=mask)


def move_rows(memory: Tensor, copies: Tensor) -> None:
    """Copy rows of memory [layers, physical rows, kv heads, dim]; `copies` is int32 [copies, 2], (from, to).

    All rows are read before any is written.
    """
    layers, _, kv_heads, dim = memory.shape
    width = kv_heads * dim
    if width == 0:  # the values of latent rows
        return
    buffer = memory.new_empty((len(copies), layers, width))
    for writes in (False, True):
        _copy_rows[(len(copies), layers)](
            memory, copies, buffer, memory.stride(1), memory.stride(0), layers,
            WIDTH=width, BLOCK=triton.next_power_of_2(width), WRITES=writes,
        )  # fmt: skip
