"""Description of a draft head, independent of file formats.

*Features* are the target's hidden states that a head reads: for each position, the states of all taps, concatenated.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from foreword.models.config import LayerSpec, NormSpec, RopeSpec

Shapes = Mapping[str, tuple[int, ...]]

TABLES = ("d2t", "t2d", "token_map")
"""Integer tensors with the mapping between the draft vocabulary and the target's."""

DRAFTER_TENSORS = ("mask_hidden",)
"""Tensors that the drafter loads itself; backends do not load them."""

MARKOV = ("markov_head.markov_w1", "markov_head.markov_w2")
"""DSpark's Markov matrices: the embedding of the previous token, and the projection to logits."""

CONFIDENCE = "confidence_head.proj"  # DSpark's projection to the estimated acceptance of a draft token


CONVOLUTIONS = ("attention_conv", "mlp_conv")
"""DFlash2's convolutions of a layer: around its attention, and around its MLP."""

SELECTOR = (
    "candidate_selector.predecessor_codebook",
    "candidate_selector.successor_codebook",
    "candidate_selector.hidden_projection.weight",
)
"""DFlash2's selector: vectors of the previous token and of the candidates, and the projection of a position's state."""


@dataclass(frozen=True)
class BlockConvolution:
    """Sizes of DFlash2's convolutions over the rows of a block, whose weights depend on the row."""

    taps: int  # rows that one row reads: its own, and those before it in the block
    group: int  # adjacent channels with the same generated weights


@dataclass(frozen=True)
class PathSelector:
    """Settings of DFlash2's selector, which scores the best candidates of a position given the previous token."""

    candidates: int  # number of candidates per position
    logit_scale: float = 1.0
    logit_cap: float | None = None  # bound of the scaled logits, by tanh; None: none
    embedding_scale: float = 1.0  # of the token embeddings that a block starts from


class Join(Enum):
    """How token embedding and features become the input of the first layer."""

    CONCAT = "concat"  # EAGLE-3: concatenated for the attention; the features are the residual stream
    FUSED = "fused"  # EAGLE-1, MTP: projected by one matrix into the residual stream
    CONTEXT = "context"  # DFlash: a row reads only its token, and attends to the features
    NONE = "none"  # Medusa: only features are read


@dataclass(frozen=True)
class HeadSpec:
    """A head on the target's hidden states; most heads are small decoders.

    A row is computed from the token at position t and the features of position t - 1, and predicts the token at t + 1.
    In DFlash heads the features are those of position t, and a row may predict the token at t: see `anchor_drafts`.
    """

    kind: str  # drafting method
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    norm: NormSpec
    rope: RopeSpec
    vocab_size: int  # vocabulary size of the target
    draft_vocab_size: int
    target_hidden_size: int
    num_taps: int  # number of hidden states of the target that are concatenated
    # Tapped boundaries: i stands for the residual stream after i layers. None: defaults by the target's depth.
    boundaries: tuple[int, ...] | None
    reads_normed: bool  # the head reads one tap, after the target's final norm
    join: Join
    # Shapes of the head's tensors, by canonical name: that of the speculators library, or Foreword's for Medusa. A head
    # without embedding or output matrix uses the target's.
    shapes: Shapes
    norm_before_residual: bool = False  # the residual stream starts with the normalised features
    norm_output: bool = False  # the head's output states, features of the next draft token, are normalised
    interleaved: bool = False  # rotated pairs are adjacent in the stored weights
    norms_minus_one: bool = False  # weights of norms are stored minus one
    # In the stored `fc.weight`, the columns for features precede those for the embedding.
    hidden_first: bool = False
    # Token that stands for unknown tokens, in heads that draft several positions at once
    mask_token_id: int | None = None
    block_size: int = 0  # DFlash: rows per block, the first for the newest token, all others for mask tokens
    is_causal: bool = False  # DFlash: a row of a block attends only to earlier rows of the block
    # DFlash: whether the row of the newest token (the anchor) drafts. True: every row predicts the token of the next
    # position. False: only the rows of masks predict, each the token of its own position.
    anchor_drafts: bool = False
    convolution: BlockConvolution | None = None  # DFlash2
    selector: PathSelector | None = None  # DFlash2
    window: int | None = None  # number of newest positions that a row attends to, its own included; None: all
    num_heads: int = 0  # Medusa: number of heads
    blocks_per_head: int = 0  # Medusa: residual blocks per head

    @property
    def feature_width(self) -> int:
        return self.num_taps * self.target_hidden_size

    @property
    def is_plain(self) -> bool:
        """Return whether all layers are Llama layers: no experts, latent or gated attention, partial or scaled RoPE."""
        is_usual_rope = self.rope.rotary_dim is None and self.rope.magnitude == 1
        return is_usual_rope and all(
            layer.mlp.experts is None and layer.attention.latent is None and not layer.attention.gated
            for layer in self.layers
        )

    def has(self, name: str) -> bool:
        return name in self.shapes
