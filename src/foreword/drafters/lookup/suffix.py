"""Suffix drafter: drafts what followed earlier occurrences of the text's last tokens, here and in past answers."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from foreword.drafters.lookup.base import LookupDrafter
from foreword.drafters.lookup.suffix_automaton import ROOT, SuffixAutomaton
from foreword.drafters.registry import DrafterResources, chosen_kind
from foreword.errors import RequestError
from foreword.speculation.draft import ROOT as DRAFT_ROOT
from foreword.speculation.draft import Draft
from foreword.speculation.drafting import DraftRequest, DraftTask, Traits
from foreword.speculation.settings import DrafterSettings, Limit, at_least, setting

_REMATCHED_TOKENS = 64  # last tokens of a request that are matched again when its tenant's store has changed
_MAX_FOLLOWERS = 8  # maximum continuations per node that are considered
MOST_TENANTS = 256  # maximum number of tenants with stored answers; the least recently active are dropped


@dataclass(frozen=True)
class SuffixConfig(DrafterSettings):
    """Matching and storage limits."""

    min_match: int = setting(2, "minimum match length", at_least(1))
    depth_per_match: float = setting(
        2.0, "maximum draft depth per token of match length", Limit("positive", lambda value: value > 0)
    )
    min_probability: float = setting(
        0.2, "minimum estimated probability of a node", Limit("in (0, 1]", lambda value: 0 < value <= 1)
    )
    max_stored_tokens: int = setting(
        65_536, "stored answer tokens per tenant; the older half is dropped first", at_least(0)
    )
    warm_file: str = setting("", "a text file that initialises every tenant's store; empty: none")


class SuffixStore:
    """Stores past answers of one tenant in two automata. When the newer one is full, the older one is dropped.

    Texts cannot be removed from an automaton. With a single one, dropping old texts would mean rebuilding it, which
    would block the engine for many steps.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self.automata = [SuffixAutomaton()]  # newest last, at most two
        self.version = 0  # incremented when states may have changed

    @property
    def num_tokens(self) -> int:
        return sum(automaton.num_tokens for automaton in self.automata)

    def add(self, text: Sequence[int]) -> None:
        """Add a text, or its last tokens if it exceeds the capacity of an automaton."""
        limit = self._max_tokens // 2
        tail = text[max(0, len(text) - limit) :]
        if not tail:
            return
        if self.automata[-1].num_tokens + len(tail) > limit:
            self.automata = [self.automata[-1], SuffixAutomaton()]
        newest = self.automata[-1]
        newest.start_text()
        newest.extend(tail)
        self.version += 1

    def memory_bytes(self) -> int:
        return sum(automaton.memory_bytes() for automaton in self.automata)


@dataclass(frozen=True)
class SuffixMatch:
    """A state of an automaton that matches the end of a text."""

    automaton: SuffixAutomaton
    state: int
    length: int  # number of matching tokens


class _RequestText:
    """Tracks one request's text, with its own automaton and its matches in the tenant's store."""

    def __init__(self, epoch: int, store: SuffixStore) -> None:
        self.epoch = epoch
        self.automaton = SuffixAutomaton()
        self._store = store
        self._version = store.version
        self._matches = [(ROOT, 0)] * len(store.automata)  # (state, match length) per automaton

    def read(self, tokens: Sequence[int]) -> None:
        """Read the tokens since the last call, and update all matches."""
        new_tokens = tokens[self.automaton.num_tokens :]
        self.automaton.extend(new_tokens)
        if self._version != self._store.version:
            self._version = self._store.version
            self._matches = [(ROOT, 0)] * len(self._store.automata)
            new_tokens = tokens[max(0, len(tokens) - _REMATCHED_TOKENS) :]
        for index, automaton in enumerate(self._store.automata):
            state, length = self._matches[index]
            for token in new_tokens:
                state, length = automaton.follow(state, length, token)
            self._matches[index] = state, length

    def matches(self) -> list[SuffixMatch]:
        """Return the matches of the text's end, in the text itself and in the store."""
        state = self.automaton.earlier_suffix()
        return [
            SuffixMatch(self.automaton, state, self.automaton.lengths[state]),
            *(
                SuffixMatch(automaton, state, length)
                for automaton, (state, length) in zip(self._store.automata, self._matches, strict=True)
            ),
        ]


def build_suffix_drafter(config: SuffixConfig, resources: DrafterResources) -> "SuffixDrafter":
    """Create a suffix drafter, with the warm-up text if the settings name one."""
    if not config.warm_file:
        return SuffixDrafter(config)
    try:
        text = Path(config.warm_file).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"warm_file {config.warm_file} cannot be read as text: {error}") from None
    return SuffixDrafter(config, resources.encode(text))


