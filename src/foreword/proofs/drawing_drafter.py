"""A drafter that draws chains from a law of its own, with the noise that the request's rule hands it."""

from collections.abc import Sequence

import numpy as np
import torch

from foreword.acceptance.noise import gumbel, key_tensor
from foreword.acceptance.rules.drawn import Drawn
from foreword.speculation.draft import Draft
from foreword.speculation.drafting import Ask, DraftRequest


class DrawingDrafter:
    """Knows nothing of the target: its q after a token is the same every time."""

    def __init__(self, vocab_size: int, length: int) -> None:
        rng = np.random.default_rng(vocab_size)
        weights = rng.dirichlet(np.ones(vocab_size) * 2, vocab_size)
        self._drawn = [Drawn(np.arange(vocab_size), row) for row in weights]
        self._ids = torch.arange(vocab_size)
        self._length = length

    def forget(self, request: DraftRequest) -> None:
        """It keeps nothing."""

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        """One drawn chain for every request."""
        return [self._chain(ask) for ask in asks]

    def _chain(self, ask: Ask) -> Draft:
        length = min(self._length, ask.max_depth, ask.max_nodes)
        end = len(ask.request.tokens)
        keys = key_tensor(ask.request.sampling.keys(np.arange(end, end + length)))
        noise = gumbel(keys[:, None].expand(length, len(self._ids)), self._ids.expand(length, -1)).numpy()
        newest, tokens, drawn = ask.request.tokens[-1], [], []
        for row in noise:
            q = self._drawn[newest]
            newest = int(np.argmax(np.log(q.probs) + row))
            tokens.append(newest)
            drawn.append(q)
        return Draft.chain(tokens, end, ask.request.epoch, drawn)
