"""Attention over paged KV in plain torch: the reference that every kernel must equal."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from foreword.models.batch import ForwardBatch


@dataclass(frozen=True)
class RequestView:
    """What the rows of one request look at during a pass; the same for every layer."""

    rows: slice  # of the batch
    slots: Tensor  # int64 [kv rows], physical rows in logical order
    visible: Tensor  # bool [rows, kv rows]


def request_views(batch: ForwardBatch, page_size: int, device: torch.device) -> list[RequestView]:
    """Turn block tables, prefix lengths and ancestor masks into gathers and masks. `batch` is on the CPU."""
    starts = batch.row_starts.tolist()
    views = []
    for request, kv_len in enumerate(batch.kv_lens.tolist()):
        rows = slice(starts[request], starts[request + 1])
        logical = torch.arange(kv_len)
        pages = batch.block_tables[request].long()
        slots = pages[logical // page_size] * page_size + logical % page_size
        visible = _visible(batch.prefix_lens[rows], batch.ancestor_masks[rows], kv_len)
        views.append(RequestView(rows, slots.to(device), visible.to(device)))
    return views


def _visible(prefix_lens: Tensor, masks: Tensor, kv_len: int) -> Tensor:
    """Which of `kv_len` logical KV rows each batch row sees: bool [rows, kv_len]."""
    behind = torch.arange(kv_len) - prefix_lens.long().unsqueeze(1)  # [rows, kv_len]; < 0 inside the prefix
    word, bit = behind.clamp(min=0) // 64, behind.clamp(min=0) % 64
    in_reach = (behind >= 0) & (word < masks.shape[1])
    words = masks.gather(1, word.clamp(max=masks.shape[1] - 1))
    return (behind < 0) | (in_reach & ((words >> bit) & 1).bool())


def paged_attention(queries: Tensor, keys: Tensor, values: Tensor, views: list[RequestView]) -> Tensor:
    """Softmax attention of every row over the KV rows that it sees.

    queries [rows, heads, dim]; keys, values [physical rows, kv heads, dim]; returns [rows, heads, dim].
    """
    attended = torch.empty_like(queries)
    for view in views:
        attended[view.rows] = scaled_dot_product_attention(
            queries[view.rows].transpose(0, 1).unsqueeze(0),  # [1, heads, rows, dim]
            keys[view.slots].transpose(0, 1).unsqueeze(0),  # [1, kv heads, kv rows, dim]
            values[view.slots].transpose(0, 1).unsqueeze(0),
            attn_mask=view.visible,
            enable_gqa=True,
        )[0].transpose(0, 1)
    return attended
