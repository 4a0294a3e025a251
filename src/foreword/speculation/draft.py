"""A draft: a tree of draft tokens for one request."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from operator import index as to_int
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from foreword.acceptance.rules.trees import DraftTrees, Drawn, chain_parents
from foreword.acceptance.transfer import HostCopy

ROOT = -1  # parent of a node that follows the committed prefix directly


class NodeColumns(NamedTuple):
    """Arrays of a pass that depend only on a draft's shape; read-only."""

    depths: NDArray[np.int32]  # [nodes], the first level is 1
    masks: NDArray[np.uint64]  # [nodes], one bit for the node and for each of its ancestors


class DeviceTokens(NamedTuple):
    """Draft tokens on a device, which may still be computing them; a pass over them needs no copy on the host."""

    source: HostCopy  # int64 tokens
    indices: tuple[int, ...]  # [nodes], indices of the tokens in the source

    def pick(self, nodes: Sequence[int]) -> "DeviceTokens":
        """Return the tokens of these nodes."""
        return DeviceTokens(self.source, tuple([self.indices[node] for node in nodes]))

    @property
    def pass_ids(self) -> tuple[int, ...]:
        """Placeholders that stand for the tokens in a batch, [nodes]: −1 − index into `source`."""
        return _placeholders(self.indices)

    def read(self) -> tuple[int, ...]:
        """Wait for the tokens and return them; 0 replaces a token that could not be computed."""
        numbers = self.source.numbers
        tokens = tuple([numbers[index] for index in self.indices])
        if min(tokens, default=0) < 0:
            return tuple([max(token, 0) for token in tokens])
        return tokens


