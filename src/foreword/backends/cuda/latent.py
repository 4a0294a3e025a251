"""Latent attention in the absorbed form: queries are projected to the latent space, and results are projected back.

The same form serves prompts, so that a row has the same bits in every pass.
"""

import torch
from torch import Tensor

from foreword.backends.cuda.kernels.attention import AttentionMetadata, ScoreRule
from foreword.backends.cuda.kernels.latent import per_head, store_latent
from foreword.backends.cuda.kernels.linear import Tile
from foreword.backends.cuda.kernels.rows import add_norm
from foreword.backends.cuda.packed_products import Matrix
from foreword.backends.cuda.products import Products
from foreword.backends.cuda.upload import UploadedPass, tiled_attention
from foreword.backends.torch.weights import LayerWeights
from foreword.models.config import AttentionSpec
from foreword.models.rope import CosSin


class LatentAttention:
    """Latent attention of one layer, between the projection of its input and the output projection."""

    def __init__(self, spec: AttentionSpec, layer: LayerWeights[Matrix], products: Products) -> None:
        assert spec.latent is not None
        assert layer.latent is not None
        assert layer.key_norm is not None
        self._spec, self._latent, self._products = spec, spec.latent, products
        self._query, self._query_norm, self._key_norm = layer.latent.query, layer.query_norm, layer.key_norm
        self._keys = layer.latent.keys.transpose(1, 2).contiguous()  # [heads, kv rank, nope]
        self._values = layer.latent.values
        self._rule = ScoreRule(spec.scale or spec.head_dim**-0.5, spec.softcap, spec.window)

    def attend(
        self,
        qkv: Tensor,
        cos_sin: CosSin,
        keys: Tensor,
        values: Tensor,
        metadata: AttentionMetadata,
        uploaded: UploadedPass,
    ) -> Tensor:
        """Store the pass's latent rows, and return attention over all visible rows, [rows, heads * value dim]."""
        spec, latent, rows = self._spec, self._latent, len(qkv)
        width = latent.query_rank or spec.query_width
        query, latent_row = qkv[:, :width], qkv[:, width:]
        if self._query is not None and self._query_norm is not None:  # the query is compressed, too
            compressed = query.contiguous()
            normed = torch.empty_like(compressed)
            query = self._products(
                add_norm(compressed, None, self._query_norm, latent.eps, normed), self._query, None
            )
        queries = qkv.new_empty((rows, spec.num_heads, latent.row_dim))
        store_latent(
            query, latent_row, self._key_norm, cos_sin, uploaded.batch.slots, latent.eps, keys, queries
        )
        query_heads = query.view(rows, spec.num_heads, spec.head_dim)
        # Small tiles for decoding, large ones for prompts; both sum in the same order.
        tile = Tile(16, 64, 128, swapped=True) if rows <= 16 else Tile(64, 64, 64, swapped=True)
        per_head(query_heads[..., : latent.nope_dim], self._keys, queries, tile)
        attended = qkv.new_empty((rows, spec.num_heads, latent.kv_rank))
        tiled_attention(queries, keys, values, metadata, uploaded.tiles, self._rule, attended)
        out = qkv.new_empty((rows, spec.num_heads, latent.value_dim))
        return per_head(attended, self._values, out, tile).flatten(1)
