"""Drafts from suffixes seen before: in this request's text and in past answers of the same tenant."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from foreword.drafters.lookup.by_request import LookupDrafter
from foreword.drafters.lookup.suffix_automaton import ROOT, SuffixAutomaton
from foreword.drafters.registry import DrafterResources, chosen_kind
from foreword.errors import RequestError
from foreword.speculation import draft as drafts
from foreword.speculation.draft import Draft
from foreword.speculation.drafting import DraftRequest, DraftTask, Traits

_REMATCHED = 64
"""Tokens that are read again to find a request's place in a store that has changed."""

_WIDEST = 8
"""Followers of one node that are looked at."""


MOST_TENANTS = 256
"""Tenants whose past answers are kept; those who were away longest are forgotten."""


@dataclass(frozen=True)
class SuffixConfig:
    """When a suffix is trusted, and how much is remembered."""

    min_match: int = 2  # shortest suffix that is trusted
    depth_per_match: float = 2.0  # drafts go this many times as deep as the match is long
    min_probability: float = 0.2  # estimated probability below which a node is left out
    max_stored_tokens: int = 65_536  # past answers kept for each tenant; the older half goes first
    warm_file: str = ""  # a text file that every tenant's store begins with; empty: none

    def __post_init__(self) -> None:
        if self.min_match < 1:
            raise RequestError(f"min_match must be at least 1, not {self.min_match}")
        if not self.depth_per_match > 0:
            raise RequestError(f"depth_per_match must be positive, not {self.depth_per_match}")
        if not 0 < self.min_probability <= 1:
            raise RequestError(f"min_probability must be in (0, 1], not {self.min_probability}")
        if self.max_stored_tokens < 0:
            raise RequestError(f"max_stored_tokens must not be negative, not {self.max_stored_tokens}")


class SuffixStore:
    """Past answers of one tenant in two generations; when the younger one is full, the older one is dropped.

    Nothing is ever built anew: that would take longer than many steps, while the engine waits.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self.automata = [SuffixAutomaton()]  # the youngest last, at most two
        self.version = 0  # advances whenever states may have changed

    @property
    def num_tokens(self) -> int:
        return sum(automaton.num_tokens for automaton in self.automata)

    def add(self, text: Sequence[int]) -> None:
        """Remember a text, at most as much of its end as one generation holds."""
        most = self._max_tokens // 2
        kept = text[max(0, len(text) - most) :]
        if not kept:
            return
        if self.automata[-1].num_tokens + len(kept) > most:
            self.automata = [self.automata[-1], SuffixAutomaton()]
        youngest = self.automata[-1]
        youngest.start_text()
        youngest.extend(kept)
        self.version += 1

    def memory_bytes(self) -> int:
        """About what the automata take."""
        return sum(automaton.memory_bytes() for automaton in self.automata)


@dataclass(frozen=True)
class SuffixMatch:
    """A place in an automaton that the end of a text leads to."""

    automaton: SuffixAutomaton
    state: int
    length: int  # tokens at the end of the text that led there


class _Reader:
    """One request's text: its own automaton and its place in the tenant's store."""

    def __init__(self, epoch: int, store: SuffixStore) -> None:
        self.epoch = epoch
        self.own = SuffixAutomaton()
        self._store = store
        self._version = store.version
        self._places = [(ROOT, 0) for _ in store.automata]  # (state, length of the match) in each

    def read(self, tokens: Sequence[int]) -> None:
        """Catch up with the request's text."""
        fresh = tokens[self.own.num_tokens :]
        self.own.extend(fresh)
        if self._version != self._store.version:
            self._version = self._store.version
            self._places = [(ROOT, 0) for _ in self._store.automata]
            fresh = tokens[max(0, len(tokens) - _REMATCHED) :]
        for index, automaton in enumerate(self._store.automata):
            state, length = self._places[index]
            for token in fresh:
                state, length = automaton.follow(state, length, token)
            self._places[index] = state, length

    def matches(self) -> list[SuffixMatch]:
        """The places that the text's end leads to, in its own past and in the store."""
        own = self.own.earlier_suffix()
        return [
            SuffixMatch(self.own, own, self.own.lengths[own]),
            *(
                SuffixMatch(automaton, state, length)
                for automaton, (state, length) in zip(self._store.automata, self._places, strict=True)
            ),
        ]


def build_suffix_drafter(config: SuffixConfig, resources: DrafterResources) -> "SuffixDrafter":
    """A suffix drafter, warmed from a text file if the config names one."""
    if not config.warm_file:
        return SuffixDrafter(config)
    try:
        text = Path(config.warm_file).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"warm_file {config.warm_file} cannot be read as text: {error}") from None
    return SuffixDrafter(config, resources.encode(text))


