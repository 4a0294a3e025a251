"""What a head looks like, whatever file it came from."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from foreword.models.config import LayerSpec, NormSpec, RopeSpec

Shapes = Mapping[str, tuple[int, ...]]

TABLES = ("d2t", "t2d", "token_map")
"""Tensors that are no floats: which tokens a reduced vocabulary has."""

DRAFTERS_OWN = ("mask_hidden",)
"""Tensors that no pass of a head reads: its drafter does."""

MARKOV = ("markov_head.markov_w1", "markov_head.markov_w2")
"""DSpark's matrices: numbers for the token before, and what they say of the next."""

CONFIDENCE = "confidence_head.proj"
"""DSpark's estimate that a draft token will be accepted."""


class Join(Enum):
    """How the embedding of a token and the features before it become the input of the first layer."""

    CONCAT = "concat"  # EAGLE-3: side by side into the attention; the features are the residual stream
    FUSED = "fused"  # EAGLE-1, MTP: through one matrix into the residual stream
    CONTEXT = "context"  # DFlash: never; rows attend to the features and read their token alone
    NONE = "none"  # Medusa: no token is read


@dataclass(frozen=True)
class HeadSpec:
    """A head over the target's hidden states; most run as a small decoder of their own.

    At row t such a one reads token t and the features of position t - 1, and says what follows token t.
    """

    kind: str  # the method that runs it
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    norm: NormSpec
    rope: RopeSpec
    vocab_size: int  # of the target that it was made for
    draft_vocab_size: int  # tokens that it can draft
    target_hidden_size: int
    num_taps: int  # hidden states of the target that make up the features
    # Which: the residual stream after so many layers. None: the usual ones, which depend on the target's depth.
    boundaries: tuple[int, ...] | None
    reads_normed: bool  # the one tap is the last layer, after the final norm
    join: Join
    shapes: Shapes  # every tensor that is used, by speculators' names; what is missing is the target's, or not done
    norm_before_residual: bool = False  # the residual stream starts with the normed features
    norm_output: bool = False  # what it feeds itself is normed
    interleaved: bool = False  # rotated pairs stand side by side in the stored weights
    norms_minus_one: bool = False  # the weights of norms are stored less one
    hidden_first: bool = False  # a fused `fc.weight` is stored for features before the embedding
    mask_token_id: int | None = None  # stands for unknown tokens, in heads that draft many at once
    block_size: int = 0  # DFlash: rows of one block, the newest token's and masks
    is_causal: bool = False  # DFlash: rows of a block do not see those after them
    anchor_drafts: bool = False  # DFlash: a row drafts what follows it; else, what a mask stands for
    num_heads: int = 0  # Medusa: tokens that it drafts, each by a head of its own
    blocks_per_head: int = 0  # Medusa: residual blocks of each

    @property
    def feature_width(self) -> int:
        """Numbers of the target's features of one token."""
        return self.num_taps * self.target_hidden_size

    @property
    def is_plain(self) -> bool:
        """Whether its layers are of the llama kind."""
        turned_alike = self.rope.rotary_dim is None and self.rope.magnitude == 1
        return turned_alike and all(
            layer.mlp.experts is None and layer.attention.latent is None and not layer.attention.gated
            for layer in self.layers
        )

    def has(self, name: str) -> bool:
        """Whether the head has this tensor of its own."""
        return name in self.shapes
