"""Medusa: every head drafts one position from the target's last hidden state."""

import heapq
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from foreword.acceptance.rules.rule import Rule
from foreword.backends.batch import MAX_DRAFT_NODES, Tap
from foreword.backends.interface import HeadOutput, MedusaCall, MedusaRunner
from foreword.drafters.heads.chains import drafts_of_chains, plan_chains
from foreword.drafters.heads.growing import draft_at_once, grow_levels
from foreword.drafters.heads.loading import (
    HEAD,
    DraftVocabulary,
    HeadConfig,
    draft_where_ready,
    head_path,
    open_fitting,
    taps_of,
    vocabulary_of,
)
from foreword.drafters.next_level import best_tokens, with_fixed_corrections
from foreword.drafters.registry import DrafterResources, drawn_kind
from foreword.drafters.trees import GrowingTree, HeadTree, Shape
from foreword.errors import RequestError
from foreword.speculation.draft import ROOT, Draft, mark_cold
from foreword.speculation.drafting import Commit, Drafter, DrafterNeeds, DraftRequest, DraftTask
from foreword.speculation.settings import setting
from foreword.structured.state import Path as GrammarPath

RANKS = 10  # number of top tokens per head that a path may select from

Path = tuple[int, ...]
"""A node of the tree: the rank of the chosen token at each level, 0 for the most likely one."""

Paths = tuple[Path, ...]


def read_choices(value: object, origin: str) -> Paths:
    """Parse paths of ranks, most useful first: [[0], [0, 0], [1], ...]."""
    listed = value if isinstance(value, list | tuple) else ()
    paths = tuple(tuple(path) if isinstance(path, list | tuple) else () for path in listed)
    ranks = [rank for path in paths for rank in path]
    are_ranks = all(type(rank) is int and rank in range(RANKS) for rank in ranks)
    if not paths or not all(paths) or not are_ranks:
        raise RequestError(
            f"{origin}: medusa_choices must be a list of paths of ranks below {RANKS}, such as [[0], [0, 0], [1]]"
        )
    return tuple(dict.fromkeys(paths))


@lru_cache(maxsize=256)
def fitting(paths: Paths, max_nodes: int, max_depth: int) -> Paths:
    """Return the first paths that fit into the limits, with all their prefixes, sorted by level."""
    chosen: dict[Path, None] = {}
    for path in paths:
        prefixes = [path[:length] for length in range(1, len(path) + 1)]
        missing = [prefix for prefix in prefixes if prefix not in chosen]
        if len(path) <= max_depth and len(chosen) + len(missing) <= max_nodes:
            chosen.update(dict.fromkeys(missing))
    return tuple(sorted(chosen, key=lambda path: (len(path), path)))


@lru_cache(maxsize=256)
def shape_of(paths: Paths) -> Shape:
    """Return the tree shape of these paths, which are sorted by level."""
    levels: list[tuple[int, ...]] = []
    parents: list[Path] = [()]
    while children := [path for path in paths if len(path) == len(levels) + 1]:
        child_counts = Counter(path[:-1] for path in children)
        levels.append(tuple(child_counts[parent] for parent in parents))
        parents = children
    return tuple(levels)


class MeasuredRanks:
    """Counts the rank of the true token per head, and derives the best tree."""

    _EVERY = 64  # tokens between two evaluations
    _PRIOR_TOKENS = 20.0  # pseudo-count of the prior

    def __init__(self, heads: int) -> None:
        # Prior: 60% of the first head's top tokens are right, 20% fewer for each later head, 60% fewer for each rank.
        first = self._PRIOR_TOKENS * 0.6
        self._hits = [[first * 0.8**head * 0.4**rank for rank in range(RANKS)] for head in range(heads)]
        self._counts = [self._PRIOR_TOKENS] * heads
        self._total = 0
        self._paths: dict[tuple[int, int], Paths] = {}  # by (max_nodes, max_depth), until the next evaluation

    def count(self, head: int, rank: int | None) -> None:
        """Count a true token and its rank for this head; None: it was not among the top tokens."""
        self._counts[head] += 1
        if rank is not None:
            self._hits[head][rank] += 1
        self._total += 1
        if self._total % self._EVERY == 0:
            self._paths.clear()

    def paths(self, max_nodes: int, max_depth: int) -> Paths:
        """Return the paths with the highest acceptance probability, level by level."""
        limits = (max_nodes, max_depth)
        if limits not in self._paths:
            self._paths[limits] = fitting(self._likeliest(max_nodes, max_depth), max_nodes, max_depth)
        return self._paths[limits]

    def _likeliest(self, max_nodes: int, max_depth: int) -> Paths:
        """Return paths in order of decreasing acceptance probability; `max_nodes` of them."""
        likeliest: list[Path] = []
        # (-probability, path): heapq returns the smallest entry first
        candidates: list[tuple[float, Path]] = [(-1.0, ())]
        while candidates and len(likeliest) <= max_nodes:
            negative_probability, path = heapq.heappop(candidates)
            likeliest.append(path)
            head = len(path)  # the head that drafts the next level
            if head < min(max_depth, len(self._hits)):
                for rank, hits in enumerate(self._hits[head]):
                    product = negative_probability * hits / self._counts[head]
                    heapq.heappush(candidates, (product, (*path, rank)))
        return tuple(likeliest[1:])  # without the root


