"""A pretend target whose logits are a pure function of the tokens that a row sees."""

import random
from collections.abc import Sequence

import torch

from foreword.models.batch import ForwardBatch, ForwardOutput


class HistoryTarget:
    """Keeps (token, position) in its KV rows and reads every row's history back through pages and masks.

    A wrong slot, page, mask, position or row move changes a history, and with it the text.
    """

    def __init__(self, vocab_size: int = 11, page_size: int = 16) -> None:
        self.vocab_size = vocab_size
        self.page_size = page_size
        self.memory: dict[int, tuple[int, int]] = {}
        self.passes = 0

    def logits_after(self, history: Sequence[int]) -> torch.Tensor:
        """What a model that has read exactly this says: float32 [vocab]."""
        rng = random.Random(repr(list(history[-6:])) + str(len(history)))
        return torch.tensor([rng.gauss(0.0, 2.0) for _ in range(self.vocab_size)])

    def verify(self, batch: ForwardBatch) -> ForwardOutput:
        self.passes += 1
        self.memory.update(
            {target: self.memory[source] for source, target in batch.kv_copies.tolist()}  # all at once
        )
        rows = zip(batch.slots.tolist(), batch.token_ids.tolist(), batch.positions.tolist(), strict=True)
        self.memory.update({slot: (token, position) for slot, token, position in rows})
        wanted = [self.logits_after(self._history(batch, row)) for row in batch.logit_rows.tolist()]
        return ForwardOutput(torch.stack(wanted) if wanted else torch.empty(0, self.vocab_size), {})

    def _history(self, batch: ForwardBatch, row: int) -> list[int]:
        request = int(torch.searchsorted(batch.row_starts, row, right=True)) - 1
        prefix = int(batch.prefix_lens[row])
        mask = int(batch.ancestor_masks[row, 0]) & (1 << 64) - 1
        visible = [*range(prefix), *(prefix + bit for bit in range(64) if mask >> bit & 1)]
        assert visible[-1] < int(batch.kv_lens[request])
        seen = [self.memory[self._slot(batch, request, logical)] for logical in visible]
        assert [position for _, position in seen] == list(range(len(seen))), "a row sees a wrong position"
        assert seen[-1] == (int(batch.token_ids[row]), int(batch.positions[row])), "a row must see itself"
        return [token for token, _ in seen]

    def _slot(self, batch: ForwardBatch, request: int, logical: int) -> int:
        page = int(batch.block_tables[request, logical // self.page_size])
        return page * self.page_size + logical % self.page_size
