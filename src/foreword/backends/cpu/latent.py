"""Names of an attention layer's tensors, and the packed weights of latent attention (MLA) in the absorbed form."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from foreword.backends.cpu.packing import TensorPacker
from foreword.models.adapters import MODULES
from foreword.models.config import AttentionSpec

if TYPE_CHECKING:
    from foreword.kernels import _native


class AttentionNames(NamedTuple):
    """Module names of a layer's attention."""

    # Projections of query, key and value; with latent attention, of the query and the row
    inputs: Sequence[str]
    query_norm: str | None  # None: there is no norm
    key_norm: str | None

    @staticmethod
    def of(attention: AttentionSpec) -> "AttentionNames":
        latent = attention.latent
        if latent is None:
            norms = ("self_attn.q_norm", "self_attn.k_norm") if attention.qk_norm else (None, None)
            return AttentionNames(MODULES[:3], *norms)
        row, row_norm = "self_attn.kv_a_proj_with_mqa", "self_attn.kv_a_layernorm"
        if latent.query_rank is None:
            return AttentionNames(("self_attn.q_proj", row), None, row_norm)
        return AttentionNames(("self_attn.q_a_proj", row), "self_attn.q_a_layernorm", row_norm)


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
