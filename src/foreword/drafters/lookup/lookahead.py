"""Lookahead decoding (arXiv 2402.02057, Fu et al. 2024): a Jacobi window fills a pool of n-grams that yields drafts.

The window is part of the draft, and so of the pass that verifies it. It has one column per future position and one row
per earlier step. In every column, the target's draw after the last row completes an n-gram. The window is a tree: the
parent of (row r, column j) is (r - 1, j), the parent of (0, j) is (0, j - 1), and (0, 0) is the text's newest token. A
window node is verified and accepted like any other draft token.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from foreword.drafters.lookup.base import READS_DRAWS, JudgedDraft, LookupDrafter
from foreword.drafters.registry import chosen_kind
from foreword.drafters.trees import TreeBuilder
from foreword.speculation.draft import ROOT, Draft
from foreword.speculation.drafting import Commit, DraftRequest, DraftTask
from foreword.speculation.settings import DrafterSettings, at_least, setting

Gram = tuple[int, ...]  # tokens that followed a token: an n-gram without its first token

_BYTES_PER_GRAM = 250
"""Approximate bytes per n-gram of four tokens, measured with tracemalloc on CPython 3.11."""


class NgramPool:
    """Stores n-grams by first token; the least recently used ones are dropped."""

    def __init__(self, per_token: int, max_grams: int) -> None:
        """Create a pool of at most `max_grams` n-grams, and at most `per_token` of them per first token."""
        self._per_token = per_token
        self._max_grams = max_grams
        # Both dictionaries have their least recently used entry first.
        self._grams: OrderedDict[int, OrderedDict[Gram, None]] = OrderedDict()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, token: int, gram: Gram) -> None:
        """Add an n-gram, or mark it as recently used."""
        followers = self._grams.setdefault(token, OrderedDict())
        self._grams.move_to_end(token)
        self._count += gram not in followers
        followers[gram] = None
        followers.move_to_end(gram)
        if len(followers) > self._per_token:
            followers.popitem(last=False)
            self._count -= 1
        if self._count > self._max_grams:
            oldest = next(iter(self._grams))
            self._grams[oldest].popitem(last=False)
            self._count -= 1
            if not self._grams[oldest]:
                del self._grams[oldest]

    def after(self, token: int) -> list[Gram]:
        """Return the n-grams after a token, most recent first, and mark the token as recently used."""
        followers = self._grams.get(token)
        if followers is None:
            return []
        self._grams.move_to_end(token)
        return list(reversed(followers))

    def memory_bytes(self) -> int:
        return self._count * _BYTES_PER_GRAM


_BYTES_PER_REQUEST = 4_000  # approximate bytes per request's window, mostly the random generator


@dataclass(frozen=True)
class LookaheadConfig(DrafterSettings):
    """Sizes of the window and of the set of n-grams in a draft.

    Together they have (ngram_size - 1) * (window_size + guess_set_size) - 1 nodes. Both shrink if fewer are available.
    """

    window_size: int = setting(7, "columns of the window: future positions", at_least(1))
    ngram_size: int = setting(5, "length of the n-grams, one more than the window's rows", at_least(2))
    guess_set_size: int = setting(7, "n-grams verified per pass, and stored per first token", at_least(1))
    pool_size: int = setting(4096, "stored n-grams per request", at_least(1))
    pool_from_prompt: bool = setting(True, "add n-grams of the prompt and answer to the pool")


class WindowSize(NamedTuple):
    """Size of a window in a draft."""

    rows: int
    columns: int

    @property
    def nodes(self) -> int:
        """Return the number of draft tokens. The token at (0, 0) is not one of them: it belongs to the text."""
        return self.rows * self.columns - 1


def fitting_window(config: LookaheadConfig, max_nodes: int, max_depth: int) -> WindowSize:
    """Return the largest window that fits beside the n-grams. It may use at least half of the nodes.

    If space is short, columns are removed before rows.
    """
    rows = config.ngram_size - 1
    room = max(max_nodes - config.guess_set_size * rows, max_nodes - max_nodes // 2)
    while rows > 1 and _columns(rows, room, max_depth) < 2:
        rows -= 1
    return WindowSize(rows, max(1, min(config.window_size, _columns(rows, room, max_depth))))


def _columns(rows: int, room: int, max_depth: int) -> int:
    """Return how many columns fit into `room` nodes and `max_depth` levels."""
    return min((room + 1) // rows, max_depth - rows + 2)


class LookaheadDrafter(LookupDrafter["_RequestWindow"]):
    """Drafts the pool's n-grams after the newest token, beside the window that fills the pool."""

    traits = READS_DRAWS

    def __init__(self, config: LookaheadConfig) -> None:
        super().__init__()
        self._config = config

    def observe(self, commits: Sequence[Commit]) -> None:
        """Advance the windows by the target's draws."""
        for commit in commits:
            window_state = self._known.get(commit.request.request_id)
            if window_state is not None and len(commit.draft):
                window_state.observe(commit)

    def memory_bytes(self) -> int:
        pools = sum(window_state.pool.memory_bytes() for window_state in self._known.values())
        return pools + len(self._known) * _BYTES_PER_REQUEST

    def draft(self, task: DraftTask) -> Draft:
        request = task.request
        window_state = self._known.get(request.request_id)
        if window_state is None or window_state.read_tokens > len(request.tokens):
            window_state = self._known[request.request_id] = _RequestWindow(self._config)
        window_state.read(request)
        size = fitting_window(self._config, task.max_nodes, task.max_depth)
        tree = TreeBuilder()
        for gram in window_state.pool.after(request.tokens[-1]):
            _add_path(tree, gram[: task.max_depth], task.max_nodes - size.nodes)
        for path in window_state.window(request, size):
            _add_path(tree, path[: task.max_depth], task.max_nodes)
        return Draft(tree.tokens, tree.parents, len(request.tokens), request.epoch)


