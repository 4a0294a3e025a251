"""A pretend target whose logits are a pure function of the tokens that a row sees."""

import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace

import torch

from foreword.backends.batch import ForwardBatch, ForwardOutput, resolve_ids


class HistoryTarget:
    """Keeps (token, position) in its KV rows and reads every row's history back through pages and masks.

    A wrong slot, page, mask, position or row move changes a history, and with it the text.
    """

    device = torch.device("cpu")

    def __init__(self, vocab_size: int = 11, page_size: int = 16) -> None:
        self.vocab_size = vocab_size
        self.page_size = page_size
        self.memory: dict[int, tuple[int, int]] = {}
        self.passes = 0

    def logits_after(self, history: Sequence[int]) -> torch.Tensor:
        """What a model that has read exactly this says: float32 [vocab]."""
        rng = random.Random(repr(list(history[-6:])) + str(len(history)))
        return torch.tensor([rng.gauss(0.0, 2.0) for _ in range(self.vocab_size)])

    def forward(self, batch: ForwardBatch, store: object = None) -> ForwardOutput:
        self.passes += 1
        if batch.drawn_before is not None:
            batch = replace(batch, token_ids=resolve_ids(batch.token_ids, batch.drawn_before))
        self.memory.update(
            {target: self.memory[source] for source, target in batch.kv_copies.tolist()}  # all at once
        )
        rows = zip(batch.slots.tolist(), batch.token_ids.tolist(), batch.positions.tolist(), strict=True)
        self.memory.update({slot: (token, position) for slot, token, position in rows})
        rows_seen = _RowsSeen(batch)
        wanted = [self.logits_after(self._history(rows_seen, row)) for row in batch.logit_rows.tolist()]
        return ForwardOutput(torch.stack(wanted) if wanted else torch.empty(0, self.vocab_size), {})

    def _history(self, seen_by: "_RowsSeen", row: int) -> list[int]:
        request = bisect_right(seen_by.row_starts, row) - 1
        visible = seen_by.visible(row)
        assert visible[-1] < seen_by.kv_lens[request], "a row sees behind its request's end"
        table, size = seen_by.block_tables[request], self.page_size
        seen = [self.memory[table[logical // size] * size + logical % size] for logical in visible]
        assert [position for _, position in seen] == list(range(len(seen))), "a row sees a wrong position"
        assert seen[-1] == (seen_by.token_ids[row], seen_by.positions[row]), "a row must see itself"
        return [token for token, _ in seen]


class _RowsSeen:
    """The arrays of a batch that say what a row sees, as lists."""

    def __init__(self, batch: ForwardBatch) -> None:
        self.row_starts: list[int] = batch.row_starts.tolist()
        self.prefix_lens: list[int] = batch.prefix_lens.tolist()
        self.masks: list[int] = batch.ancestor_masks[:, 0].tolist()
        self.kv_lens: list[int] = batch.kv_lens.tolist()
        self.block_tables: list[list[int]] = batch.block_tables.tolist()
        self.token_ids: list[int] = batch.token_ids.tolist()
        self.positions: list[int] = batch.positions.tolist()

    def visible(self, row: int) -> list[int]:
        """Logical KV rows."""
        prefix, mask = self.prefix_lens[row], self.masks[row]
        return [*range(prefix), *(prefix + bit for bit in range(64) if mask >> bit & 1)]
