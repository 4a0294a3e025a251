"""Converts ancestor masks of draft tokens into lists of KV slots, of node indices, or into their number."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from foreword.backends.batch import MAX_DRAFT_NODES
from foreword.kernels.launching import kernel


@triton.jit
def _ancestors(masks, row, node):
    """Return for each node whether it is an ancestor of the row (1 or 0), and if so its depth."""
    is_ancestor = ((tl.load(masks + row) >> node.to(tl.int64)) & 1).to(tl.int32)
    return is_ancestor, tl.cumsum(is_ancestor, axis=0) - is_ancestor


@kernel(do_not_specialize=("table_width",))
def _ancestor_slots(
    prefix_lens, masks, requests, tables, out, table_width,
    PAGE: tl.constexpr, NODES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, NODES)
    is_ancestor, depth = _ancestors(masks, row, node)
    logical = tl.load(prefix_lens + row) + node
    table = tables + tl.load(requests + row).to(tl.int64) * table_width
    page = tl.load(table + logical // PAGE, mask=is_ancestor != 0, other=0)
    tl.store(out + row * NODES + depth, page * PAGE + logical % PAGE, mask=is_ancestor != 0)


def ancestor_slots(
    prefix_lens: Tensor, masks: Tensor, requests: Tensor, tables: Tensor, page_size: int
) -> Tensor:
    """Return the KV slots of each row's ancestors, in order of depth, int32 [rows, MAX_DRAFT_NODES].

    `requests` [rows] is the index of each row's request.
    """
    out = tables.new_zeros((len(prefix_lens), MAX_DRAFT_NODES))
    _ancestor_slots[(len(prefix_lens),)](
        prefix_lens, masks, requests, tables, out, tables.shape[1], PAGE=page_size, NODES=MAX_DRAFT_NODES
    )
    return out


@kernel()
def _row_indices(prefix_lens, masks, out, NODES: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    is_ancestor, _ = _ancestors(masks, row, tl.arange(0, NODES))
    tl.store(out + row, tl.load(prefix_lens + row) + tl.sum(is_ancestor, axis=0) - 1)


def row_indices(prefix_lens: Tensor, masks: Tensor) -> Tensor:
    """Return the index of each row among the KV rows that it attends to, int32 [rows]; it is the last of them."""
    out = torch.empty_like(prefix_lens)
    _row_indices[(len(prefix_lens),)](prefix_lens, masks, out, NODES=MAX_DRAFT_NODES)
    return out


@kernel()
def _ancestor_nodes(masks, out, NODES: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, NODES)
    is_ancestor, depth = _ancestors(masks, row, node)
    tl.store(out + row * NODES + depth, node, mask=is_ancestor != 0)


def ancestor_nodes(masks: Tensor) -> Tensor:
    """Return the indices of each row's ancestors in its draft, in order of depth, int32 [rows, MAX_DRAFT_NODES]."""
    out = torch.zeros((len(masks), MAX_DRAFT_NODES), dtype=torch.int32, device=masks.device)
    _ancestor_nodes[(len(masks),)](masks, out, NODES=MAX_DRAFT_NODES)
    return out
