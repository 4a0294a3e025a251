"""Format-independent description of a draft head."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from foreword.models.config import LayerSpec, NormSpec, RopeSpec

Shapes = Mapping[str, tuple[int, ...]]

TABLES = ("d2t", "t2d", "token_map")
"""Integer tensors: the token mapping of a reduced vocabulary."""

DRAFTERS_OWN = ("mask_hidden",)
"""Tensors that only the drafter reads."""

MARKOV = ("markov_head.markov_w1", "markov_head.markov_w2")
"""DSpark's Markov matrices: embedding of the previous token, and its projection to logits."""

CONFIDENCE = "confidence_head.proj"
"""DSpark's acceptance estimate."""


class Join(Enum):
    """Combination of token embedding and features into the first layer's input."""

    CONCAT = "concat"  # EAGLE-3: concatenated for the attention; the features are the residual stream
    FUSED = "fused"  # EAGLE-1, MTP: projected by one matrix into the residual stream
    CONTEXT = "context"  # DFlash: rows attend to the features and read only their token
    NONE = "none"  # Medusa: no token is read


@dataclass(frozen=True)
class HeadSpec:
    """A head on the target's hidden states; most are small decoders.

    A row is computed from token t and the features of position t - 1 (DFlash: t), and predicts the token after t.
    """

    kind: str  # method
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    norm: NormSpec
    rope: RopeSpec
    vocab_size: int  # of the target that it was made for
    draft_vocab_size: int  # draft vocabulary
    target_hidden_size: int
    num_taps: int  # number of concatenated hidden states of the target
    # Tapped layers: the residual stream after this many layers. None: defaults by the target's depth.
    boundaries: tuple[int, ...] | None
    reads_normed: bool  # the single tap is after the final norm
    join: Join
    shapes: Shapes  # used tensors by speculators' names; missing ones are the target's or unused
    norm_before_residual: bool = False  # the residual stream starts with the normalised features
    norm_output: bool = False  # its own states are normalised
    interleaved: bool = False  # rotated pairs are adjacent in the stored weights
    norms_minus_one: bool = False  # norm weights are stored minus one
    hidden_first: bool = False  # the stored `fc.weight` reads features before the embedding
    mask_token_id: int | None = None  # placeholder token of heads that draft several positions at once
    block_size: int = 0  # DFlash: rows per block, the newest token's and masks
    is_causal: bool = False  # DFlash: rows of a block see only earlier ones
    anchor_drafts: bool = (
        False  # DFlash: a row predicts the token after it; False: the token in its mask's place
    )
    num_heads: int = 0  # Medusa: number of heads
    blocks_per_head: int = 0  # Medusa: residual blocks per head

    @property
    def feature_width(self) -> int:
        return self.num_taps * self.target_hidden_size

    @property
    def is_plain(self) -> bool:
        """Return whether its layers are llama-style."""
        is_usual_rope = self.rope.rotary_dim is None and self.rope.magnitude == 1
        return is_usual_rope and all(
            layer.mlp.experts is None and layer.attention.latent is None and not layer.attention.gated
            for layer in self.layers
        )

    def has(self, name: str) -> bool:
        return name in self.shapes
