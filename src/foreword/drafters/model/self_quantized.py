"""The target's own weights in fewer bits write ahead."""

from dataclasses import dataclass

from foreword.drafters.model.autoregressive import AutoregressiveDrafter, DraftingSize
from foreword.drafters.model.low_bits import LowBitCheckpoint
from foreword.drafters.registry import DrafterKind, Guesses, is_wide
from foreword.drafters.resources import DrafterResources
from foreword.errors import RequestError


@dataclass(frozen=True)
class SelfQuantizedConfig:
    """How coarse the draft is."""

    bits: int = 4  # levels of a weight are 2**bits: 4, 3 or 2
    tree_width: int = 1  # nodes on every level of the draft; 1 is a chain

    def __post_init__(self) -> None:
        if self.bits not in (2, 3, 4):
            raise RequestError(f"speculation: bits must be 2, 3 or 4, not {self.bits}")


def build_self_quantized(config: SelfQuantizedConfig, resources: DrafterResources) -> AutoregressiveDrafter:
    """A coarse copy of the target's layers; embedding, head and last norm are the target's own."""
    coarse = LowBitCheckpoint(resources.checkpoint, config.bits)
    decoder = resources.target.beside(coarse)
    size = DraftingSize(config.tree_width)
    return AutoregressiveDrafter(decoder, resources.vocab_size, size, decoder.layer_bytes)


KIND = DrafterKind(
    "the target's own weights in fewer bits",
    SelfQuantizedConfig,
    build_self_quantized,
    is_wide,
    can_hang=False,
    guesses=Guesses.DRAWN,
    traits=AutoregressiveDrafter.traits,
)