class Draft:
    """Draft tokens in topological order, for one state of one request's text. Immutable.

    A chain is a tree of width one; plain decoding is the empty draft.

    - A *drawn* token carries the distribution q from which it was drawn, as all rules but *coupled* need.
    - All other tokens are *chosen*, without q: by a lookup, by argmax, or sampled under *coupled*.
    """

    __slots__ = ("_tokens", "committed_len", "confidence", "device", "drawn", "epoch", "is_cold", "parents")

    _tokens: tuple[int, ...] | None  # None: on the device, not read yet
    # None: the tokens are on the host. Device tokens are always chosen, never drawn.
    device: DeviceTokens | None
    parents: tuple[int, ...]  # [nodes], index of an earlier node or ROOT
    committed_len: int  # length of the text that the draft follows
    epoch: int  # the request's epoch at that time; preemption advances it
    drawn: tuple[Drawn | None, ...]  # [nodes], q of drawn tokens, None for chosen ones; empty: all are chosen
    # [nodes], the drafter's probability of each token given its ancestors; empty: unknown. Dropping drawn nodes by
    # confidence would bias the text, like dropping them by their tokens.
    confidence: tuple[float, ...]
    is_cold: bool  # the drafter compiled or captured a graph for this draft

    def __init__(
        self,
        tokens: Sequence[int] = (),
        parents: Sequence[int] = (),
        committed_len: int = 0,
        epoch: int = 0,
        drawn: Sequence[Drawn | None] = (),
        confidence: Sequence[float] = (),
        is_cold: bool = False,
    ) -> None:
        # Plug-in drafters pass arrays and NumPy scalars; convert them to tuples of Python numbers.
        self._tokens = on_host = tuple(map(to_int, tokens))
        self.device = None
        self.parents = tuple(map(to_int, parents))
        self.committed_len = to_int(committed_len)
        self.epoch = epoch
        self.drawn = tuple(drawn)
        self.confidence = tuple(map(float, confidence))
        self.is_cold = is_cold
        if self.committed_len < 0:
            raise ValueError(f"a draft for a text of {self.committed_len} tokens")
        if len(on_host) != len(self.parents):
            raise ValueError(f"{len(on_host)} tokens but {len(self.parents)} parents")
        if (stray := _stray_node(self.parents)) is not None:
            raise ValueError(
                f"node {stray} has parent {self.parents[stray]}: parents come before their children"
            )
        if self.drawn and len(self.drawn) != len(on_host):
            raise ValueError(f"{len(on_host)} tokens but {len(self.drawn)} distributions")
        if self.confidence and len(self.confidence) != len(on_host):
            raise ValueError(f"{len(on_host)} tokens but {len(self.confidence)} confidences")
        for node, q in enumerate(self.drawn):
            if q is not None and q.prob(on_host[node]) <= 0:
                raise ValueError(f"token {on_host[node]} of node {node} cannot be drawn from its own q")

    @staticmethod
    def chain(
        tokens: Sequence[int],
        committed_len: int,
        epoch: int = 0,
        drawn: Sequence[Drawn | None] = (),
        confidence: Sequence[float] = (),
    ) -> "Draft":
        """Return a chain: every token follows the one before it."""
        parents = chain_parents(len(tokens))
        confidence = tuple(map(float, confidence))
        if drawn or committed_len < 0 or (confidence and len(confidence) != len(tokens)):
            return Draft(tokens, parents, committed_len, epoch, drawn, confidence)
        # Skip the other checks, since lookups build one chain per request and step.
        return _unchecked(
            tuple(map(to_int, tokens)), None, parents, to_int(committed_len), epoch, (), confidence
        )

    @staticmethod
    def on_device(
        tokens: DeviceTokens, committed_len: int, epoch: int = 0, parents: tuple[int, ...] | None = None
    ) -> "Draft":
        """Return a draft of chosen tokens on a device: a chain unless `parents` are given."""
        shape = chain_parents(len(tokens.indices)) if parents is None else parents
        return _unchecked(None, tokens, shape, committed_len, epoch, (), ())

    @property
    def tokens(self) -> tuple[int, ...]:
        """Token ids, [nodes]; waits for tokens that are still on a device."""
        if self._tokens is None:
            assert self.device is not None
            self._tokens = self.device.read()
        return self._tokens

    @property
    def pass_ids(self) -> tuple[int, ...]:
        """Token ids or device placeholders, as a batch contains them, [nodes]; never waits."""
        return self.tokens if self.device is None else self.device.pass_ids

    def on_host(self) -> "Draft":
        """Return the draft with its tokens on the host; waits for them."""
        if self.device is None:
            return self
        return Draft(self.tokens, self.parents, self.committed_len, self.epoch)

    def __eq__(self, other: object) -> bool:
        """Compare tokens, parents, distributions and the text's state; waits for tokens on a device."""
        return isinstance(other, Draft) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[object, ...]:
        return self.tokens, self.parents, self.committed_len, self.epoch, self.drawn

    def __repr__(self) -> str:
        tokens = self.device if self._tokens is None else self._tokens
        return f"Draft({tokens}, {self.parents}, {self.committed_len}, {self.epoch})"

    def __len__(self) -> int:
        return len(self.parents)

    def depths(self) -> tuple[int, ...]:
        """Return the depth of every node; the first level is 1."""
        return _depths(self.parents)

    @property
    def depth(self) -> int:
        """Number of levels."""
        return _depth(self.parents)

    @property
    def is_chain(self) -> bool:
        return self.parents == chain_parents(len(self.parents))

    def ancestor_masks(self) -> tuple[int, ...]:
        """Return one bit mask per node: the node and its ancestors."""
        return _ancestor_masks(self.parents)

    def keep(self, wanted: Callable[[int], bool]) -> "Draft":
        """Return the draft reduced to nodes for which `wanted` is true, also for all their ancestors.

        A drawn node may be dropped only for properties fixed before it was drawn: its position, its q, its ancestors.
        Dropping it because of its token would bias the text.
        """
        new_index: dict[int, int] = {ROOT: ROOT}  # of each kept node in the reduced draft
        for node, parent in enumerate(self.parents):
            if parent in new_index and wanted(node):
                new_index[node] = len(new_index) - 1
        nodes = [node for node in new_index if node != ROOT]
        return self if len(nodes) == len(self) else self._only(nodes, new_index, self.committed_len)

    def within(self, max_nodes: int, max_depth: int) -> "Draft":
        """Return the draft cut to its first `max_nodes` nodes and to `max_depth` levels."""
        nodes = len(self.parents)
        if nodes <= max_nodes and (nodes <= max_depth or self.depth <= max_depth):
            return self
        if self.is_chain:
            return self._first(max(min(max_nodes, max_depth), 0))
        depths = self.depths()
        shallow = self.keep(lambda node: depths[node] <= max_depth)
        return shallow.keep(lambda node: node < max_nodes)

    def rebase(self, tokens: Sequence[int]) -> "Draft":
        """Return the part of the draft that follows `tokens`, the grown text; empty if the text diverged.

        Committed nodes are removed and their descendants move up. This is exact for drawn nodes, too: whether a node
        stays depends on its ancestors and the text, not on its own token.
        """
        if self.committed_len == len(tokens):
            return self
        if self.is_chain and self.committed_len < len(tokens):
            new_tokens = tuple(tokens[self.committed_len :])
            agrees = self.tokens[: len(new_tokens)] == new_tokens
            return self._after(len(new_tokens) if agrees else len(self.tokens), len(tokens))
        node, new_positions = ROOT, range(self.committed_len, len(tokens))
        for position in new_positions:  # walk down to the node of the newest token
            children = [child for child, parent in enumerate(self.parents) if parent == node]
            child = next((child for child in children if self.tokens[child] == tokens[position]), None)
            if child is None:
                return Draft(committed_len=len(tokens), epoch=self.epoch)
            node = child
        if not new_positions:  # the text is shorter than the one that was drafted for
            return Draft(committed_len=len(tokens))
        new_index = {node: ROOT}  # of each kept node in the new draft
        for descendant in range(node + 1, len(self)):
            if self.parents[descendant] in new_index:
                new_index[descendant] = len(new_index) - 1
        descendants = [descendant for descendant in new_index if descendant != node]
        return self._only(descendants, new_index, len(tokens))

    def _after(self, passed: int, committed_len: int) -> "Draft":
        """Return a chain without its first `passed` nodes, for a text that has grown to `committed_len` tokens."""
        parents = self.parents[: max(len(self.parents) - passed, 0)]
        drawn, confidence = self.drawn[passed:], self.confidence[passed:]
        return _unchecked(self.tokens[passed:], None, parents, committed_len, self.epoch, drawn, confidence)

    def _first(self, end: int) -> "Draft":
        """Return the chain of the first `end` nodes, without repeating the checks of the constructor."""
        tokens = None if self._tokens is None else self._tokens[:end]
        device = None if self.device is None else self.device.pick(range(end))
        parents, drawn, confidence = self.parents[:end], self.drawn[:end], self.confidence[:end]
        return _unchecked(tokens, device, parents, self.committed_len, self.epoch, drawn, confidence)

    def _only(self, nodes: Sequence[int], new_index: dict[int, int], committed_len: int) -> "Draft":
        """Return the draft of these nodes; `new_index` maps a node, or the new root, to its index in it."""
        parents = tuple([new_index[self.parents[node]] for node in nodes])
        if self.device is not None:
            return Draft.on_device(self.device.pick(nodes), committed_len, self.epoch, parents)
        return Draft(
            [self.tokens[node] for node in nodes],
            parents,
            committed_len,
            self.epoch,
            [self.drawn[node] for node in nodes] if self.drawn else (),
            [self.confidence[node] for node in nodes] if self.confidence else (),
        )


