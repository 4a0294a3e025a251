"""Packs the weights of latent attention (MLA) for the absorbed form: attention over compressed rows."""

from typing import TYPE_CHECKING

import torch

from foreword.backends.cpu.packing import TensorPacker
from foreword.models.config import AttentionSpec

if TYPE_CHECKING:
    from foreword.kernels import _native


def load_latent(packer: TensorPacker, attention: AttentionSpec, prefix: str) -> "_native.Latent | None":
    """Return the matrices between a layer's input projections and its output projection; None: not latent."""
    from foreword.kernels import _native

    if (latent := attention.latent) is None:
        return None
    query = None
    if latent.query_rank is not None:
        query = packer.matrices([f"{prefix}self_attn.q_b_proj.weight"], biased=False)[0]
    stored = packer.vector(f"{prefix}self_attn.kv_b_proj.weight")
    assert stored is not None
    expanding = stored.view(attention.num_heads, -1, latent.kv_rank)
    keys, values = torch.split(expanding, [latent.nope_dim, latent.value_dim], dim=1)
    return _native.Latent(
        kv_rank=latent.kv_rank,
        rope_dim=latent.rope_dim,
        nope_dim=latent.nope_dim,
        value_dim=latent.value_dim,
        eps=latent.eps,
        query=query,
        keys=[packer.pack(head.T.contiguous()) for head in keys],
        values=[packer.pack(head.contiguous()) for head in values],
    )