def _add_path(tree: TreeBuilder, path: Sequence[int], max_nodes: int) -> None:
    """Add a path from the text's end, as far as it fits into `max_nodes`."""
    parent: int | None = ROOT
    for token in path:
        if parent is not None:
            parent = tree.add(parent, token, max_nodes)


class _RequestWindow:
    """One request's window and n-gram pool."""

    def __init__(self, config: LookaheadConfig) -> None:
        self._config = config
        self.pool = NgramPool(config.guess_set_size, config.pool_size)
        self.read_tokens = 0  # tokens whose n-grams are in the pool, if `pool_from_prompt`
        self._rows: list[list[int]] = []  # token ids [rows][columns]; (0, 0) is unused
        self._max_rows = 1  # rows of the window in the newest draft, once it is filled
        self._random = Random(0)

    def read(self, request: DraftRequest) -> None:
        """Add the text's n-grams to the pool."""
        tokens, followers = request.tokens, self._config.ngram_size - 1
        if not self._config.pool_from_prompt:
            self.read_tokens = len(tokens)
        while self.read_tokens + followers < len(tokens):
            first = self.read_tokens
            self.pool.add(tokens[first], tuple(tokens[first + 1 : first + 1 + followers]))
            self.read_tokens += 1

    def window(self, request: DraftRequest, size: WindowSize) -> list[list[int]]:
        """Return the window, resized to `size`, as one path per column from the text's end."""
        self._max_rows = size.rows
        self._rows = self._rows[: size.rows] or [[]]
        prompt_len = request.prompt_len or len(request.tokens)
        for row in self._rows:
            del row[size.columns :]
            while len(row) < size.columns:  # a new column starts with random tokens of the prompt
                row.append(request.tokens[self._random.randrange(prompt_len)])
        return [self._path(column) for column in range(size.columns)]

    def _path(self, column: int) -> list[int]:
        """Return the tokens from the text's end to the last row of a column."""
        first, *others = self._rows
        return [*first[1 : column + 1], *(row[column] for row in others)]

    def observe(self, commit: Commit) -> None:
        """Append the target's draws after the last row as a new row; add each column's completed n-gram to the pool."""
        judged, drawn = JudgedDraft(commit), []
        newest = commit.request.tokens[commit.draft.committed_len - 1]
        first_tokens = [newest, *self._rows[0][1:]] if self._rows else []  # of each column's n-gram
        for column, first_token in enumerate(first_tokens):
            token = judged.drawn_after(judged.follow(self._path(column)))
            if token is None:
                break
            self.pool.add(first_token, (*(row[column] for row in self._rows[1:]), token))
            drawn.append(token)
        if len(drawn) < min(2, len(first_tokens)):  # the verified draft is not from this drafter
            return
        rows = self._rows if len(self._rows) < self._max_rows else self._rows[1:]
        self._rows = [*(row[: len(drawn)] for row in rows), drawn]


KIND = chosen_kind(
    LookaheadDrafter,
    "drafts n-grams that the target produces in a window beside the draft",
    LookaheadConfig,
    makes_trees=lambda _: True,
)
