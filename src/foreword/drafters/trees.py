"""Drafts that grow level by level: chains, trees of a draft model, and trees of a head."""

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from foreword.acceptance.rules.trees import Drawn
from foreword.acceptance.transfer import HostCopy
from foreword.speculation.draft import ROOT, DeviceTokens, Draft
from foreword.speculation.drafting import DraftTask
from foreword.structured.state import Path

SIBLING_ACCEPTANCE = 0.7
"""Assumed acceptance of the first sibling, and of each further one if the siblings before it are rejected."""

Shape = tuple[tuple[int, ...], ...]
"""Number of children of each node: [levels][nodes of the previous level]. The first level follows the text."""


@lru_cache(maxsize=256)
def fixed_shape(width: int, max_nodes: int, max_depth: int) -> Shape:
    """Return a shape with `width` nodes per level within the node budget; likely nodes have more children."""
    levels: list[tuple[int, ...]] = []
    nodes_left = max_nodes
    probabilities = [1.0]  # that each node of the newest level is accepted; at first, of the root
    while nodes_left > 0 and len(levels) < max_depth:
        candidates = [  # (-probability, parent), such that the most likely candidates sort first
            (-probability * SIBLING_ACCEPTANCE * (1 - SIBLING_ACCEPTANCE) ** rank, parent)
            for parent, probability in enumerate(probabilities)
            for rank in range(width)
        ]
        chosen = sorted(sorted(candidates)[: min(width, nodes_left)], key=lambda node: node[1])
        child_counts = Counter(parent for _, parent in chosen)
        levels.append(tuple(child_counts[parent] for parent in range(len(probabilities))))
        probabilities = [-negative for negative, _ in chosen]
        nodes_left -= len(chosen)
    return tuple(levels)


class GrowingTree:
    """A draft under construction. The frontier is the nodes of its newest level."""

    def __init__(self, task: DraftTask, width: int = 1) -> None:
        """Create an empty draft, which has at most `width` nodes per level; 1 is a chain."""
        self.request = task.request
        self.width = width
        self.max_nodes, self.max_depth = task.max_nodes, task.max_depth
        self.tokens: list[int] = []
        self._parents: list[int] = []
        self._drawn: list[Drawn | None] = []
        self._scores = {ROOT: 0.0}
        self.frontier: list[int] = [ROOT]
        self.shape_indices: list[int] = [0]  # index of each frontier node in its level of the fixed shape
        self.depth = 0
        self._unread: list[int] = []  # for a chain whose tokens are on a device: their indices there
        self._on_device: Draft | None = None  # the complete chain, if its tokens are on a device
        self.is_cold = False  # whether a pass for it compiled or captured a CUDA graph

    @property
    def is_done(self) -> bool:
        """Whether the limits are reached or the frontier is empty."""
        is_full = len(self.tokens) >= self.max_nodes or self.depth >= self.max_depth
        return is_full or not self.frontier

    def shape(self) -> Shape:
        """Return the shape of a sampled tree, fixed before sampling."""
        return fixed_shape(self.width, self.max_nodes, self.max_depth)

    def score(self, node: int) -> float:
        """Return a node's score; higher is better, the root has 0."""
        return self._scores[node]

    def grow(self, level: Sequence[tuple[float, int, int, Drawn | None]]) -> None:
        """Add a level: the nodes (score, parent, token, distribution) with the best scores, as many as fit."""
        room = min(self.max_nodes - len(self.tokens), self.width)
        first = len(self.tokens)
        self._append(sorted(level, key=lambda node: -node[0])[:room])
        self.frontier = list(range(first, len(self.tokens)))

    def _append(self, level: Sequence[tuple[float, int, int, Drawn | None]]) -> None:
        for score, parent, token, drawn in level:
            self._scores[len(self.tokens)] = score
            self.tokens.append(token)
            self._parents.append(parent)
            self._drawn.append(drawn)
        self.depth += 1

    def grow_unread(self, index: int) -> None:
        """Add a token to a chain: the token at this index of the source that `take_unread` will receive."""
        self._unread.append(index)
        self.depth += 1

    def take_unread(self, source: HostCopy) -> None:
        """Set the tokens of a chain that `grow_unread` has grown; -1 ends the chain.

        Tokens that are still being copied stay unread on the device.
        """
        if source.done_event is not None:
            device_tokens = DeviceTokens(source, tuple(self._unread))
            self._on_device = Draft.on_device(device_tokens, len(self.request.tokens), self.request.epoch)
            return
        tokens = [source.numbers[index] for index in self._unread]
        self.tokens = tokens[: tokens.index(-1) if -1 in tokens else len(tokens)]
        self._parents = list(range(ROOT, len(self.tokens) + ROOT))

    def draft(self) -> Draft:
        if self._on_device is not None:
            return self._on_device
        drawn = tuple(self._drawn) if any(q is not None for q in self._drawn) else ()
        length, epoch = len(self.request.tokens), self.request.epoch
        return Draft(self.tokens, self._parents, length, epoch, drawn, is_cold=self.is_cold)

    def positions(self) -> npt.NDArray[np.int64]:
        """Return the positions of the tokens after each frontier node."""
        return np.full(len(self.frontier), len(self.request.tokens) + self.depth)

    def paths(self) -> list[Path | None]:
        """Return the draft tokens on the path to each frontier node, for grammar masks; None: unknown tokens."""
        return [self._path(node) for node in self.frontier]

    def _path(self, node: int) -> Path:
        tokens: list[int] = []
        while node != ROOT:
            tokens.append(self.tokens[node])
            node = self._parents[node]
        return tuple(reversed(tokens))

    def keys(self) -> npt.NDArray[np.uint64]:
        """Return the rule's noise keys for the tokens after each frontier node."""
        return self.request.sampling.keys(self.positions(), np.arange(len(self.frontier)))


