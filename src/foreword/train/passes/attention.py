"""Attention over concatenated texts without padding, with flash kernels on a GPU and dense products elsewhere."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to the device. To a GPU, copy through page-locked memory, which does not block the host."""
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


_GROUP_KEYS = 128
"""Without a GPU, consecutive short texts are computed together, up to about this number of keys."""


@dataclass(frozen=True)
class Spans:
    """Where each of several concatenated texts begins and ends."""

    bounds: Tensor  # int32 [texts + 1], the first row of each text and the number of rows
    longest: int  # rows of the longest text

    @staticmethod
    def of(lengths: list[int], device: torch.device) -> "Spans":
        bounds = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return Spans(to_device(bounds, device), max(lengths, default=0))

    @property
    def lengths(self) -> list[int]:
        lengths: list[int] = self.bounds.diff().tolist()
        return lengths

    def of_texts(self, first: int, end: int) -> "Spans":
        """Return the spans of the texts `first` .. `end` - 1 alone, beginning at row 0."""
        return Spans.of(self.lengths[first:end], self.bounds.device)


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, queries: Spans, keys: Spans, window: int | None = None
) -> Tensor:
    """Return causal attention within each text. A row attends to itself and the `window` - 1 rows before (None: all).

    Queries are [rows, heads, dim]: all rows of their texts, or the last rows of each text.
    """
    if q.is_cuda:
        return _flash(q, k, v, queries, keys, window)[0]
    by_text = torch.split(k, keys.lengths), torch.split(v, keys.lengths)
    texts = zip(torch.split(q, queries.lengths), *by_text, strict=True)
    return torch.cat([_text_attention(text_q, text_k, text_v, window) for text_q, text_k, text_v in texts])


def chain_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    chain: list[tuple[Tensor, Tensor]],
    queries: Spans,
    keys: Spans,
    window: int | None = None,
) -> Tensor:
    """Return causal attention in which each query also attends to the earlier draft tokens of its chain.

    `chain` has (keys, values) [query rows, kv heads, dim] of each earlier draft token. The window, as in
    `causal_attention`, counts only keys of the text.
    """
    if not chain:
        if q.is_cuda:
            return _FlashChain.apply(q, k, v, None, None, (queries, keys), window)  # type: ignore[no-untyped-call, no-any-return]
        return causal_attention(q, k, v, queries, keys, window)
    chain_keys = torch.stack([key for key, _ in chain], dim=2)  # [rows, kv heads, steps, dim]
    chain_values = torch.stack([value for _, value in chain], dim=2)
    if q.is_cuda:
        return _FlashChain.apply(q, k, v, chain_keys, chain_values, (queries, keys), window)  # type: ignore[no-untyped-call, no-any-return]
    parts = []
    for rows, key_rows, spans in _text_groups(queries, keys):
        scores = _dense_scores(q[rows], k[key_rows], *spans, window)  # [heads, rows, keys]
        chain_scores = _chain_scores(q[rows], chain_keys[rows]).permute(1, 0, 2)  # [heads, rows, steps]
        weights = torch.cat((scores, chain_scores), dim=-1).softmax(-1)
        text_weights, chain_weights = weights[..., : -len(chain)], weights[..., -len(chain) :]
        chain_part = _chain_weighted(chain_weights.permute(1, 0, 2), chain_values[rows])
        parts.append(_weighted(text_weights, v[key_rows]) + chain_part)
    return torch.cat(parts).to(q.dtype)


@dataclass(frozen=True)
class CacheRows:
    """Numbers and lengths of the rows of a static cache [rows, context, ...] with one text per row.

    The constant arrays are made once, since a kernel reads them at every token.
    """

    numbers: Tensor  # int32 [rows]: 0, 1, 2, ...
    ones: Tensor  # int32 [rows]: 1, 1, 1, ...
    lengths: Tensor  # int32 [rows], number of tokens that a query attends to

    @staticmethod
    def of(lengths: Tensor) -> "CacheRows":
        numbers = torch.arange(len(lengths), dtype=torch.int32, device=lengths.device)
        return CacheRows(numbers, torch.ones_like(numbers), lengths.to(torch.int32))


def decode_attention(q: Tensor, k: Tensor, v: Tensor, rows: CacheRows) -> Tensor:
    """Return attention of one query [rows, heads, dim] per row to its visible keys [rows, context, kv heads, dim]."""
    num_rows, context, kv_heads, dim = k.shape
    if q.is_cuda:
        return _paged(q, k, v, rows)
    grouped = q.view(num_rows, kv_heads, -1, dim).float()
    scores = torch.einsum("rhgd,rchd->rhgc", grouped, k.float()) / math.sqrt(dim)
    invisible = torch.arange(context, device=q.device)[None] >= rows.lengths[:, None]
    weights = scores.masked_fill(invisible[:, None, None], -math.inf).softmax(-1)
    return torch.einsum("rhgc,rchd->rhgd", weights, v.float()).to(q.dtype).view(q.shape)


