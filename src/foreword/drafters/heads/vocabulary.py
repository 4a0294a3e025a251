"""From the tokens that a head can guess to those of the target."""

import torch
from torch import Tensor


class DraftVocabulary:
    """A head's logits over the target's vocabulary: a token that it does not know has no chance."""

    def __init__(self, token_ids: Tensor | None, vocab_size: int, device: torch.device) -> None:
        """`token_ids` are the target's ids of the head's tokens, None: the same; `vocab_size` ids can be drawn."""
        self._vocab_size = vocab_size
        self._ids: Tensor | None = None
        self._columns: Tensor | slice = slice(vocab_size)
        if token_ids is not None:
            known = torch.nonzero(token_ids < vocab_size).flatten()
            self._columns = slice(None) if len(known) == len(token_ids) else known.to(device)
            self._ids = token_ids[known].to(device)

    def spread(self, logits: Tensor) -> Tensor:
        """[rows, draft vocabulary] -> [rows, ids that can be drawn]."""
        own = logits[:, self._columns]
        if self._ids is None:
            return own
        spread = own.new_full((len(own), self._vocab_size), -torch.inf)
        return spread.index_copy_(1, self._ids, own)
