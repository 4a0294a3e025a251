"""Latent attention (MLA) in plain torch, over compressed rows.

Absorbed form: queries are projected to the space of the rows, and the result is projected back. This is less work per
KV row, so it is used for few queries. Naive form: keys and values of all heads are expanded first, which is less work
per query.
"""

import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention

from foreword.backends.torch.attention import GroupView, PagedKv, add_shares
from foreword.backends.torch.norms import rms_norm
from foreword.backends.torch.weights import LatentWeights, LayerWeights
from foreword.models.config import AttentionSpec, LatentSpec
from foreword.models.rope import rotate

Queries = tuple[Tensor, Tensor]
"""The unrotated and the rotated dimensions of queries, [requests, query rows, heads, dimensions]."""


def latent_attention(
    spec: AttentionSpec, layer: LayerWeights, qkv: Tensor, cos_sin: tuple[Tensor, Tensor], kv: PagedKv
) -> Tensor:
    """Store this pass's latent rows; return attention over all visible rows, [rows, heads * value dim]."""
    latent, weights = spec.latent, layer.latent
    assert latent is not None
    assert weights is not None
    assert layer.key_norm is not None
    widths = [latent.query_rank or spec.query_width, latent.kv_rank, latent.rope_dim]
    query, rows, shared = torch.split(qkv, widths, dim=-1)
    if weights.query is not None and layer.query_norm is not None:
        query = linear(rms_norm(query, layer.query_norm, latent.eps), weights.query)
    heads = query.view(len(qkv), spec.num_heads, spec.head_dim)
    unrotated, rotated = torch.split(heads, [latent.nope_dim, latent.rope_dim], dim=-1)
    rotated = rotate(rotated, *cos_sin)
    stored = torch.cat(
        (rms_norm(rows, layer.key_norm, latent.eps), rotate(shared.unsqueeze(1), *cos_sin)[:, 0]), -1
    )
    kv.keys[kv.slots] = stored.unsqueeze(1)
    attended = qkv.new_zeros((len(qkv) + 1, spec.num_heads, latent.value_dim))
    scale = spec.head_dim**-0.5 if spec.scale is None else spec.scale
    if kv.shares is not None:
        projected = torch.einsum("rhd,hdc->rhc", unrotated, weights.keys)
        for view in kv.views:
            add_shares(kv.shares, torch.cat((projected, rotated), dim=-1), kv.keys, view, scale)
    for view in kv.views:
        attend = absorbed if is_absorption_cheaper(latent, view.rows.shape[1]) else naive
        clamped_rows = view.rows.clamp(max=len(qkv) - 1)
        attended[view.rows] = attend(
            latent,
            weights,
            (unrotated[clamped_rows], rotated[clamped_rows]),
            kv.keys[view.slots][:, :, 0],
            view,
            scale,
        )
    return attended[: len(qkv)].flatten(1)


def is_absorption_cheaper(latent: LatentSpec, query_rows: int) -> bool:
    """Return whether the absorbed form is less work for this many query rows per request."""
    # Multiplications per KV row and head that the naive form needs to expand keys and values
    expansion = latent.kv_rank * (latent.nope_dim + latent.value_dim)
    # Multiplications that the absorbed form needs in addition, per KV row, head and query: its rows are wider
    wider_rows = 2 * latent.kv_rank - latent.nope_dim - latent.value_dim
    return query_rows * wider_rows <= expansion


def absorbed(
    latent: LatentSpec, weights: LatentWeights, queries: Queries, rows: Tensor, view: GroupView, scale: float
) -> Tensor:
    """Return attention in absorbed form, [requests, query rows, heads, value dim].

    `rows` are the visible latent rows, [requests, kv rows, row dim].
    """
    projected = torch.einsum("rphd,hdc->rhpc", queries[0], weights.keys)
    attended = scaled_dot_product_attention(
        torch.cat((projected, queries[1].transpose(1, 2)), dim=-1),  # [requests, heads, query rows, row dim]
        rows.unsqueeze(1),
        rows[..., : latent.kv_rank].unsqueeze(1),
        attn_mask=view.visible.unsqueeze(1),
        scale=scale,
        enable_gqa=True,
    )
    return torch.einsum("rhpc,hvc->rphv", attended, weights.values)


def naive(
    latent: LatentSpec, weights: LatentWeights, queries: Queries, rows: Tensor, view: GroupView, scale: float
) -> Tensor:
    """Return attention in naive form; arguments and result as in `absorbed`."""
    compressed, rotated = torch.split(rows, [latent.kv_rank, latent.rope_dim], dim=-1)
    keys = torch.einsum("rkc,hdc->rhkd", compressed, weights.keys)
    shared = rotated.unsqueeze(1).expand(-1, keys.shape[1], -1, -1)
    return scaled_dot_product_attention(
        torch.cat(queries, dim=-1).transpose(1, 2),  # [requests, heads, query rows, head dim]
        torch.cat((keys, shared), dim=-1),
        torch.einsum("rkc,hvc->rhkv", compressed, weights.values),
        attn_mask=view.visible.unsqueeze(1),
        scale=scale,
    ).transpose(1, 2)