class HeadTree(GrowingTree):
    """Keeps all candidate nodes with their scores, and selects those that the head processes.

    A level has the children of the best `width` candidates of the level before. Only candidates among the best
    `max_nodes` get children: a child's score never exceeds its parent's, so other children could not be selected.
    """

    def __init__(self, task: DraftTask, width: int, room: int) -> None:
        """Create an empty draft; `room` is the number of nodes for which there are KV rows."""
        super().__init__(task, width)
        self._room = room
        self.num_read = 0  # nodes with a row in the head's KV, the frontier last
        self._masks = {ROOT: 0}  # node -> bit mask of the rows that the node attends to, including its own
        self.sources = [0]  # for each frontier node, the index of its parent in the previous frontier

    @property
    def is_done(self) -> bool:
        """Whether no remaining candidate could be among the best nodes."""
        is_full = self.width == 1 and len(self.tokens) >= self.max_nodes
        return is_full or self.depth >= self.max_depth or not self.frontier

    def grow(self, level: Sequence[tuple[float, int, int, Drawn | None]]) -> None:
        """Add a level's candidates and select those that the head processes next."""
        first = len(self.tokens)
        self._append(level)
        candidates = list(range(first, len(self.tokens)))
        if len(self.tokens) > self.max_nodes:
            best = set(self._best())
            candidates = [node for node in candidates if node in best]
        index_of = {node: index for index, node in enumerate(self.frontier)}  # in the previous frontier
        count = min(self.width, self._room - self.num_read)
        self.frontier = sorted(candidates, key=lambda node: -self._scores[node])[: max(count, 0)]
        self.sources = [index_of[self._parents[node]] for node in self.frontier]
        for node in self.frontier:
            self._masks[node] = self._masks[self._parents[node]] | 1 << self.num_read
            self.num_read += 1

    def masks(self) -> list[int]:
        """Return the bit mask of attended rows for each frontier node."""
        return [self._masks[node] for node in self.frontier]

    def draft(self) -> Draft:
        """Return the best nodes as a draft, renumbered."""
        nodes = sorted(self._best())
        numbers = {ROOT: ROOT} | {node: number for number, node in enumerate(nodes)}
        drawn = [self._drawn[node] for node in nodes]
        return Draft(
            [self.tokens[node] for node in nodes],
            [numbers[self._parents[node]] for node in nodes],
            len(self.request.tokens),
            self.request.epoch,
            drawn if any(q is not None for q in drawn) else (),
        )

    def _best(self) -> list[int]:
        """Return the best `max_nodes` nodes; of equal scores the earlier node is better, so parents are included."""
        ranked = sorted(range(len(self.tokens)), key=lambda node: (-self._scores[node], node))
        return ranked[: self.max_nodes]


class TreeBuilder:
    """Merges paths of tokens into one tree."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self._nodes: dict[tuple[int, int], int] = {}  # by parent and token

    def add(self, parent: int, token: int, max_nodes: int) -> int | None:
        """Return the child of `parent` with this token, added if missing; None if the tree has `max_nodes` nodes."""
        node = self._nodes.get((parent, token))
        if node is None and len(self.tokens) < max_nodes:
            node = self._nodes[parent, token] = len(self.tokens)
            self.tokens.append(token)
            self.parents.append(parent)
        return node
