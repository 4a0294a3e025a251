"""A draft while it grows, level by level."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from foreword.acceptance.rules.drawn import Drawn
from foreword.acceptance.transfer import HostCopy
from foreword.drafters.model.tree_shape import Shape, fixed_shape
from foreword.speculation.draft import ROOT, DeviceTokens, Draft
from foreword.speculation.drafting import Ask
from foreword.structured.state import Path


class GrowingTree:
    """Nodes so far and the newest level, whose followers are looked for next."""

    def __init__(self, ask: Ask, width: int = 1) -> None:
        """Every level keeps its `width` best nodes; 1 is a chain."""
        self.request = ask.request
        self.width = width
        self._ask = ask
        self.tokens: list[int] = []
        self._parents: list[int] = []
        self._drawn: list[Drawn | None] = []
        self._scores = {ROOT: 0.0}
        self.frontier: list[int] = [ROOT]
        self.places: list[int] = [0]  # of the frontier's nodes in a shape that was fixed before
        self.depth = 0
        self._on_device: Draft | None = None  # a chain whose tokens are on a device
        self.is_cold = False  # a pass for it compiled or captured something

    @property
    def is_done(self) -> bool:
        """Whether no further level fits or nothing is left to follow."""
        full = len(self.tokens) >= self._ask.max_nodes or self.depth >= self._ask.max_depth
        return full or not self.frontier

    @property
    def most_nodes(self) -> int:
        return self._ask.max_nodes

    @property
    def most_levels(self) -> int:
        return self._ask.max_depth

    def shape(self) -> Shape:
        """That of a tree which is drawn: fixed before anything is."""
        return fixed_shape(self.width, self.most_nodes, self.most_levels)

    def score(self, node: int) -> float:
        """How promising a node is; higher is better, the root is 0."""
        return self._scores[node]

    def grow(self, level: Sequence[tuple[float, int, int, Drawn | None]]) -> None:
        """Add the best of (score, parent, token, what it was drawn from) that fit."""
        room = min(self._ask.max_nodes - len(self.tokens), self.width)
        chosen = sorted(level, key=lambda node: -node[0])[:room]
        self.frontier = list(range(len(self.tokens), len(self.tokens) + len(chosen)))
        for score, parent, token, drawn in chosen:
            self._scores[len(self.tokens)] = score
            self.tokens.append(token)
            self._parents.append(parent)
            self._drawn.append(drawn)
        self.depth += 1

    def stand_for(self, source: HostCopy, places: Sequence[int]) -> None:
        """Where the tokens of a chain are: on a device they stay unread, else -1 ends it."""
        if source.arrived is not None:
            tokens_there = DeviceTokens(source, tuple(places))
            self._on_device = Draft.on_device(tokens_there, len(self.request.tokens), self.request.epoch)
            return
        tokens = [source.numbers[place] for place in places]
        there = tokens.index(-1) if -1 in tokens else len(tokens)
        self.tokens = tokens[:there]
        del self._parents[there:], self._drawn[there:]

    def draft(self) -> Draft:
        """The draft as it stands."""
        if self._on_device is not None:
            return self._on_device
        drawn = tuple(self._drawn) if any(q is not None for q in self._drawn) else ()
        request = self.request
        return Draft(
            tuple(self.tokens),
            tuple(self._parents),
            len(request.tokens),
            request.epoch,
            drawn,
            is_cold=self.is_cold,
        )

    def positions(self) -> npt.NDArray[np.int64]:
        """Where the tokens that follow the frontier would stand, one for each of its nodes."""
        return np.full(len(self.frontier), len(self.request.tokens) + self.depth)

    def paths(self) -> list[Path | None]:
        """The guesses up to each of the frontier's nodes; None where nobody knows what stands before."""
        return [self._path(node) for node in self.frontier]

    def _path(self, node: int) -> Path:
        tokens: list[int] = []
        while node != ROOT:
            tokens.append(self.tokens[node])
            node = self._parents[node]
        return tuple(reversed(tokens))

    def keys(self) -> npt.NDArray[np.uint64]:
        """The rule's noise for the tokens that follow the frontier, one key for each of its nodes."""
        return self.request.sampling.keys(self.positions(), np.arange(len(self.frontier)))