class PendingRanks:
    """Stores each head's top tokens for one request's future positions until these positions are committed."""

    def __init__(self) -> None:
        self._rankings: deque[tuple[int, list[list[int]]]] = (
            deque()
        )  # (text length, token ids [heads][ranks])

    def add(self, length: int, ranked: list[list[int]]) -> None:
        """Add the top tokens for the positions from `length` on, token ids [heads][ranks]."""
        if not self._rankings or self._rankings[-1][0] < length:
            self._rankings.append((length, ranked))

    def settle(self, counted: int, tokens: Sequence[int], ranks: MeasuredRanks) -> None:
        """Add the ranks of the tokens from index `counted` on to `ranks`; drop rankings of committed positions."""
        for length, ranked in self._rankings:
            for position in range(max(counted, length), min(len(tokens), length + len(ranked))):
                head = position - length
                ranked_tokens, token = ranked[head], tokens[position]
                ranks.count(head, ranked_tokens.index(token) if token in ranked_tokens else None)
        while self._rankings and self._rankings[0][0] + len(self._rankings[0][1]) <= len(tokens):
            self._rankings.popleft()


MEASURED, FROM_FILE = "measured", "file"  # values of `medusa_choices`


@dataclass(frozen=True)
class MedusaConfig(HeadConfig):
    """Settings of Medusa heads and their tree."""

    medusa_choices: str | Sequence[Sequence[int]] | None = setting(
        None, 'shape of the tree: paths of ranks, `"file"` (paths in config.json), or `"measured"`'
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.medusa_choices not in (None, MEASURED, FROM_FILE):
            read_choices(self.medusa_choices, "speculation")

    @property
    def makes_trees(self) -> bool:
        return self.tree_width > 1 or self.medusa_choices is not None


@dataclass
class _RequestState:
    """The newest hidden state of a request, and its rankings whose tokens are not committed yet."""

    epoch: int
    end: int  # one past the position of the hidden state
    hidden: Tensor  # the newest hidden state, [1, hidden]
    pending: PendingRanks = field(default_factory=PendingRanks)
    length: int = 0  # text tokens whose ranks are counted


class MedusaDrafter(Drafter):
    """Drafts all positions in one pass over the newest hidden state of each request. It has no KV rows."""

    traits = HEAD

    def __init__(
        self,
        runner: MedusaRunner,
        tap: Tap,
        vocabulary: DraftVocabulary,
        width: int,
        choices: Paths | MeasuredRanks | None = None,
    ) -> None:
        self._runner = runner
        self._tap = tap
        self._vocabulary = vocabulary
        self._width = width
        self._choices = choices
        self._states: dict[int, _RequestState] = {}  # by request id
        self.traits = replace(self.traits, needs=DrafterNeeds((tap,)))

    def observe(self, commits: Sequence[Commit]) -> None:
        for commit in commits:
            request = commit.request
            previous = self._states.get(request.request_id)
            # Clone: a view would keep the states of the whole pass alive.
            hidden = commit.hidden[self._tap][-1:].clone()
            end, length = commit.first + commit.rows, len(request.tokens)
            state = _RequestState(request.epoch, end, hidden, length=length)
            if previous is not None and previous.epoch == request.epoch:
                state.pending = previous.pending
                if isinstance(self._choices, MeasuredRanks):
                    state.pending.settle(previous.length, request.tokens, self._choices)
            self._states[request.request_id] = state

    def propose(self, tasks: Sequence[DraftTask]) -> list[Draft]:
        """Return a chain or a tree per task; empty if the newest hidden state is missing."""
        return draft_where_ready(tasks, list(map(self._newest_state, tasks)), self._draft)

    def _draft(self, tasks: Sequence[DraftTask], states: Sequence[Tensor]) -> Sequence[Draft]:
        position_counts = [self._runner.spec.num_heads] * len(tasks)
        is_chain = self._choices is None and self._width == 1
        plan = plan_chains(tasks, position_counts, self._vocabulary) if is_chain else None
        output = self._runner.draft(MedusaCall(torch.cat(list(states)), plan))
        if not isinstance(output, HeadOutput):
            return drafts_of_chains(tasks, output)
        logits = output.logits  # [tasks, heads, draft vocabulary]
        if self._choices is None:
            drafts = draft_at_once(
                tasks, position_counts, logits.flatten(0, 1), self._vocabulary, self._width
            )
        else:
            drafts = [self._by_choices(task, rows) for task, rows in zip(tasks, logits, strict=True)]
        return mark_cold(drafts, output.is_cold)

    def forget(self, request: DraftRequest) -> None:
        self._states.pop(request.request_id, None)

    def memory_bytes(self) -> int:
        """Return the bytes of the heads' weights and of one state per request."""
        return self._runner.weight_bytes + sum(state.hidden.nbytes for state in self._states.values())

    def _newest_state(self, task: DraftTask) -> Tensor | None:
        """Return the hidden state for a request's next draft; None if it is missing or no draft is requested."""
        request, state = task.request, self._states.get(task.request.request_id)
        if state is None or (state.epoch, state.end) != (request.epoch, len(request.tokens) - 1):
            return None
        return state.hidden if task.max_nodes >= 1 and task.max_depth >= 1 else None

    def _by_choices(self, task: DraftTask, logits: Tensor) -> Draft:
        """Return a tree whose nodes are the tokens at the ranks of the chosen paths, and store the ranking.

        Under *traversal* above temperature 0, only the shape is used and its nodes are sampled.
        """
        depth = min(task.max_depth, len(logits))
        if isinstance(self._choices, MeasuredRanks):
            paths = self._choices.paths(task.max_nodes, depth)
        else:
            assert self._choices is not None
            paths = fitting(self._choices, task.max_nodes, depth)
        sampling, spread = task.request.sampling, self._vocabulary.spread(logits)
        if sampling.rule is Rule.TRAVERSAL and sampling.record["temperature"] > 0:
            tree = _ShapedTree(task._replace(max_depth=depth), paths)
            grow_levels([tree], [0], lambda _, rows: spread[rows], branches=True)
            return tree.draft()
        ranked = _ranked(task, spread)
        self._states[task.request.request_id].pending.add(len(task.request.tokens), ranked)
        return _tree_of_ranks(task, paths, ranked)


class _ShapedTree(HeadTree):
    """A sampled tree in the shape of a list of paths."""

    def __init__(self, task: DraftTask, paths: Paths) -> None:
        super().__init__(task, MAX_DRAFT_NODES, MAX_DRAFT_NODES)
        self._paths = paths

    def shape(self) -> Shape:
        return shape_of(self._paths)


class _FuturePositions(GrowingTree):
    """Presents all future positions as the newest nodes of a tree, so that their tokens can be ranked together."""

    def __init__(self, task: DraftTask, count: int) -> None:
        super().__init__(task)
        self.frontier = list(range(count))

    def positions(self) -> npt.NDArray[np.int64]:
        return len(self.request.tokens) + np.arange(len(self.frontier))

    def paths(self) -> list[GrammarPath | None]:
        """Return paths for grammar masks; only the first position directly follows the text."""
        return [(), *([None] * (len(self.frontier) - 1))]


def _ranked(task: DraftTask, logits: Tensor) -> list[list[int]]:
    """Return the best `RANKS` tokens per position under the target's noise; fewer if fewer are possible."""
    positions = _FuturePositions(task, len(logits))
    scores, tokens = best_tokens(positions, with_fixed_corrections([positions], logits), RANKS)
    counts = (scores > -torch.inf).sum(dim=1).tolist()
    return [row[:count] for row, count in zip(tokens.tolist(), counts, strict=True)]


def _tree_of_ranks(task: DraftTask, paths: Paths, ranked: list[list[int]]) -> Draft:
    """Return the nodes of these paths; nodes without a token at their rank are dropped with their descendants."""
    nodes: dict[tuple[int, ...], int] = {(): ROOT}
    tokens: list[int] = []
    parents: list[int] = []
    for path in paths:
        ranked_tokens = ranked[len(path) - 1]
        if path[:-1] in nodes and path[-1] < len(ranked_tokens):
            parents.append(nodes[path[:-1]])
            nodes[path] = len(tokens)
            tokens.append(ranked_tokens[path[-1]])
    return Draft(tuple(tokens), tuple(parents), len(task.request.tokens), task.request.epoch)


def build_medusa(config: MedusaConfig, resources: DrafterResources) -> MedusaDrafter:
    """Load the heads and create the drafter."""
    path = head_path(config.model, "medusa", resources)
    head = open_fitting(path, "medusa", resources)
    choices: Paths | MeasuredRanks | None = None
    if config.medusa_choices == MEASURED:
        choices = MeasuredRanks(head.spec.num_heads)
    elif config.medusa_choices == FROM_FILE:
        if "medusa_choices" not in head.files.config:
            raise RequestError(
                f"{path}: its config.json has no medusa_choices; give a list, or leave out medusa_choices"
            )
        choices = read_choices(head.files.config["medusa_choices"], str(path))
    elif config.medusa_choices is not None:
        choices = read_choices(config.medusa_choices, "speculation")
    (tap,) = taps_of(head.spec)
    runner, vocabulary = resources.target.heads.medusa(head), vocabulary_of(head, resources)
    return MedusaDrafter(runner, tap, vocabulary, config.tree_width, choices)


KIND = drawn_kind(
    MedusaDrafter,
    "heads that each draft one position from the last hidden state",
    MedusaConfig,
    build_medusa,
    makes_trees=lambda settings: settings.makes_trees,
)
