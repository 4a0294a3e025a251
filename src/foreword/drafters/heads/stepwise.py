"""Heads that guess token by token: what EAGLE and its kin share."""

from collections.abc import Sequence

import numpy as np

from foreword.backends.batch import MAX_DRAFT_NODES
from foreword.drafters.heads.chain_plan import drafted, plan_chains
from foreword.drafters.heads.growing import Begun, grow_by_passes
from foreword.drafters.heads.head_tree import HeadTree
from foreword.drafters.heads.in_pages import HeadInPages, Run, fill
from foreword.drafters.heads.loading import LoadedHead
from foreword.speculation.draft import Draft
from foreword.speculation.drafting import Ask

LAG = 1
"""A row is made from its own token and the features of the position before: the first token has none."""


class StepwiseHead(HeadInPages):
    """Lets a head write ahead of the target, level by level. Rows of guesses are made from what it said itself."""

    def __init__(self, head: LoadedHead, width: int) -> None:
        super().__init__(head, LAG, scratch=MAX_DRAFT_NODES if width > 1 else 0)
        self._runner = head.runner
        self.acceptance_by_level = head.acceptance_by_level
        self._width = width

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        """A chain, or a tree of `tree_width`; none where the newest token's states are not known."""
        runs = {index: run for index, ask in enumerate(asks) if (run := self._newest(ask)) is not None}
        if not runs:
            return [Draft()] * len(asks)
        found = self._guess([asks[index] for index in runs], list(runs.values()))
        drafts = dict(zip(runs, found, strict=True))
        return [drafts.get(index, Draft()) for index in range(len(asks))]

    def _newest(self, ask: Ask) -> Run | None:
        """The rows up to the newest token's, which is always run: its logits are needed."""
        if ask.pages is None or ask.max_nodes < 1 or ask.max_depth < 1:
            return None
        rows, end = self._rows_of(ask.pages), len(ask.request.tokens)
        first = min(rows.missing_from(LAG), end - 1)
        if not rows.first_known <= first - LAG or rows.known < end - LAG or end <= LAG:
            return None
        return Run(ask.pages, rows, ask.request.tokens, first, end, LAG)

    def _guess(self, asks: list[Ask], runs: list[Run]) -> list[Draft]:
        found = self._chains(asks, runs) if self._width == 1 else None
        return self._grow(asks, runs) if found is None else found

    def _chains(self, asks: list[Ask], runs: list[Run]) -> list[Draft] | None:
        """All guesses in one call of the runner; None if it cannot, or if a draft must tell what it was drawn from."""
        # A guess that nothing follows needs no row.
        rooms = [run.pages.kv.reserved - run.end + 1 for run in runs]
        plan = plan_chains(asks, rooms, self._vocabulary)
        if plan is None:
            return None
        guesses = self._runner.chain(self._true_rows(runs, wanted=1), plan, runs[0].pages.store)
        if guesses is None:
            return None
        fill(runs)
        return drafted(asks, guesses)

    def _grow(self, asks: list[Ask], runs: list[Run]) -> list[Draft]:
        """Level by level, those trees together that are not done."""
        trees = [
            HeadTree(ask, self._width, run.pages.kv.reserved - run.end)
            for ask, run in zip(asks, runs, strict=True)
        ]
        self._grow_levels(trees, runs)
        return [tree.draft() for tree in trees]

    def _grow_levels(self, trees: list[HeadTree], runs: list[Run]) -> None:
        output, tables = self._run_true(runs, wanted=1)
        starts = np.array([max(run.rows.begin, LAG) for run in runs], np.int32)
        begun = Begun(output, tables, starts)
        grow_by_passes(trees, begun, self._runner, runs[0].pages.store, self._vocabulary)
