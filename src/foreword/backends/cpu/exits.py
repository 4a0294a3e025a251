"""Early exits on the CPU kernels: the target's first layers on its own KV rows, then one with rows of its own."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from foreword.backends.cpu.kv_store import CpuKvStore
from foreword.backends.interface import HeadCall, HeadOutput
from foreword.kv.states import as_array

if TYPE_CHECKING:
    from foreword.kernels import _native


@dataclass
class CpuExit:
    """One exit; its threads are the decoder's."""

    decoder: "_native.Decoder"  # the target's first layers and the exit's own
    vocab_size: int
    rows: str  # name of its own KV rows
    weight_bytes: int  # of its own layer

    def draft(self, call: HeadCall) -> HeadOutput:
        """Keep rows, or run rows that read their tokens, in one native call."""
        wanted, store = call.rows, call.store
        if not isinstance(store, CpuKvStore):
            raise ValueError("the KV store was made for another backend")
        states = None if wanted.are_own else as_array(wanted.features)
        logits = torch.empty((len(wanted.arrays.logit_rows), self.vocab_size), dtype=torch.float32)
        kind = store.spec.index(self.rows)
        self.decoder.exit(store.native, kind, wanted.arrays, wanted.starts, states, logits.numpy())
        return HeadOutput(logits, logits.new_empty(len(logits), 0))
