"""Heads that guess token by token: what EAGLE and its kin share."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from foreword.acceptance.request import DraftSampling
from foreword.acceptance.rules.rule import Rule
from foreword.backends.batch import MAX_DRAFT_NODES, Ints, Tap
from foreword.backends.interface import ChainPlan, HeadInput, HeadOutput, HeadRunner
from foreword.drafters.heads.head_tree import HeadTree
from foreword.drafters.heads.levels import level_arrays
from foreword.drafters.heads.vocabulary import DraftVocabulary
from foreword.drafters.model.next_level import (
    add_tokens,
    are_plainly_greedy,
    grow_chains,
    grow_trees,
    has_fixed_corrections,
)
from foreword.kv.extra_rows import ExtraRows
from foreword.kv.spec import RowSpec
from foreword.speculation.draft import Draft
from foreword.speculation.drafting import Ask, Commit, DrafterNeeds, DraftRequest, RequestRows
from foreword.speculation.rows.layout import BatchBuffers, SequenceRows

LAG = 1
"""A row is made from its own token and the features of the position before: the first token has none."""

FILLED_AT_ONCE = 16
"""Committed rows that are left to the next guess; more of them are filled as soon as they are told of."""


@dataclass(frozen=True)
class _Run:
    """Rows of one request that are made from the target's own states."""

    pages: RequestRows
    rows: ExtraRows
    tokens: Sequence[int]
    first: int
    end: int

    @property
    def start(self) -> int:
        """The first row that these see."""
        return self.first if self.first > self.rows.end else max(self.rows.begin, LAG)


