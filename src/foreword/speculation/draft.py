"""A draft: a tree of guessed tokens for one request."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from operator import index
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from foreword.acceptance.arrivals import OnItsWay
from foreword.acceptance.rules.drawn import Drawn
from foreword.acceptance.rules.trees import DraftTrees

ROOT = -1
"""Parent of a node that follows the committed prefix directly."""


class NodeColumns(NamedTuple):
    """What a pass is told of the nodes of a draft; not to be written to."""

    depths: NDArray[np.int32]  # [nodes], the first level is 1
    masks: NDArray[np.uint64]  # [nodes], a bit for every node on the way from the root to it, itself included


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
    # [nodes], how sure the drafter is of each, its parent being right, from 0 to 1; or empty: it does not say. To cut
    # drawn nodes by it would bias a text as cutting them by their tokens does.
    confidence: tuple[float, ...] = field(default=(), compare=False)
    is_cold: bool = field(default=False, compare=False)  # the drafter compiled or captured something for it

    def __post_init__(self) -> None:
        # Drafters are anyone's code: arrays and lists of numpy numbers become tuples of plain ones.
        object.__setattr__(self, "tokens", tuple(map(index, self.tokens)))
        object.__setattr__(self, "parents", tuple(map(index, self.parents)))
        object.__setattr__(self, "drawn", tuple(self.drawn))
        object.__setattr__(self, "confidence", tuple(map(float, self.confidence)))
        object.__setattr__(self, "committed_len", index(self.committed_len))
        if self.committed_len < 0:
            raise ValueError(f"a draft for a text of {self.committed_len} tokens")
        if len(self.tokens) != len(self.parents):
            raise ValueError(f"{len(self.tokens)} tokens but {len(self.parents)} parents")
        if (stray := _stray_node(self.parents)) is not None:
            raise ValueError(
                f"node {stray} has parent {self.parents[stray]}: parents come before their children"
            )
        if self.drawn and len(self.drawn) != len(self.tokens):
            raise ValueError(f"{len(self.tokens)} tokens but {len(self.drawn)} distributions")
        if self.confidence and len(self.confidence) != len(self.tokens):
            raise ValueError(f"{len(self.tokens)} tokens but {len(self.confidence)} confidences")
        for node, q in enumerate(self.drawn):
            if q is not None and q.prob(self.tokens[node]) <= 0:
                raise ValueError(f"token {self.tokens[node]} of node {node} cannot be drawn from its own q")

    @staticmethod
    def chain(
        tokens: Sequence[int],
        committed_len: int,
        epoch: int = 0,
        drawn: Sequence[Drawn | None] = (),
        confidence: Sequence[float] = (),
    ) -> "Draft":
        """A draft in which every token follows the one before it."""
        sure = tuple(map(float, confidence))
        if drawn or committed_len < 0 or (sure and len(sure) != len(tokens)):
            return Draft(tuple(tokens), _chain_parents(len(tokens)), committed_len, epoch, tuple(drawn), sure)
        # Lookups make one for every request of every step, and there is nothing else to be checked.
        chain = object.__new__(Draft)
        chain.__dict__.update(
            tokens=tuple(map(index, tokens)),
            parents=_chain_parents(len(tokens)),
            committed_len=index(committed_len),
            epoch=epoch,
            drawn=(),
            confidence=sure,
        )
        return chain

    def __len__(self) -> int:
        return len(self.parents)

    @property
    def pass_ids(self) -> tuple[int, ...]:
        """[nodes], the tokens as a pass is told of them."""
        return self.tokens

    def depths(self) -> tuple[int, ...]:
        """Depth of every node; the first level is 1."""
        return _depths(self.parents)

    @property
    def depth(self) -> int:
        return _depth(self.parents)

    @property
    def is_chain(self) -> bool:
        """Whether no node has siblings."""
        return _is_chain(self.parents)

    def ancestor_masks(self) -> tuple[int, ...]:
        """Per node, a bit for every node on the way from the root to it, itself included."""
        return _ancestor_masks(self.parents)

    def keep(self, wanted: Callable[[int], bool]) -> "Draft":
        """The nodes that are wanted and whose ancestors all are.

        Under every rule but *coupled* a drawn node may be left out only for what was fixed before it was drawn: its
        place, its q, the nodes above it. To leave it out for its token would bias the text.
        """
        kept: dict[int, int] = {ROOT: ROOT}  # node -> its number among those that stay
        for node, parent in enumerate(self.parents):
            if parent in kept and wanted(node):
                kept[node] = len(kept) - 1
        nodes = [node for node in kept if node != ROOT]
        return self if len(nodes) == len(self) else self._only(nodes, kept, self.committed_len)

    def within(self, max_nodes: int, max_depth: int) -> "Draft":
        """At most this many nodes, the first ones, and this many levels."""
        if len(self.parents) <= max_nodes and self.depth <= max_depth:
            return self
        if self.is_chain:
            return self._first(max(min(max_nodes, max_depth), 0))
        depths = self.depths()
        shallow = self.keep(lambda node: depths[node] <= max_depth)
        return shallow.keep(lambda node: node < max_nodes)

    def rebase(self, tokens: Sequence[int]) -> "Draft":
        """What is left of the draft for the same text grown to `tokens`; nothing if it took another way.

        The nodes that the text has passed are behind it, their followers come next. That is exact for drawn nodes
        too: whether one stays depends on the nodes above it and on the text, not on its own token.
        """
        if self.committed_len == len(tokens):
            return self
        if self.is_chain and self.committed_len < len(tokens):
            came = tuple(tokens[self.committed_len :])
            is_along = self.tokens[: len(came)] == came
            return self._after(len(came) if is_along else len(self.tokens), len(tokens))
        node, followed = ROOT, range(self.committed_len, len(tokens))
        for position in followed:
            here = (n for n, parent in enumerate(self.parents) if parent == node)
            found = next((n for n in here if self.tokens[n] == tokens[position]), None)
            if found is None:
                return Draft(committed_len=len(tokens), epoch=self.epoch)
            node = found
        if not followed:
            return Draft(committed_len=len(tokens))
        kept = {node: ROOT}
        for below in range(node + 1, len(self)):
            if self.parents[below] in kept:
                kept[below] = len(kept) - 1
        return self._only([n for n in kept if n != node], kept, len(tokens))

    def _after(self, passed: int, committed_len: int) -> "Draft":
        """A chain without its first nodes, for a text that has come so far."""
        left = object.__new__(Draft)
        left.__dict__.update(
            tokens=self.tokens[passed:],
            parents=self.parents[: max(len(self.parents) - passed, 0)],
            committed_len=committed_len,
            epoch=self.epoch,
            drawn=self.drawn[passed:],
            confidence=self.confidence[passed:],
        )
        return left

    def _first(self, end: int) -> "Draft":
        """The first nodes. All of them were checked when the draft was made; every step cuts drafts."""
        cut = object.__new__(Draft)
        cut.__dict__.update(
            tokens=self.tokens[:end],
            parents=self.parents[:end],
            committed_len=self.committed_len,
            epoch=self.epoch,
            drawn=self.drawn[:end],
            confidence=self.confidence[:end],
        )
        return cut

    def _only(self, nodes: Iterable[int], numbers: dict[int, int], committed_len: int) -> "Draft":
        chosen = list(nodes)
        return Draft(
            tuple(self.tokens[node] for node in chosen),
            tuple(numbers[self.parents[node]] for node in chosen),
            committed_len,
            self.epoch,
            tuple(self.drawn[node] for node in chosen) if self.drawn else (),
            tuple(self.confidence[node] for node in chosen) if self.confidence else (),
        )


class PendingDraft(Draft):
    """Guesses that a device has drawn, or is about to: whoever reads `tokens` waits for it.

    A pass over them is handed over before: it is told where they will stand.
    """

    source: OnItsWay  # int64
    places: tuple[int, ...]  # [nodes], of their tokens in the source
    _pass_ids: tuple[int, ...]
    _tokens: tuple[int, ...] | None  # once somebody has waited for them

    @staticmethod
    def of(
        source: OnItsWay,
        places: Sequence[int],
        committed_len: int,
        epoch: int = 0,
        parents: tuple[int, ...] | None = None,
    ) -> "PendingDraft":
        """Of a chain unless there are `parents`. Its tokens are chosen: nobody has to know what from."""
        draft = object.__new__(PendingDraft)
        draft.__dict__.update(
            source=source,
            places=tuple(places),
            _pass_ids=tuple([-1 - place for place in places]),
            _tokens=None,
            parents=_chain_parents(len(places)) if parents is None else parents,
            committed_len=committed_len,
            epoch=epoch,
            drawn=(),
        )
        return draft

    @property
    def is_cold(self) -> bool:
        """Whether the passes that draw its tokens compiled or captured something."""
        return self.source.is_cold

    @property
    def tokens(self) -> tuple[int, ...]:
        """Where none could be drawn, the id that the pass has in its place."""
        if self._tokens is None:
            found = self.source.numbers
            tokens = [found[place] for place in self.places]
            if min(tokens, default=0) < 0:
                tokens = [max(token, 0) for token in tokens]
            self.__dict__["_tokens"] = tuple(tokens)
        return self._tokens or ()

    @property
    def pass_ids(self) -> tuple[int, ...]:
        return self._pass_ids

    def behind(self, committed_len: int, epoch: int) -> "PendingDraft":
        """The same for a text of which only the device knew how long it would be."""
        draft = object.__new__(PendingDraft)
        draft.__dict__.update(self.__dict__, committed_len=committed_len, epoch=epoch)
        return draft

    def known(self) -> Draft:
        """The same with its tokens."""
        return Draft(self.tokens, self.parents, self.committed_len, self.epoch)

    def _after(self, passed: int, committed_len: int) -> Draft:
        return self.known()._after(passed, committed_len)

    def _first(self, end: int) -> Draft:
        places, parents = self.places[:end], self.parents[:end]
        return PendingDraft.of(self.source, places, self.committed_len, self.epoch, parents)

    def _only(self, nodes: Iterable[int], numbers: dict[int, int], committed_len: int) -> Draft:
        chosen = list(nodes)
        places = [self.places[node] for node in chosen]
        parents = tuple(numbers[self.parents[node]] for node in chosen)
        return PendingDraft.of(self.source, places, committed_len, self.epoch, parents)


# Most drafts are chains, so that a few shapes come back at every step.
@lru_cache(maxsize=1024)
def _stray_node(parents: tuple[int, ...]) -> int | None:
    """The first node whose parent does not come before it."""
    return next((node for node, parent in enumerate(parents) if not ROOT <= parent < node), None)


@lru_cache(maxsize=1024)
def _chain_parents(nodes: int) -> tuple[int, ...]:
    return tuple(range(ROOT, nodes - 1))


@lru_cache(maxsize=1024)
def _depths(parents: tuple[int, ...]) -> tuple[int, ...]:
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent == ROOT else depths[parent] + 1)
    return tuple(depths)


@lru_cache(maxsize=1024)
def _depth(parents: tuple[int, ...]) -> int:
    return max(_depths(parents), default=0)


@lru_cache(maxsize=1024)
def _is_chain(parents: tuple[int, ...]) -> bool:
    return all(parent == node - 1 for node, parent in enumerate(parents))


@lru_cache(maxsize=1024)
def _ancestor_masks(parents: tuple[int, ...]) -> tuple[int, ...]:
    masks: list[int] = []
    for node, parent in enumerate(parents):
        masks.append((0 if parent == ROOT else masks[parent]) | 1 << node)
    return tuple(masks)


@lru_cache(maxsize=1024)
def node_columns(parents: tuple[int, ...]) -> NodeColumns:
    """What a pass is told of nodes beside their tokens."""
    return NodeColumns(np.array(_depths(parents), np.int32), np.array(_ancestor_masks(parents), np.uint64))


NO_DRAFT = Draft()


def marked_cold(drafts: Sequence[Draft], is_cold: bool) -> Sequence[Draft]:
    """Return the drafts of a pass that compiled or captured something, if `is_cold`."""
    return [replace(draft, is_cold=True) for draft in drafts] if is_cold else drafts


def stack(drafts: Sequence[Draft]) -> DraftTrees:
    """Drafts as the flat arrays that acceptance judges; pending tokens stay pending."""
    drawn = [draft.drawn or (None,) * len(draft) for draft in drafts]
    return DraftTrees.stack([draft.pass_ids for draft in drafts], [draft.parents for draft in drafts], drawn)