class SuffixDrafter(LookupDrafter[_Reader]):
    """Drafts trees of likely continuations, as deep as the match is long and as wide as it is undecided."""

    traits = Traits(learns_answers=True, is_free=True)

    def __init__(self, config: SuffixConfig, warm_text: Sequence[int] = ()) -> None:
        super().__init__()
        self._config = config
        self._warm_text = warm_text
        self._stores: dict[str, SuffixStore] = {}

    def forget(self, request: DraftRequest) -> None:
        """A request has ended: remember its answer for its tenant, drop the rest."""
        if self._known.pop(request.request_id, None) is not None:
            self.store(request.tenant).add(request.tokens[request.prompt_len :])

    def memory_bytes(self) -> int:
        """About what the texts of running requests and the past answers of all tenants take."""
        own = sum(reader.own.memory_bytes() for reader in self._known.values())
        return own + sum(store.memory_bytes() for store in self._stores.values())

    def store(self, tenant: str) -> SuffixStore:
        """Return the past answers of one tenant; drafts for other tenants never use them."""
        store = self._stores.pop(tenant, None)
        if store is None:
            store = SuffixStore(self._config.max_stored_tokens)
            store.add(self._warm_text)
        self._stores[tenant] = store  # the newest last
        while len(self._stores) > MOST_TENANTS:
            del self._stores[next(iter(self._stores))]
        return store

    def draft(self, task: DraftTask) -> Draft:
        """A tree from the place that promises most accepted tokens."""
        request = task.request
        reader = self._reader(request)
        reader.read(request.tokens)
        trees = [
            expand(match, self._config, task)
            for match in reader.matches()
            if match.length >= self._config.min_match
        ]
        best = max(trees, key=lambda tree: tree.expected, default=LikelyTree())
        return Draft(tuple(best.tokens), tuple(best.parents), len(request.tokens), request.epoch)

    def _reader(self, request: DraftRequest) -> _Reader:
        reader = self._known.get(request.request_id)
        if reader is None or reader.epoch != request.epoch or reader.own.num_tokens > len(request.tokens):
            reader = self._known[request.request_id] = _Reader(request.epoch, self.store(request.tenant))
        return reader


class LikelyTree:
    """Nodes while they are being chosen, and how many of them are expected to be accepted."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.expected = 0.0

    def add(self, token: int, parent: int, probability: float) -> int:
        """Append a node; return its number."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.expected += probability
        return len(self.tokens) - 1


def expand(match: SuffixMatch, config: SuffixConfig, task: DraftTask) -> LikelyTree:
    """The likeliest nodes after a match, most likely first, by how often each followed."""
    max_depth = min(task.max_depth, max(1, int(match.length * config.depth_per_match)))
    tree = LikelyTree()
    order = 0  # of equally likely nodes the first found wins
    frontier: list[tuple[float, int, int, int, int, int]] = []  # (-p, order, token, state, parent, depth)

    def push_followers(state: int, parent: int, probability: float, depth: int) -> None:
        nonlocal order
        for token, following, share in _followers(match.automaton, state):
            if probability * share >= config.min_probability:
                heapq.heappush(frontier, (-probability * share, order, token, following, parent, depth))
                order += 1

    push_followers(match.state, drafts.ROOT, 1.0, 1)
    while frontier and len(tree.tokens) < task.max_nodes:
        negative, _, token, state, parent, depth = heapq.heappop(frontier)
        if depth > max_depth:
            continue
        node = tree.add(token, parent, -negative)
        push_followers(state, node, -negative, depth + 1)
    return tree


def _followers(automaton: SuffixAutomaton, state: int) -> list[tuple[int, int, float]]:
    """Tokens that followed, the state after each, and its share of all of them.

    At the end of a text nothing has followed yet; its longest suffix that occurred before tells how a
    repeating text goes on.
    """
    while not automaton.edges[state] and state != ROOT:
        state = automaton.links[state]
    edges = {} if state == ROOT else automaton.edges[state]
    counts = automaton.counts
    if len(edges) > _WIDEST:
        edges = dict(heapq.nlargest(_WIDEST, edges.items(), key=lambda edge: counts[edge[1]]))
    total = sum(counts[following] for following in automaton.edges[state].values()) or 1
    return [(token, following, counts[following] / total) for token, following in edges.items()]


KIND = chosen_kind(
    "continues suffixes seen in this text and in past answers",
    SuffixConfig,
    build_suffix_drafter,
    makes_trees=lambda _: True,
    traits=SuffixDrafter.traits,
)
