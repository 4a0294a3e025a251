"""EAGLE-2's tree while it grows: everything that was seen is ranked, and the best nodes are guessed."""

from collections.abc import Sequence

from foreword.acceptance.rules.drawn import Drawn
from foreword.drafters.model.guessed_tree import GrowingTree
from foreword.speculation.draft import ROOT, Draft
from foreword.speculation.drafting import Ask


class HeadTree(GrowingTree):
    """Candidates of all levels with their scores, and the nodes that the head has read or reads next.

    Every level the best `width` candidates are followed. A node's score is never above its parent's, so a
    candidate that is not among the best `max_nodes` now need not be followed. A chain is the case of width 1.
    """

    def __init__(self, ask: Ask, width: int, room: int) -> None:
        """`room` is how many nodes the head has KV rows for."""
        super().__init__(ask, width)
        self._max_nodes, self._max_depth = ask.max_nodes, ask.max_depth
        self._room = room
        self.num_read = 0  # nodes with a row in the head's KV, the frontier last
        self._masks = {ROOT: 0}  # node -> a bit for every row that it sees, its own included
        self.sources = [0]  # for every node of the frontier, its parent's place in the frontier before

    @property
    def is_done(self) -> bool:
        """Whether nothing that could be among the best nodes is left to follow."""
        is_full = self.width == 1 and len(self.tokens) >= self._max_nodes
        return is_full or self.depth >= self._max_depth or not self.frontier

    def grow(self, level: Sequence[tuple[float, int, int, Drawn | None]]) -> None:
        """Add all candidates of a level and choose which of them the head reads next."""
        first = len(self.tokens)
        for score, parent, token, drawn in level:
            self._scores[len(self.tokens)] = score
            self.tokens.append(token)
            self._parents.append(parent)
            self._drawn.append(drawn)
        self.depth += 1
        candidates = list(range(first, len(self.tokens)))
        if len(self.tokens) > self._max_nodes:
            best = set(self._best())
            candidates = [node for node in candidates if node in best]
        before = {node: place for place, node in enumerate(self.frontier)}
        most = min(self.width, self._room - self.num_read)
        self.frontier = sorted(candidates, key=lambda node: -self._scores[node])[: max(most, 0)]
        self.sources = [before[self._parents[node]] for node in self.frontier]
        for node in self.frontier:
            self._masks[node] = self._masks[self._parents[node]] | 1 << self.num_read
            self.num_read += 1

    def masks(self) -> list[int]:
        """Which rows of the head's KV behind the text each node of the frontier sees."""
        return [self._masks[node] for node in self.frontier]

    def draft(self) -> Draft:
        """The best nodes of all."""
        nodes = sorted(self._best())
        numbers = {ROOT: ROOT} | {node: number for number, node in enumerate(nodes)}
        drawn = tuple(self._drawn[node] for node in nodes)
        request = self.request
        return Draft(
            tuple(self.tokens[node] for node in nodes),
            tuple(numbers[self._parents[node]] for node in nodes),
            len(request.tokens),
            request.epoch,
            drawn if any(q is not None for q in drawn) else (),
        )

    def _best(self) -> list[int]:
        """The best `max_nodes` nodes; of equals the earlier, so that a node never comes without its parent."""
        return sorted(range(len(self.tokens)), key=lambda node: (-self._scores[node], node))[
            : self._max_nodes
        ]
