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
    is_drawn_alone,
    join_sources,
    plan_after_pass,
    plan_chains,
)
from foreword.drafters.heads.growing import GrowthStart, draft_at_once, grow_by_passes
from foreword.drafters.heads.in_pages import HeadInPages, RowRange, fill
from foreword.drafters.heads.loading import (
    HEAD,
    HEAD_BY_LEVEL,
    HeadConfig,
    LoadedHead,
    drafts_where,
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
"""A row is computed from its token and the states of the previous position; the first token has none."""


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
        return drafts_where(tasks, list(map(self._newest, tasks)), self._draft)

    def observe(self, commits: Sequence[Commit]) -> None:
        super().observe(commits)
        self._early.observe(commits)

    def forget(self, request: DraftRequest) -> None:
        self._early.forget(request.request_id)

    def draft_early(self, unjudged: Sequence[InFlight], hidden: Mapping[Tap, Tensor], drawn: Tensor) -> bool:
        """Start chains after the tokens that the pass may commit, and compute the rows of these tokens."""
        going = [one for one in unjudged if self._is_up_to_date(one)]
        if not going:
            return False
        tasks = [one.task for one in going]
        plan = plan_chains(tasks, [MAX_DRAFT_NODES] * len(tasks), self._vocabulary)
        if plan is None:
            return False
        rows = self._rows_after(going, hidden)
        call = HeadCall(rows, _pages(tasks[0]).store, plan_after_pass(plan, going, drawn))
        chains = self._runner.draft(call)
        if not isinstance(chains, PendingChains):
            return isinstance(chains, KnownChains) and chains.is_cold
        for one, places in zip(going, chains.token_indices, strict=True):
            chain = EarlyChain.of(one, chains.tokens, places)
            self._early.keep(one.task.request.request_id, chain)
        return chains.tokens.is_cold

    def _is_up_to_date(self, unjudged: InFlight) -> bool:
        """Return whether all earlier rows are filled and there is room for all tokens that may come."""
        pages, length = _pages(unjudged.task), len(unjudged.task.request.tokens)
        return self._rows_of(pages).end == length and pages.kv.reserved > length + len(unjudged.draft)

    def _rows_after(self, going: Sequence[InFlight], hidden: Mapping[Tap, Tensor]) -> HeadInput:
        """Return a row for every token that the pass in flight may commit; drafts start after the first of each."""
        parts, starts, bounds = [], [], []
        for one in going:
            pages, tokens, rows = _pages(one.task), one.task.request.tokens, 1 + len(one.draft)
            drawn_at = range(one.drawn_at, one.drawn_at + rows)
            parts.append(SequenceRows(pages.kv, tokens, rows, NO_DRAFT, first=len(tokens), drawn_at=drawn_at))
            starts.append(max(self._rows_of(pages).begin, STATE_OFFSET))
            bounds.append((one.states_at, one.states_at + rows))
        arrays = self._buffers.lay_out(_pages(going[0].task).cache, parts, ()).arrays
        arrays.logit_rows[:] = arrays.row_starts[:-1]
        states = concatenated_states(hidden, self._taps)
        return HeadInput(arrays, np.array(starts, np.int32), _contiguous(states, bounds), are_own=False)

    def _newest(self, task: DraftTask) -> RowRange | None:
        """Return the missing rows and the newest token's row, whose logits start the draft; None without states."""
        request, max_nodes, max_depth, pages, _ = task
        if pages is None or max_nodes < 1 or max_depth < 1:
            return None
        rows, tokens = pages.kv.rows_of(self._kind, STATE_OFFSET), request.tokens
        begin, end = rows.states_begin, len(tokens)
        first = min(max(rows.end, begin + STATE_OFFSET), end - 1)
        if first - STATE_OFFSET < begin or rows.states_end < end - STATE_OFFSET or end <= STATE_OFFSET:
            return None
        return RowRange(pages, rows, tokens, first, end, STATE_OFFSET)

    def _draft(self, tasks: list[DraftTask], runs: list[RowRange]) -> list[Draft]:
        if self.traits.stops_itself and len(tasks) > 1:
            alone = [is_drawn_alone(task.request.sampling) for task in tasks]
            if any(alone) and not all(alone):
                return self._draft_apart(tasks, runs, alone)
        early = [self._early.take(run, task) for run, task in zip(runs, tasks, strict=True)]
        if None not in early:
            fill(runs)
            return join_sources([draft for draft in early if draft is not None])
        fill([run for run, draft in zip(runs, early, strict=True) if draft is not None])
        others = [run if draft is None else None for run, draft in zip(runs, early, strict=True)]
        made = drafts_where(tasks, others, self._draft_now)
        return join_sources([new if old is None else old for old, new in zip(early, made, strict=True)])

    def _draft_apart(self, tasks: list[DraftTask], runs: list[RowRange], alone: list[bool]) -> list[Draft]:
        """Draft separately for requests that need more than logits (grammar, bias), so that the others use chains."""
        chained = [run if own else None for run, own in zip(runs, alone, strict=True)]
        others = [None if own else run for run, own in zip(runs, alone, strict=True)]
        halves = (drafts_where(tasks, half, self._draft) for half in (chained, others))
        return [first if own else second for own, first, second in zip(alone, *halves, strict=True)]

    def _draft_now(self, tasks: list[DraftTask], runs: list[RowRange]) -> list[Draft]:
        """Draft in one call of the runner, or level by level if it returns logits."""
        # The last draft token needs no row.
        rooms = [run.pages.kv.reserved - run.end + 1 for run in runs]
        plan = None
        if self._width == 1:
            plan = plan_chains(tasks, rooms, self._vocabulary, self.traits.stops_itself)
        rows, store = self._rows_from_target(runs, wanted=1), runs[0].pages.store
        output = self._runner.draft(HeadCall(rows, store, plan))
        fill(runs)
        if not isinstance(output, HeadOutput):
            return drafts_of_chains(tasks, output)
        trees = [
            HeadTree(task, self._width, run.pages.kv.reserved - run.end)
            for task, run in zip(tasks, runs, strict=True)
        ]
        starts = np.array([max(run.rows.begin, STATE_OFFSET) for run in runs], np.int32)
        start = GrowthStart(output, rows.arrays.block_tables, starts)
        grow_by_passes(trees, start, self._runner, store, self._vocabulary)
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
    "eagle", "an EAGLE-1 or EAGLE-2 head on the target's last hidden states", StepwiseHead, HEAD_BY_LEVEL
)
EAGLE3 = head_drafter_kind(
    "eagle3", "an EAGLE-3 head on the target's hidden states", StepwiseHead, HEAD_BY_LEVEL
)