class StepwiseHead:
    """Lets a head write ahead of the target, level by level.

    Its KV rows are in the target's pages and follow the request wherever it goes: it keeps nothing by itself. The rows
    of committed tokens are made from the target's states, those of guesses from what the head itself has said; the
    latter are made again when their tokens are committed.
    """

    def __init__(
        self,
        runner: HeadRunner,
        rows: RowSpec,
        taps: tuple[Tap, ...],
        vocabulary: DraftVocabulary,
        width: int,
    ) -> None:
        self._runner = runner
        self._kind = rows.name
        self._taps = taps
        self._vocabulary = vocabulary
        self._width = width
        self._buffers = BatchBuffers()
        self.needs = DrafterNeeds(taps, (rows,), scratch=MAX_DRAFT_NODES if width > 1 else 0)

    def observe(self, commits: Sequence[Commit]) -> None:
        """Keep the newest states; where guesses are wanted, long stretches get their rows at once."""
        runs = []
        for commit in commits:
            assert commit.pages is not None
            rows = commit.pages.kv.rows_of(self._kind, LAG)
            rows.add(commit.first, self._features(commit))
            first = rows.missing_from(LAG)
            end = min(commit.settled, rows.known + LAG)
            if commit.is_on and end - first > FILLED_AT_ONCE:
                runs.append(_Run(commit.pages, rows, commit.request.tokens, first, end))
        if runs:
            self._run_true(runs, wanted=0)
        for commit in commits:
            if commit.pages is not None:
                commit.pages.kv.rows_of(self._kind, LAG).keep_newest()

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        """A chain, or a tree of `tree_width`; none where the newest token's states are not known."""
        runs = {index: run for index, ask in enumerate(asks) if (run := self._newest(ask)) is not None}
        if not runs:
            return [Draft()] * len(asks)
        asked, chosen = [asks[index] for index in runs], list(runs.values())
        found = self._chains(asked, chosen) if self._width == 1 else None
        if found is None:
            found = self._grow(asked, chosen)
        drafts = dict(zip(runs, found, strict=True))
        return [drafts.get(index, Draft()) for index in range(len(asks))]

    def forget(self, request: DraftRequest) -> None:
        """Nothing is kept here: the rows go with the request's pages."""

    def memory_bytes(self) -> int:
        """Its own weights; its KV rows are part of the engine's memory."""
        return self._runner.weight_bytes

    def _features(self, commit: Commit) -> Tensor:
        # A copy even of one: a view of it would keep the states of all who were in the pass.
        return torch.cat([commit.hidden[tap] for tap in self._taps], dim=-1)

    def _newest(self, ask: Ask) -> _Run | None:
        """The rows up to the newest token's, which is always run: its logits are needed."""
        if ask.pages is None or ask.max_nodes < 1 or ask.max_depth < 1:
            return None
        rows, end = ask.pages.kv.rows_of(self._kind, LAG), len(ask.request.tokens)
        first = min(rows.missing_from(LAG), end - 1)
        if not rows.first_known <= first - LAG or rows.known < end - LAG or end <= LAG:
            return None
        return _Run(ask.pages, rows, ask.request.tokens, first, end)

    def _chains(self, asks: list[Ask], runs: list[_Run]) -> list[Draft] | None:
        """All guesses in one call of the runner; None if it cannot, or if a draft must tell what it was drawn from."""
        samplings = [ask.request.sampling for ask in asks]
        if not all(_is_drawn_alone(sampling) for sampling in samplings):
            return None
        # A guess that nothing follows needs no row.
        rooms = [run.pages.kv.reserved - run.end + 1 for run in runs]
        steps = [min(a.max_nodes, a.max_depth, room) for a, room in zip(asks, rooms, strict=True)]
        plan = ChainPlan(
            np.array([run.end for run in runs], np.int32),
            np.array(steps, np.int32),
            np.array([sampling.record for sampling in samplings]),
            self._vocabulary.token_ids,
            self._vocabulary.vocab_size,
        )
        guesses = self._runner.chain(self._true_rows(runs, wanted=1), plan, runs[0].pages.store)
        if guesses is None:
            return None
        _fill(runs)
        return [
            Draft.chain(tokens, run.end, ask.request.epoch)
            for ask, run, tokens in zip(asks, runs, guesses, strict=True)
        ]

    def _grow(self, asks: list[Ask], runs: list[_Run]) -> list[Draft]:
        """Level by level, those trees together that are not done."""
        trees = [
            HeadTree(ask, self._width, run.pages.kv.reserved - run.end)
            for ask, run in zip(asks, runs, strict=True)
        ]
        self._grow_levels(trees, runs)
        return [tree.draft() for tree in trees]

    def _grow_levels(self, trees: list[HeadTree], runs: list[_Run]) -> None:
        output, tables = self._run_true(runs, wanted=1)
        starts = np.array([max(run.rows.begin, LAG) for run in runs], np.int32)
        store, are_greedy = runs[0].pages.store, self._width == 1 and are_plainly_greedy(trees)
        while True:
            sizes = [len(tree.frontier) for tree in trees]
            if are_greedy:
                add_tokens(trees, self._vocabulary.likeliest(output.logits), {})
            elif self._width == 1:
                grow_chains(trees, self._vocabulary.spread(output.logits))
            else:
                grow_trees(trees, self._vocabulary.spread(output.logits))
            sources = _sources(trees, sizes)
            going = [place for place, tree in enumerate(trees) if not tree.is_done]
            if not going:
                return
            if len(going) < len(trees):
                trees, starts, tables = [trees[place] for place in going], starts[going], tables[going]
            arrays = level_arrays(trees, tables, store.page_size)
            states = _taken(output.states, sources)
            output = self._runner.forward(HeadInput(arrays, starts, states, are_own=True), store)

    def _run_true(self, runs: Sequence[_Run], wanted: int) -> tuple[HeadOutput, Ints]:
        """Make rows from the target's states; returns the outcome of the last `wanted` of each, and all their pages."""
        rows = self._true_rows(runs, wanted)
        output = self._runner.forward(rows, runs[0].pages.store)
        _fill(runs)
        return output, rows.arrays.block_tables

    def _true_rows(self, runs: Sequence[_Run], wanted: int) -> HeadInput:
        parts = [
            SequenceRows(
                run.pages.kv, run.tokens, run.end - run.first, Draft(), run_logits=wanted, first=run.first
            )
            for run in runs
        ]
        states = [run.rows.states(run.first - LAG, run.end - LAG) for run in runs]
        arrays = self._buffers.lay_out(runs[0].pages.cache, parts, ()).arrays
        starts = np.array([run.start for run in runs], np.int32)
        return HeadInput(arrays, starts, states[0] if len(states) == 1 else torch.cat(states), are_own=False)


def _is_drawn_alone(sampling: DraftSampling) -> bool:
    """Whether a guess needs nothing but the head's logits, and tells nothing but its token."""
    is_told = sampling.rule is not Rule.COUPLED and sampling.record["temperature"] > 0
    return not is_told and not has_fixed_corrections(sampling)


def _fill(runs: Sequence[_Run]) -> None:
    """The rows are there now."""
    for run in runs:
        run.rows.fill(run.first, run.end)
        run.rows.mark(run.pages.kv.chain)


def _sources(trees: Sequence[HeadTree], sizes: Sequence[int]) -> list[int]:
    """For every node that is read next, the row of its parent among those that were read last."""
    rows: list[int] = []
    first = 0
    for tree, size in zip(trees, sizes, strict=True):
        if not tree.is_done:
            rows += (first + place for place in tree.sources)
        first += size
    return rows


def _taken(states: Tensor, rows: list[int]) -> Tensor:
    """These rows; no copy where they are all of them in their order, as with chains."""
    return states if rows == list(range(len(states))) else states[torch.tensor(rows)]