class SuffixDrafter(LookupDrafter[_RequestText]):
    """Drafts trees of likely continuations: depth by match length, width by ambiguity."""

    traits = Traits(learns_answers=True, is_free=True)

    def __init__(self, config: SuffixConfig, warm_text: Sequence[int] = ()) -> None:
        super().__init__()
        self._config = config
        self._warm_text = warm_text
        self._stores: dict[str, SuffixStore] = {}

    def forget(self, request: DraftRequest) -> None:
        """Add the ended request's answer to its tenant's store, and drop its state."""
        if self._known.pop(request.request_id, None) is not None:
            self.store(request.tenant).add(request.tokens[request.prompt_len :])

    def memory_bytes(self) -> int:
        """Return the approximate bytes of all running texts and stored answers."""
        running = sum(text.automaton.memory_bytes() for text in self._known.values())
        return running + sum(store.memory_bytes() for store in self._stores.values())

    def store(self, tenant: str) -> SuffixStore:
        """Return the store of a tenant, which no other tenant reads, and mark it as recently used."""
        store = self._stores.pop(tenant, None)
        if store is None:
            store = SuffixStore(self._config.max_stored_tokens)
            store.add(self._warm_text)
        self._stores[tenant] = store  # most recently used last
        while len(self._stores) > MOST_TENANTS:
            del self._stores[next(iter(self._stores))]
        return store

    def draft(self, task: DraftTask) -> Draft:
        """Return the tree of the match with the most expected accepted tokens."""
        request = task.request
        text = self._text_of(request)
        text.read(request.tokens)
        trees = [
            expand(match, self._config, task)
            for match in text.matches()
            if match.length >= self._config.min_match
        ]
        best = max(trees, key=lambda tree: tree.expected, default=LikelyTree())
        return Draft(best.tokens, best.parents, len(request.tokens), request.epoch)

    def _text_of(self, request: DraftRequest) -> _RequestText:
        """Return the state of a request's text; a new one if the text does not continue the known one."""
        text = self._known.get(request.request_id)
        if text is None or text.epoch != request.epoch or text.automaton.num_tokens > len(request.tokens):
            text = self._known[request.request_id] = _RequestText(request.epoch, self.store(request.tenant))
        return text


class LikelyTree:
    """A tree under construction, with its expected number of accepted tokens."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.expected = 0.0  # accepted tokens

    def add(self, token: int, parent: int, probability: float) -> int:
        """Add a node that is accepted with this probability; return its index."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.expected += probability
        return len(self.tokens) - 1


def expand(match: SuffixMatch, config: SuffixConfig, task: DraftTask) -> LikelyTree:
    """Return the tree of the most likely nodes after a match, by frequency: best first, so parents before children."""
    max_depth = min(task.max_depth, max(1, int(match.length * config.depth_per_match)))
    tree = LikelyTree()
    order = 0  # tie-breaker: first found wins
    frontier: list[tuple[float, int, int, int, int, int]] = []  # (-p, order, token, state, parent, depth)

    def push_followers(state: int, parent: int, probability: float, depth: int) -> None:
        nonlocal order
        for token, following, share in _followers(match.automaton, state):
            if probability * share >= config.min_probability:
                heapq.heappush(frontier, (-probability * share, order, token, following, parent, depth))
                order += 1

    push_followers(match.state, DRAFT_ROOT, 1.0, 1)
    while frontier and len(tree.tokens) < task.max_nodes:
        negative_probability, _, token, state, parent, depth = heapq.heappop(frontier)
        if depth > max_depth:
            continue
        node = tree.add(token, parent, -negative_probability)
        push_followers(state, node, -negative_probability, depth + 1)
    return tree


def _followers(automaton: SuffixAutomaton, state: int) -> list[tuple[int, int, float]]:
    """Return the most frequent continuations of a state: (token, next state, fraction of all continuations).

    A state at the end of a text may have no continuations. Then its longest suffix that has some is used, except the
    root, which matches any text.
    """
    while not automaton.edges[state] and state != ROOT:
        state = automaton.links[state]
    edges = {} if state == ROOT else automaton.edges[state]
    counts = automaton.counts
    if len(edges) > _MAX_FOLLOWERS:
        edges = dict(heapq.nlargest(_MAX_FOLLOWERS, edges.items(), key=lambda edge: counts[edge[1]]))
    total = sum(counts[following] for following in automaton.edges[state].values()) or 1
    return [(token, following, counts[following] / total) for token, following in edges.items()]


KIND = chosen_kind(
    SuffixDrafter,
    "continues suffixes seen in this text and in past answers",
    SuffixConfig,
    build_suffix_drafter,
    makes_trees=lambda _: True,
)
