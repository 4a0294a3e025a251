"""The base of heads with KV rows in the target's pages, which computes the rows of committed tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from foreword.backends.batch import ConcatenatedStates, Ints, Tap, concatenated_states, num_states
from foreword.backends.interface import HeadInput, head_output
from foreword.drafters.heads.loading import HEAD, LoadedRows
from foreword.kv.extra_rows import ExtraRows
from foreword.kv.states import States, stacked
from foreword.speculation.draft import Draft
from foreword.speculation.drafting import Commit, Drafter, DrafterNeeds, DraftTask, RequestRows
from foreword.speculation.layout import BatchBuffers, SequenceRows
from foreword.speculation.observing import KeptStates

# Missing rows of committed tokens that are left to the next draft; `observe` computes more.
FILLED_AT_ONCE = 16

KEPT_TOGETHER, KEPT_ALONE = 768, 16
"""Maximum rows of a pass whose states are stored as one tensor, if several requests are observed, and if one is.

The tensor lives as long as a request needs one of its rows. Therefore the states of longer passes are copied.
"""


class RowRange(NamedTuple):
    """A range of one request's rows that a head computes from the target's states."""

    pages: RequestRows
    rows: ExtraRows  # record of the rows that are already computed
    tokens: Sequence[int]  # token ids of the text
    first: int
    end: int  # exclusive
    start: int  # first row to which the rows of the range attend


class HeadInPages(Drafter):
    """Base class of heads with KV rows in the request's pages.

    Rows of committed tokens are computed from the target's states. Rows of draft tokens are computed from the head's
    states, and computed again from the target's when their tokens are committed.
    """

    traits = HEAD

    def __init__(self, head: LoadedRows, state_offset: int, scratch: int) -> None:
        """Create a head that computes a token's row from the states `state_offset` positions before the token.

        The first `state_offset` tokens therefore have no row. With a window, the rows of a pass attend only to the
        newest positions, counted back from the first row of the pass.
        """
        self._rows_runner = head.runner
        self._rows_name = head.record or head.rows.name
        self._taps = head.taps
        self._vocabulary = head.vocabulary
        self._state_offset, self._window = state_offset, head.window
        self._buffers = BatchBuffers()
        self.traits = replace(self.traits, needs=DrafterNeeds(head.taps, (head.rows,), scratch=scratch))

    @property
    def is_ready(self) -> bool:
        return self._rows_runner.is_ready

    def observe(self, commits: Sequence[Commit]) -> None:
        """Store the newest states. If the drafter is active and many rows are missing, compute them now."""
        ranges: list[RowRange] = []
        observed: list[ExtraRows] = []
        state_offset = self._state_offset
        for commit, (states, first_state) in zip(commits, self._tapped_states(commits), strict=True):
            assert commit.pages is not None
            rows = self._rows_of(commit.pages)
            rows.add(commit.first, states, first_state, commit.rows)
            observed.append(rows)
            if commit.is_on and commit.settled - rows.end > FILLED_AT_ONCE:
                first = rows.missing_from(state_offset)
                end = min(commit.settled, rows.states_end + state_offset)
                if end - first > FILLED_AT_ONCE:
                    ranges.append(self._range(commit.pages, commit.request.tokens, first, end))
        if ranges:
            self._fill_rows(ranges)
        for rows in observed:
            rows.keep_newest()

    def memory_bytes(self) -> int:
        """Return the bytes of its weights; its KV rows are part of the engine's memory."""
        return self._rows_runner.weight_bytes

    def _rows_of(self, pages: RequestRows) -> ExtraRows:
        return pages.kv.rows_of(self._rows_name, self._state_offset)

    def _known_pages(self, task: DraftTask) -> RequestRows | None:
        """Return the pages of a request; None if no draft is requested or states of earlier tokens are missing."""
        if task.pages is None or task.max_nodes < 1 or task.max_depth < 1:
            return None
        return task.pages if self._rows_of(task.pages).states_end >= len(task.request.tokens) - 1 else None

    def _missing(
        self, tasks: Sequence[DraftTask], pages: Sequence[RequestRows]
    ) -> tuple[list[RowRange], Ints]:
        """Return the missing rows of committed tokens, and the first row that each request attends to."""
        ranges, starts = [], []
        for task, task_pages in zip(tasks, pages, strict=True):
            rows, tokens = self._rows_of(task_pages), task.request.tokens
            end = len(tokens) - 1
            row_range = self._range(task_pages, tokens, rows.missing_from(self._state_offset), end)
            if row_range.first < end:
                ranges.append(row_range)
            starts.append(max(row_range.start, self._start(rows, end)))
        return ranges, np.array(starts, np.int32)

    def _range(self, pages: RequestRows, tokens: Sequence[int], first: int, end: int) -> RowRange:
        """Return these rows of a request, with the first row to which they attend."""
        rows = self._rows_of(pages)
        start = first if first > rows.end else self._start(rows, first)
        return RowRange(pages, rows, tokens, first, end, start)

    def _start(self, rows: ExtraRows, first: int) -> int:
        """Return the first row that a pass attends to, if `first` is the first row that the pass computes."""
        oldest = max(rows.begin, self._state_offset)
        return oldest if self._window is None else max(oldest, first + 1 - self._window)

    def _tapped_states(self, commits: Sequence[Commit]) -> Sequence[tuple[States, int]]:
        """Return, per commit, a tensor of states and the index of its first row.

        States of long passes are copied, so that one request does not keep the whole pass's states alive.
        """
        hidden = [commit.hidden for commit in commits]
        in_pass = [states for states in hidden if isinstance(states, KeptStates) and states.are_together]
        if commits and len(in_pass) == len(commits):
            of_pass = in_pass[0].of_pass
            max_rows = KEPT_TOGETHER if len(commits) > 1 else KEPT_ALONE
            if num_states(of_pass) <= max_rows and all(states.of_pass is of_pass for states in in_pass):
                joined = concatenated_states(of_pass, self._taps)
                return [(joined, states.first) for states in in_pass]
        return [(self._copied_states(states), 0) for states in hidden]

    def _copied_states(self, states: Mapping[Tap, Tensor]) -> States:
        """Return a copy of a request's states at this head's taps, [rows, taps * hidden]."""
        if isinstance(states, KeptStates) and states.are_together:
            of_pass = states.of_pass
            if isinstance(of_pass, ConcatenatedStates) and of_pass.taps == self._taps:
                return of_pass.states[states.first : states.stop].copy()
        return torch.cat([states[tap] for tap in self._taps], dim=-1)

    def _fill_rows(self, ranges: Sequence[RowRange]) -> None:
        """Compute these rows from the target's states."""
        head_output(self._rows_runner, self._rows_from_target(ranges, num_logits=0), ranges[0].pages.store)
        mark_computed(ranges)

    def _rows_from_target(
        self,
        ranges: Sequence[RowRange],
        num_logits: int,
        tails: Sequence[Draft] | None = None,
        tail_features: Tensor | None = None,
    ) -> HeadInput:
        """Return the input of a pass over committed rows; of each range, the last `num_logits` rows have logits.

        A range may be followed by a tail of uncommitted tokens, which all have the features `tail_features`.
        """
        sequences: list[SequenceRows] = []
        states: list[States] = []
        for row_range, tail in zip(ranges, tails or [Draft()] * len(ranges), strict=True):
            first, end = row_range.first, row_range.end
            sequences.append(
                SequenceRows(
                    row_range.pages.kv,
                    row_range.tokens,
                    end - first,
                    tail,
                    run_logits=num_logits,
                    first=first,
                )
            )
            states.append(row_range.rows.states(first - self._state_offset, end - self._state_offset))
            if tail_features is not None and len(tail):
                states.append(tail_features.expand(len(tail), -1))
        arrays = self._buffers.lay_out(ranges[0].pages.cache, sequences, ()).arrays
        starts = np.array([row_range.start for row_range in ranges], np.int32)
        return HeadInput(arrays, starts, stacked(states), are_head_states=False)


def mark_computed(ranges: Sequence[RowRange]) -> None:
    """Record that the rows of these ranges are computed."""
    for row_range in ranges:
        row_range.rows.fill(row_range.first, row_range.end)
        row_range.rows.mark(row_range.pages.kv.chain)
