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
        depths = shape.depths()
        tokens: list[int] = []
        drawn: list[Drawn] = []
        for parent in shape.parents:
            newest = ask.request.tokens[-1] if parent == ROOT else tokens[parent]
            level = 0 if parent == ROOT else depths[parent]
            branch = 0 if parent == ROOT else depths[:parent].count(level)
            taken = [tokens[node] for node in range(len(tokens)) if shape.parents[node] == parent]
            law = self._laws[newest].copy()
            law[taken] = 0.0
            support = np.flatnonzero(law)
            with np.errstate(divide="ignore"):  # log 0: what is taken is not drawn again
                tokens.append(int(np.argmax(np.log(law) + self._noise(ask.request, end + level, branch))))
            drawn.append(Drawn(support, law[support] / law.sum()))
        return Draft(tuple(tokens), shape.parents, end, ask.request.epoch, tuple(drawn))

    def _noise(self, request: DraftRequest, position: int, branch: int) -> Floats:
        """[vocab], the same for all siblings."""
        key = key_tensor(request.sampling.keys(np.array([position]), branch))
        noise: Floats = gumbel(key.expand(len(self._ids)), self._ids).numpy()
        return noise