def _paged(q: Tensor, k: Tensor, v: Tensor, rows: CacheRows) -> Tensor:
    """Return attention computed by the engine's kernel, with each row as a page.

    A flash kernel for whole texts processes 64 queries at a time, of which 63 would be unused here.
    """
    from foreword.backends.cuda.kernels.attention import AttentionMetadata, RowTiles, attend

    context = k.shape[1]
    metadata = AttentionMetadata(
        positions=rows.lengths - 1,
        prefix_lens=rows.lengths,
        block_tables=rows.numbers[:, None],
        ancestors=rows.numbers,  # any array: it is not read without trees
        page_size=context,
        has_trees=False,
    )
    tiles = RowTiles(first_rows=rows.numbers, counts=rows.ones, requests=rows.numbers, rows=1)
    return attend(q, k.flatten(0, 1), v.flatten(0, 1), metadata, tiles, torch.empty_like(q), None)


def _window_limits(window: int | None) -> dict[str, int]:
    """Return a window as arguments of the flash kernels, which count the keys before the query's own position."""
    return {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}


def _flash(
    q: Tensor, k: Tensor, v: Tensor, queries: Spans, keys: Spans, window: int | None
) -> tuple[Tensor, Tensor]:
    """Return the output, and each row's log-sum-exp [heads, rows]."""
    out, logsumexp, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, queries.bounds, keys.bounds, queries.longest, keys.longest, 0.0, True, False,
        **_window_limits(window),
    )  # fmt: skip
    return out, logsumexp


class _FlashChain(torch.autograd.Function):
    """Computes flash attention over the text, combined with attention to the chain's keys.

    Given the combined output and log-sum-exp, the kernel's backward pass returns the exact gradient of the text's part.
    """

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        q: Tensor,
        k: Tensor,
        v: Tensor,
        chain_keys: Tensor | None,
        chain_values: Tensor | None,
        spans: tuple[Spans, Spans],
        window: int | None,
    ) -> Tensor:
        out, logsumexp = _flash(q, k, v, *spans, window)
        if chain_keys is not None and chain_values is not None:
            out, logsumexp = _join(q, out, logsumexp, chain_keys, chain_values)
        ctx.save_for_backward(q, k, v, chain_keys, chain_values, out, logsumexp)
        ctx.spans, ctx.window = spans, window
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        q, k, v, chain_keys, chain_values, out, logsumexp = ctx.saved_tensors
        queries, keys = ctx.spans
        grad = grad.contiguous()
        dropout_seed = torch.empty(2, dtype=torch.uint64, device=q.device)  # not read: there is no dropout
        grad_q, grad_k, grad_v = torch.ops.aten._flash_attention_backward(
            grad, q, k, v, out, logsumexp, queries.bounds, keys.bounds, queries.longest, keys.longest,
            0.0, True, dropout_seed, dropout_seed, **_window_limits(ctx.window),
        )  # fmt: skip
        if chain_keys is None:
            return grad_q, grad_k, grad_v, None, None, None, None
        chain_grad_q, grad_chain_keys, grad_chain_values = _chain_backward(
            q, chain_keys, chain_values, out, logsumexp, grad
        )
        return grad_q + chain_grad_q, grad_k, grad_v, grad_chain_keys, grad_chain_values, None, None


def _join(
    q: Tensor, out: Tensor, logsumexp: Tensor, chain_keys: Tensor, chain_values: Tensor
) -> tuple[Tensor, Tensor]:
    """Combine the attention over the text with the attention over the chain; return the output and log-sum-exp."""
    chain_scores = _chain_scores(q, chain_keys)  # float32 [rows, heads, steps]
    past = logsumexp.t().unsqueeze(-1)  # [rows, heads, 1]
    joined = torch.cat((past, chain_scores), dim=-1).logsumexp(-1, keepdim=True)
    chain_part = _chain_weighted((chain_scores - joined).exp(), chain_values)
    return (out * (past - joined).exp() + chain_part).to(q.dtype), joined.squeeze(-1).t().contiguous()


