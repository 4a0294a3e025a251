"""Early exits in plain torch: the target's first layers on its own KV rows, then one with rows of its own."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from foreword.backends.interface import HeadInput, HeadOutput, KvStore

if TYPE_CHECKING:
    from foreword.backends.torch.decoder import TorchDecoder


@dataclass
class TorchExit:
    """One exit."""

    decoder: "TorchDecoder"  # the target's first layers and the exit's own
    rows: str  # name of its own KV rows
    weight_bytes: int  # of its own layer

    def forward(self, wanted: HeadInput, store: KvStore) -> HeadOutput:
        """Rows that are kept, or rows that read their tokens."""
        logits = self.decoder.exit_logits(wanted, self.rows, store)
        return HeadOutput(logits, logits.new_empty(len(logits), 0))
