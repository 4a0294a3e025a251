"""EAGLE, EAGLE-3, P-EAGLE and MTP: heads that read the hidden states of the previous position."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from torch import Tensor

from foreword.backends.batch import MAX_DRAFT_NODES, Tap, concatenated_states
from foreword.backends.interface import HeadCall, HeadInput, HeadOutput, KnownChains, PendingChains
from foreword.drafters.heads.chains import (
    EarlyChain,
    EarlyChains,
    drafts_of_chains,
    join_sources,
    needs_only_logits,
    plan_after_pass,
    plan_chains,
)
from foreword.drafters.heads.growing import draft_at_once, grow_by_passes
from foreword.drafters.heads.in_pages import HeadInPages, RowRange, mark_computed
from foreword.drafters.heads.loading import (
    HEAD,
    HEAD_BY_LEVEL,
    LoadedHead,
    WindowedHeadConfig,
    draft_where_ready,
    head_drafter_kind,
    load_head,
)
from foreword.drafters.registry import DrafterResources, drawn_kind
from foreword.drafters.trees import HeadTree
from foreword.kv.states import States, stacked
from foreword.models.heads.published import MASK_HIDDEN
from foreword.speculation.draft import NO_DRAFT, Draft, mark_cold
from foreword.speculation.drafting import Commit, DraftRequest, DraftTask, InFlight, RequestRows
from foreword.speculation.layout import SequenceRows
from foreword.speculation.settings import setting

STATE_OFFSET = 1
"""A row is computed from its token and the states of the previous position; the first token has no row."""


class StepwiseHead(HeadInPages):
    """Drafts level by level. Rows of draft tokens are computed from the head's own states."""

    traits = HEAD_BY_LEVEL

    def __init__(self, head: LoadedHead, width: int) -> None:
        super().__init__(head, STATE_OFFSET, scratch=MAX_DRAFT_NODES if width > 1 else 0)
        self._runner = head.runner
        self._width = width
        self.traits = replace(
            self.traits,
            starts_early=width == 1 and head.runner.drafts_early,
            stops_itself=width == 1 and head.runner.stops,
            acceptance_by_level=head.acceptance_by_level,
        )
        self._early = EarlyChains()

    def propose(self, tasks: Sequence[DraftTask]) -> list[Draft]:
        """Return a chain, or a tree of `tree_width`; empty if the newest states are missing."""
        return draft_where_ready(tasks, list(map(self._missing_range, tasks)), self._draft)

    def observe(self, commits: Sequence[Commit]) -> None:
        super().observe(commits)
        self._early.observe(commits)

    def forget(self, request: DraftRequest) -> None:
        self._early.forget(request.request_id)

    def draft_early(self, unjudged: Sequence[InFlight], hidden: Mapping[Tap, Tensor], drawn: Tensor) -> bool:
        """Start chains after the tokens that the pass may commit, and compute the rows of these tokens."""
        entries = [entry for entry in unjudged if self._can_start_early(entry)]
        if not entries:
            return False
        tasks = [entry.task for entry in entries]
        plan = plan_chains(tasks, [MAX_DRAFT_NODES] * len(tasks), self._vocabulary)
        if plan is None:
            return False
        rows = self._rows_in_flight(entries, hidden)
        call = HeadCall(rows, _pages(tasks[0]).store, plan_after_pass(plan, entries, drawn))
        chains = self._runner.draft(call)
        if not isinstance(chains, PendingChains):
            return isinstance(chains, KnownChains) and chains.is_cold
        for entry, indices in zip(entries, chains.token_indices, strict=True):
            self._early.keep(entry.task.request.request_id, EarlyChain.of(entry, chains.tokens, indices))
        return chains.tokens.is_cold

    def _can_start_early(self, entry: InFlight) -> bool:
        """Return whether all earlier rows are computed, and there is room for the rows of the whole draft."""
        pages, length = _pages(entry.task), len(entry.task.request.tokens)
        return self._rows_of(pages).end == length and pages.kv.reserved > length + len(entry.draft)

    def _rows_in_flight(self, entries: Sequence[InFlight], hidden: Mapping[Tap, Tensor]) -> HeadInput:
        """Return a row for each token that the pass may commit; each request's first logits start its draft."""
        sequences: list[SequenceRows] = []
        starts: list[int] = []  # first row that each request's rows attend to
        bounds: list[tuple[int, int]] = []  # (first, end) of each request's rows in the states of the pass
        for entry in entries:
            pages, tokens = _pages(entry.task), entry.task.request.tokens
            rows = 1 + len(entry.draft)  # the target's own token, and all draft tokens
            drawn_at = range(entry.drawn_at, entry.drawn_at + rows)
            sequences.append(
                SequenceRows(pages.kv, tokens, rows, NO_DRAFT, first=len(tokens), drawn_at=drawn_at)
            )
            starts.append(self._start(self._rows_of(pages), len(tokens)))
            bounds.append((entry.states_at, entry.states_at + rows))
        arrays = self._buffers.lay_out(_pages(entries[0].task).cache, sequences, ()).arrays
        arrays.logit_rows[:] = arrays.row_starts[:-1]
        states = concatenated_states(hidden, self._taps)
        return HeadInput(arrays, np.array(starts, np.int32), _contiguous(states, bounds), are_own=False)

    def _missing_range(self, task: DraftTask) -> RowRange | None:
        """Return the missing rows and the newest token's; None if no draft is requested or states are missing."""
        request, max_nodes, max_depth, pages, _ = task
        if pages is None or max_nodes < 1 or max_depth < 1:
            return None
        rows, tokens = self._rows_of(pages), request.tokens
        begin, end = rows.states_begin, len(tokens)
        first = min(max(rows.end, begin + STATE_OFFSET), end - 1)
        has_states = begin <= first - STATE_OFFSET and end - STATE_OFFSET <= rows.states_end
        if not has_states or end <= STATE_OFFSET:
            return None
        return self._range(pages, tokens, first, end)

    def _draft(self, tasks: list[DraftTask], ranges: list[RowRange]) -> list[Draft]:
        if self.traits.stops_itself and len(tasks) > 1:
            can_chain = [needs_only_logits(task.request.sampling) for task in tasks]
            if any(can_chain) and not all(can_chain):
                return self._draft_separately(tasks, ranges, can_chain)
        early = [self._early.take(row_range, task) for row_range, task in zip(ranges, tasks, strict=True)]
        mark_computed(
            [row_range for row_range, draft in zip(ranges, early, strict=True) if draft is not None]
        )
        without_draft = [
            row_range if draft is None else None for row_range, draft in zip(ranges, early, strict=True)
        ]
        new_drafts = draft_where_ready(tasks, without_draft, self._draft_now)
        drafts = [new if draft is None else draft for draft, new in zip(early, new_drafts, strict=True)]
        return join_sources(drafts)

    def _draft_separately(
        self, tasks: list[DraftTask], ranges: list[RowRange], can_chain: list[bool]
    ) -> list[Draft]:
        """Draft separately for requests that need more than logits (grammar, bias), so that the others use chains."""
        for_chains = [row_range if can else None for row_range, can in zip(ranges, can_chain, strict=True)]
        for_levels = [None if can else row_range for row_range, can in zip(ranges, can_chain, strict=True)]
        chains = draft_where_ready(tasks, for_chains, self._draft)
        others = draft_where_ready(tasks, for_levels, self._draft)
        return [chain if can else other for chain, other, can in zip(chains, others, can_chain, strict=True)]

    def _draft_now(self, tasks: list[DraftTask], ranges: list[RowRange]) -> list[Draft]:
        """Draft in one call of the runner, or level by level if it returns logits."""
        plan = None
        if self._width == 1:
            # The last draft token needs no row.
            max_tokens = [row_range.pages.kv.reserved - row_range.end + 1 for row_range in ranges]
            plan = plan_chains(tasks, max_tokens, self._vocabulary, self.traits.stops_itself)
        rows, store = self._rows_from_target(ranges, num_logits=1), ranges[0].pages.store
        output = self._runner.draft(HeadCall(rows, store, plan))
        mark_computed(ranges)
        if not isinstance(output, HeadOutput):
            return drafts_of_chains(tasks, output)
        trees = [
            HeadTree(task, self._width, row_range.pages.kv.reserved - row_range.end)
            for task, row_range in zip(tasks, ranges, strict=True)
        ]
        tables = rows.arrays.block_tables
        grow_by_passes(trees, output, tables, rows.starts, self._runner, store, self._vocabulary)
        return [tree.draft() for tree in trees]