def _chain_backward(
    q: Tensor, chain_keys: Tensor, chain_values: Tensor, out: Tensor, logsumexp: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, chain keys and chain values through the attention over the chain."""
    # Sums of products are faster than 100,000 tiny matrix products.
    kv_heads = chain_keys.shape[1]
    queries, grads = _grouped(q, kv_heads), _grouped(grad, kv_heads)  # [rows, kv heads, group, 1, dim]
    # [rows, kv heads, 1, steps, dim]
    keys, values = chain_keys.float().unsqueeze(2), chain_values.float().unsqueeze(2)
    scale = 1 / math.sqrt(q.shape[-1])
    weights = (_chain_scores(q, chain_keys) - logsumexp.t().unsqueeze(-1)).exp()  # [rows, heads, steps]
    weights = weights.view(*queries.shape[:3], -1, 1)
    delta = (grads * _grouped(out, kv_heads)).sum(-1, keepdim=True)
    grad_scores = weights * ((grads * values).sum(-1, keepdim=True) - delta) * scale
    grad_q = (grad_scores * keys).sum(3).view(q.shape)
    grad_keys, grad_values = (grad_scores * queries).sum(2), (weights * grads).sum(2)
    return grad_q.to(q.dtype), grad_keys.to(q.dtype), grad_values.to(q.dtype)


def _chain_scores(q: Tensor, chain_keys: Tensor) -> Tensor:
    """Return the scores of each row with the keys of its chain, float32 [rows, heads, steps]."""
    products = _grouped(q, chain_keys.shape[1]) * chain_keys.float().unsqueeze(2)
    return products.sum(-1).view(*q.shape[:2], -1) / math.sqrt(q.shape[-1])


def _chain_weighted(weights: Tensor, chain_values: Tensor) -> Tensor:
    """Return the weighted sum of each row's chain values, float32 [rows, heads, dim]; weights [rows, heads, steps]."""
    rows, heads, steps = weights.shape
    kv_heads, dim = chain_values.shape[1], chain_values.shape[3]
    grouped = weights.reshape(rows, kv_heads, heads // kv_heads, steps, 1)
    return (grouped * chain_values.float().unsqueeze(2)).sum(3).view(rows, heads, dim)


def _grouped(rows: Tensor, kv_heads: int) -> Tensor:
    """Return `rows` [rows, heads, dim] with heads grouped by KV head, float32 [rows, kv heads, group, 1, dim]."""
    return rows.float().view(len(rows), kv_heads, -1, 1, rows.shape[-1])


def _text_attention(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """Return causal attention within one text; the queries are its last rows. Without a GPU."""
    is_visible = None
    if window is not None or len(q) < len(k):
        positions = torch.arange(len(k))
        distance = positions[len(k) - len(q) :, None] - positions
        is_visible = (distance >= 0) & (distance < (window or len(k)))
    queries, keys, values = (tensor.transpose(0, 1)[None] for tensor in (q, k, v))  # [1, heads, rows, dim]
    attended: Tensor = scaled_dot_product_attention(
        queries, keys, values, attn_mask=is_visible, is_causal=is_visible is None, enable_gqa=True
    )
    return attended[0].transpose(0, 1)


def _text_groups(queries: Spans, keys: Spans) -> Iterator[tuple[slice, slice, tuple[Spans, Spans]]]:
    """Yield groups of consecutive texts with about `_GROUP_KEYS` keys each: query rows, key rows, (query, key) spans.

    Dense scores are also computed between different texts, and then masked. Therefore groups are small.
    """
    query_bounds, key_bounds = queries.bounds.tolist(), keys.bounds.tolist()
    first = 0
    for end in range(1, len(key_bounds)):
        is_last = end == len(key_bounds) - 1
        if key_bounds[end] - key_bounds[first] < _GROUP_KEYS and not is_last:
            continue
        yield (
            slice(query_bounds[first], query_bounds[end]),
            slice(key_bounds[first], key_bounds[end]),
            (queries.of_texts(first, end), keys.of_texts(first, end)),
        )
        first = end


def _dense_scores(q: Tensor, k: Tensor, queries: Spans, keys: Spans, window: int | None = None) -> Tensor:
    """Return the scores, float32 [heads, query rows, key rows]; -inf for invisible keys."""
    rows, heads, dim = q.shape
    grouped = q.view(rows, k.shape[1], -1, dim).float()
    scores = torch.einsum("rhgd,chd->hgrc", grouped, k.float()) / math.sqrt(dim)
    query_text, query_position = _positions(queries, keys)
    key_text, key_position = _positions(keys, keys)
    distance = query_position[:, None] - key_position[None]
    is_visible = (query_text[:, None] == key_text[None]) & (distance >= 0)
    if window is not None:
        is_visible &= distance < window
    return scores.reshape(heads, rows, -1).masked_fill(~is_visible, -math.inf)


def _positions(spans: Spans, keys: Spans) -> tuple[Tensor, Tensor]:
    """Return, for each row in `spans`, the index of its text and its position in that text.

    `keys` has all rows of each text, `spans` the same or only the last rows of each.
    """
    lengths = spans.bounds.diff().long()
    text = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    rows_before = keys.bounds.diff().long() - lengths  # rows of each text before its rows in `spans`
    position = torch.arange(len(text)) - spans.bounds[:-1].long()[text] + rows_before[text]
    return text, position


def _weighted(weights: Tensor, v: Tensor) -> Tensor:
    """Return the weighted sum of values, float32 [rows, heads, dim]; weights [heads, rows, keys]."""
    heads, rows, count = weights.shape
    grouped = weights.view(v.shape[1], -1, rows, count)
    return torch.einsum("hgrc,chd->rhgd", grouped, v.float()).reshape(rows, heads, -1)
