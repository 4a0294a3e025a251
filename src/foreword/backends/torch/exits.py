"""Early exits in plain torch: the target's first layers on its own KV rows, then one with rows of its own."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from foreword.backends.interface import HeadCall, HeadOutput

if TYPE_CHECKING:
    from foreword.backends.torch.decoder import TorchDecoder


@dataclass
class TorchExit:
    """One exit."""

    decoder: "TorchDecoder"  # the target's first layers and the exit's own
    rows: str  # name of its own KV rows
    weight_bytes: int  # of its own layer

    def draft(self, call: HeadCall) -> HeadOutput:
        """Keep rows, or run rows that read their tokens."""
        logits = self.decoder.exit_logits(call.rows, self.rows, call.store)
        return HeadOutput(logits, logits.new_empty(len(logits), 0))
