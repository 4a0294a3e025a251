"""A draft: a tree of guessed tokens for one request."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from foreword.acceptance.rules.drawn import Drawn
from foreword.acceptance.rules.trees import DraftTrees

ROOT = -1
"""Parent of a node that follows the committed prefix directly."""


@dataclass(frozen=True)
class Draft:
    """Guessed tokens in topological order, and the state of the request that they were guessed for.

    A chain is a tree of width one; plain decoding is the empty draft. A node whose token was drawn carries
    what it was drawn from; a chosen one (a lookup, an argmax, a top-k expansion) carries None.
    """

    tokens: tuple[int, ...] = ()  # [nodes]
    parents: tuple[int, ...] = ()  # [nodes], index of an earlier node or ROOT
    committed_len: int = 0  # tokens the request had when the draft was made
    epoch: int = 0  # the request's epoch then; preemption advances it
    drawn: tuple[Drawn | None, ...] = ()  # [nodes], or empty where every token was chosen

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.parents):
            raise ValueError(f"{len(self.tokens)} tokens but {len(self.parents)} parents")
        for node, parent in enumerate(self.parents):
            if not ROOT <= parent < node:
                raise ValueError(f"node {node} has parent {parent}: parents come before their children")
        if self.drawn and len(self.drawn) != len(self.tokens):
            raise ValueError(f"{len(self.tokens)} tokens but {len(self.drawn)} distributions")
        for node, q in enumerate(self.drawn):
            if q is not None and q.prob(self.tokens[node]) <= 0:
                raise ValueError(f"token {self.tokens[node]} of node {node} cannot be drawn from its own q")

    @staticmethod
    def chain(tokens: Sequence[int], committed_len: int, epoch: int = 0) -> "Draft":
        """A draft in which every token follows the one before it."""
        return Draft(tuple(tokens), tuple(range(ROOT, len(tokens) - 1)), committed_len, epoch)

    def __len__(self) -> int:
        return len(self.tokens)

    def depths(self) -> tuple[int, ...]:
        """Depth of every node; the first level is 1."""
        return _depths(self.parents)

    def ancestor_masks(self) -> tuple[int, ...]:
        """Per node, a bit for every node on the way from the root to it, itself included."""
        return _ancestor_masks(self.parents)


# Most drafts are chains, so that a few shapes come back at every step.
@lru_cache(maxsize=1024)
def _depths(parents: tuple[int, ...]) -> tuple[int, ...]:
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent == ROOT else depths[parent] + 1)
    return tuple(depths)


@lru_cache(maxsize=1024)
def _ancestor_masks(parents: tuple[int, ...]) -> tuple[int, ...]:
    masks: list[int] = []
    for node, parent in enumerate(parents):
        masks.append((0 if parent == ROOT else masks[parent]) | 1 << node)
    return tuple(masks)


def stack(drafts: Sequence[Draft]) -> DraftTrees:
    """Drafts as the flat arrays that acceptance judges."""
    drawn = [draft.drawn or (None,) * len(draft) for draft in drafts]
    return DraftTrees.stack([draft.tokens for draft in drafts], [draft.parents for draft in drafts], drawn)