class PEagleHead(StepwiseHead):
    """An EAGLE-3 head that also runs mask rows after the newest token and drafts from all of them."""

    traits = HEAD

    def __init__(self, head: LoadedHead, width: int) -> None:
        super().__init__(head, width)
        assert head.spec.mask_token_id is not None
        self._mask, self._mask_features = head.spec.mask_token_id, head.own[MASK_HIDDEN].view(1, -1)

    def _draft(self, tasks: list[DraftTask], runs: list[RowRange]) -> list[Draft]:
        tails = [
            Draft.chain(
                [self._mask] * min(task.max_nodes - 1, task.max_depth - 1, run.pages.kv.reserved - run.end),
                run.end,
            )
            for task, run in zip(tasks, runs, strict=True)
        ]
        rows = self._rows_from_target(runs, 1, tails, self._mask_features)
        places = [1 + len(tail) for tail in tails]
        plan = plan_chains(tasks, places, self._vocabulary) if self._width == 1 else None
        output = self._runner.draft(HeadCall(rows, runs[0].pages.store, plan))
        fill(runs)
        if not isinstance(output, HeadOutput):
            return drafts_of_chains(tasks, output)
        drafts = draft_at_once(tasks, places, output.logits, self._vocabulary, self._width)
        return list(mark_cold(drafts, output.is_cold))


P_EAGLE = head_drafter_kind("p_eagle", "an EAGLE-3 head that drafts many tokens in one pass", PEagleHead)


@dataclass(frozen=True)
class MtpConfig(HeadConfig):
    """Location of the module, and its input."""

    model: str = setting("", "module: a local path or a hub id; empty: the target's own files")
    pre_norm: bool = setting(
        False, "read the target's last hidden states before the final norm, not after it"
    )


def build_mtp(config: MtpConfig, resources: DrafterResources) -> StepwiseHead:
    head = load_head(config.model, "mtp", resources)
    taps = tuple(Tap(tap.layer, not config.pre_norm) for tap in head.taps)
    return StepwiseHead(replace(head, taps=taps), config.tree_width)


MTP = drawn_kind("the MTP module in the target's own checkpoint", MtpConfig, build_mtp, traits=HEAD_BY_LEVEL)
