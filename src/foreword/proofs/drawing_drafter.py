"""A drafter that draws chains and trees from a law of its own, with the noise that the request's rule hands it."""

from collections.abc import Sequence

import numpy as np
import torch

from foreword.acceptance.noise import gumbel, key_tensor
from foreword.acceptance.rules.drawn import Drawn, Floats
from foreword.speculation.draft import ROOT, Draft
from foreword.speculation.drafting import Ask, DraftRequest


class DrawingDrafter:
    """Knows nothing of the target: its q after a token is the same every time. Siblings are never equal."""

    def __init__(self, vocab_size: int, shape: int | Sequence[int]) -> None:
        """`shape` of all that it draws: a chain's length, or the parents of a tree's nodes, as in a draft."""
        parents = range(-1, shape - 1) if isinstance(shape, int) else shape
        rng = np.random.default_rng(vocab_size)
        self._laws = rng.dirichlet(np.ones(vocab_size) * 2, vocab_size)
        self._ids = torch.arange(vocab_size)
        self._shape = Draft((0,) * len(parents), tuple(parents))

    def forget(self, request: DraftRequest) -> None:
        """It keeps nothing."""

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        """One drawn draft for every request."""
        return [self._draw(ask) for ask in asks]

    def _draw(self, ask: Ask) -> Draft:
        end = len(ask.request.tokens)
        shape = self._shape.within(ask.max_nodes, ask.max_depth)
        tokens: list[int] = []
        drawn: list[Drawn] = []
        for parent, noise in zip(shape.parents, self._noise(ask.request, shape), strict=True):
            newest = ask.request.tokens[-1] if parent == ROOT else tokens[parent]
            taken = [tokens[node] for node in range(len(tokens)) if shape.parents[node] == parent]
            law = self._laws[newest].copy()
            law[taken] = 0.0
            support = np.flatnonzero(law)
            tokens.append(int(support[np.argmax(np.log(law[support]) + noise[support])]))
            drawn.append(Drawn(support, law[support] / law.sum()))
        return Draft(tuple(tokens), shape.parents, end, ask.request.epoch, tuple(drawn))

    def _noise(self, request: DraftRequest, shape: Draft) -> Floats:
        """[nodes, vocab], the same for all siblings."""
        depths = (*shape.depths(), 0)  # the last for the root
        levels = [depths[parent] for parent in shape.parents]
        branches = [depths[: max(parent, 0)].count(depths[parent]) for parent in shape.parents]
        positions = np.array(levels, np.int64) + len(request.tokens)
        keys = key_tensor(request.sampling.keys(positions, np.array(branches, np.int64)))
        noise: Floats = gumbel(
            keys[:, None].expand(len(keys), len(self._ids)), self._ids.expand(len(keys), -1)
        ).numpy()
        return noise