def _unchecked(
    tokens: tuple[int, ...] | None,
    device: DeviceTokens | None,
    parents: tuple[int, ...],
    committed_len: int,
    epoch: int,
    drawn: tuple[Drawn | None, ...],
    confidence: tuple[float, ...],
) -> Draft:
    """Return a draft without checking its arguments."""
    draft = Draft.__new__(Draft)
    draft._tokens, draft.device, draft.parents, draft.committed_len = tokens, device, parents, committed_len
    draft.epoch, draft.drawn, draft.confidence = epoch, drawn, confidence
    draft.is_cold = device is not None and device.source.is_cold
    return draft


# These functions are cached: most drafts are chains, and few shapes and indices recur in every step.
@lru_cache(maxsize=4096)
def _placeholders(indices: tuple[int, ...]) -> tuple[int, ...]:
    """Return the numbers that stand for device tokens with these indices in a batch."""
    return tuple([-1 - index for index in indices])


@lru_cache(maxsize=1024)
def _stray_node(parents: tuple[int, ...]) -> int | None:
    """Return the first node whose parent does not come before it."""
    return next((node for node, parent in enumerate(parents) if not ROOT <= parent < node), None)


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
def _ancestor_masks(parents: tuple[int, ...]) -> tuple[int, ...]:
    masks: list[int] = []
    for node, parent in enumerate(parents):
        masks.append((0 if parent == ROOT else masks[parent]) | 1 << node)
    return tuple(masks)


@lru_cache(maxsize=1024)
def node_columns(parents: tuple[int, ...]) -> NodeColumns:
    """Return the depths and ancestor masks of a tree as read-only arrays."""
    return NodeColumns(np.array(_depths(parents), np.int32), np.array(_ancestor_masks(parents), np.uint64))


NO_DRAFT = Draft()


def mark_cold(drafts: Sequence[Draft], is_cold: bool) -> Sequence[Draft]:
    """Mark all drafts as cold (compiled or captured during the call) if `is_cold`."""
    if not is_cold:
        return drafts
    return [
        Draft(
            draft.tokens,
            draft.parents,
            draft.committed_len,
            draft.epoch,
            draft.drawn,
            draft.confidence,
            is_cold=True,
        )
        for draft in drafts
    ]


def stack(drafts: Sequence[Draft]) -> DraftTrees:
    """Concatenate drafts into the flat arrays that acceptance reads; device tokens stay placeholders."""
    drawn = [draft.drawn or (None,) * len(draft.parents) for draft in drafts]
    tokens = [draft.pass_ids if draft.parents else () for draft in drafts]
    return DraftTrees.stack(tokens, [draft.parents for draft in drafts], drawn)
