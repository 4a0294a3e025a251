"""What a drafter may be made from."""

from collections.abc import Callable
from dataclasses import dataclass, field

from foreword.backends.interface import Decoder
from foreword.cluster.shared_nodes import SharedNodes
from foreword.models.formats.checkpoint import Checkpoint


@dataclass(frozen=True)
class DrafterResources:
    """The target and its files, for drafters that need them."""

    target: Decoder  # the loaded target
    checkpoint: Checkpoint  # its files
    encode: Callable[[str], list[int]]  # text to token ids, without special tokens
    load_decoder: Callable[[Checkpoint], Decoder]  # another model, on the target's device and backend
    vocab_size: int  # ids that the target can draw; a drafter guesses no others
    nodes: SharedNodes = field(default_factory=SharedNodes)  # that drafters made from this are connected to
