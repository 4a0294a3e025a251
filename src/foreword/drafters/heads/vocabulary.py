"""From the tokens that a head can guess to those of the target."""

import math

import torch
from torch import Tensor

from foreword.backends.batch import Ints


class DraftVocabulary:
    """A head's logits over the target's vocabulary: a token that it does not know has no chance."""

    def __init__(self, token_ids: Tensor | None, vocab_size: int, device: torch.device) -> None:
        """`token_ids` are the target's ids of the head's tokens, None: the same; `vocab_size` ids can be drawn."""
        self.vocab_size = self._width = vocab_size
        self._memory = torch.empty(0, device=device)
        self._ids: Tensor | None = None
        self._lost: Tensor | None = None  # columns of the head's whose ids cannot be drawn
        self._tokens: list[int] | None = None  # the ids on the host
        self.token_ids: Ints | None = None  # and as an array
        if token_ids is not None:
            self._ids, self._tokens = token_ids.to(device), token_ids.tolist()
            self.token_ids = token_ids.to("cpu", torch.int32).numpy()
            self._width = max(vocab_size, max(self._tokens) + 1)
            lost = torch.nonzero(token_ids >= vocab_size).flatten()
            self._lost = lost.to(device) if len(lost) else None

    def likeliest(self, logits: Tensor) -> list[int]:
        """The target's id of every row's largest logit, the lowest of equals; -1 where that is no number."""
        own = self._drawable(logits)
        if own.device.type == "cpu":
            # In numpy: every level pays for this, and torch's calls take ten times as long.
            rows = own.numpy()
            columns = rows.argmax(axis=1).tolist()
            highest = [float(row[column]) for row, column in zip(rows, columns, strict=True)]
        else:
            values, places = own.max(dim=1)
            columns, highest = places.tolist(), values.tolist()
        tokens = columns if self._tokens is None else [self._tokens[column] for column in columns]
        return [token if math.isfinite(value) else -1 for token, value in zip(tokens, highest, strict=True)]

    def spread(self, logits: Tensor) -> Tensor:
        """[rows, draft vocabulary] -> [rows, ids that can be drawn]; it holds until the next call."""
        own = self._drawable(logits)
        if self._ids is None:
            return own
        # The same columns are written every time: the others need to be filled once.
        if len(self._memory) < len(own):
            self._memory = own.new_full((len(own), self._width), -torch.inf)
        return self._memory[: len(own)].scatter_(1, self._ids.expand(len(own), -1), own)[:, : self.vocab_size]

    def _drawable(self, logits: Tensor) -> Tensor:
        """Without a chance for ids that cannot be drawn."""
        if self._ids is None:
            return logits[:, : self.vocab_size]
        return logits if self._lost is None else logits.index_fill(1, self._lost, -torch.inf)