def _pages(task: DraftTask) -> RequestRows:
    assert task.pages is not None
    return task.pages


def _contiguous(states: States, bounds: Sequence[tuple[int, int]]) -> States:
    """Return the rows within these bounds, without a copy if they are contiguous."""
    if all(end == first for (_, end), (first, _) in pairwise(bounds)):
        return states[bounds[0][0] : bounds[-1][1]]
    return stacked([states[first:end] for first, end in bounds])


EAGLE = head_drafter_kind(
    "eagle", "an EAGLE-1 or EAGLE-2 head on the target's last hidden states", StepwiseHead
)
EAGLE3 = head_drafter_kind("eagle3", "an EAGLE-3 head on the target's hidden states", StepwiseHead)


class PEagleHead(StepwiseHead):
    """An EAGLE-3 head that also processes mask rows after the newest token, and drafts a token from each of them."""

    traits = HEAD

    def __init__(self, head: LoadedHead, width: int) -> None:
        super().__init__(head, width)
        assert head.spec.mask_token_id is not None
        self._mask, self._mask_features = head.spec.mask_token_id, head.tensors[MASK_HIDDEN].view(1, -1)

    def _draft(self, tasks: list[DraftTask], ranges: list[RowRange]) -> list[Draft]:
        mask_counts = [
            min(task.max_nodes - 1, task.max_depth - 1, row_range.pages.kv.reserved - row_range.end)
            for task, row_range in zip(tasks, ranges, strict=True)
        ]
        tails = [
            Draft.chain([self._mask] * count, row_range.end)
            for count, row_range in zip(mask_counts, ranges, strict=True)
        ]
        rows = self._rows_from_target(ranges, num_logits=1, tails=tails, tail_features=self._mask_features)
        position_counts = [1 + count for count in mask_counts]
        plan = plan_chains(tasks, position_counts, self._vocabulary) if self._width == 1 else None
        output = self._runner.draft(HeadCall(rows, ranges[0].pages.store, plan))
        mark_computed(ranges)
        if not isinstance(output, HeadOutput):
            return drafts_of_chains(tasks, output)
        drafts = draft_at_once(tasks, position_counts, output.logits, self._vocabulary, self._width)
        return list(mark_cold(drafts, output.is_cold))


P_EAGLE = head_drafter_kind("p_eagle", "an EAGLE-3 head that drafts many tokens in one pass", PEagleHead)


@dataclass(frozen=True)
class MtpConfig(WindowedHeadConfig):
    """Location of the module, and its input."""

    model: str = setting("", "module: a local path or a hub id; empty: the target's own files")
    pre_norm: bool = setting(
        False, "read the target's last hidden states before the final norm, not after it"
    )


def build_mtp(config: MtpConfig, resources: DrafterResources) -> StepwiseHead:
    head = load_head(config, "mtp", resources)
    taps = tuple(Tap(tap.layer, not config.pre_norm) for tap in head.taps)
    return StepwiseHead(replace(head, taps=taps), config.tree_width)


MTP = drawn_kind(StepwiseHead, "the MTP module in the target's own checkpoint", MtpConfig, build_mtp)
