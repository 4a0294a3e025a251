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

FILLED_AT_ONCE = 16  # maximum committed rows that the next draft computes; `observe` computes more at once

KEPT_TOGETHER, KEPT_ALONE = 768, 16
"""Maximum rows of a pass whose states stay in one tensor: if several requests are observed, and if only one is.

The tensor lives as long as a request needs one of its rows, so the states of longer passes are copied.
"""


class RowRange(NamedTuple):
    """Rows of one request that are computed from the target's states."""

    pages: RequestRows
    rows: ExtraRows  # which of the head's rows are computed
    tokens: Sequence[int]  # of the text
    first: int
    end: int  # exclusive
    start: int  # first row to which these rows attend


class HeadInPages(Drafter):
    """Base class of heads with KV rows in the request's pages.

    Rows of committed tokens are computed from the target's states. Rows of draft tokens are computed from the head's
    states, and computed again from the target's when their tokens are committed.
    """

    traits = HEAD

    def __init__(self, head: LoadedRows, state_offset: int, scratch: int) -> None:
        """Create a head whose row of a token is computed from the states `state_offset` positions before it.

        The first `state_offset` tokens therefore have no row. With a window, a pass attends to the newest positions
        only, counted from its first row.
        """
        self._filler = head.runner  # computes the rows
        self._kind = head.rows.name
        self._taps = head.taps
        self._vocabulary = head.vocabulary
        self._state_offset, self._window = state_offset, head.window
        self._buffers = BatchBuffers()
        self.traits = replace(self.traits, needs=DrafterNeeds(head.taps, (head.rows,), scratch=scratch))

    @property
    def is_ready(self) -> bool:
        return self._filler.is_ready

    def observe(self, commits: Sequence[Commit]) -> None:
        """Store the newest states. If the drafter is active and many rows are missing, compute them now."""
        runs, observed, state_offset = [], [], self._state_offset
        for commit, (features, at) in zip(commits, self._features(commits), strict=True):
            assert commit.pages is not None
            rows = self._rows_of(commit.pages)
            rows.add(commit.first, features, at, commit.rows)
            observed.append(rows)
            if commit.is_on and commit.settled - rows.end > FILLED_AT_ONCE:
                first = rows.missing_from(state_offset)
                end = min(commit.settled, rows.states_end + state_offset)
                if end - first > FILLED_AT_ONCE:
                    runs.append(self._range(commit.pages, commit.request.tokens, first, end))
        if runs:
            self._fill_rows(runs)
        for rows in observed:
            rows.keep_newest()

    def memory_bytes(self) -> int:
        """Return the bytes of its weights; its KV rows are part of the engine's memory."""
        return self._filler.weight_bytes

    def _rows_of(self, pages: RequestRows) -> ExtraRows:
        return pages.kv.rows_of(self._kind, self._state_offset)

    def _known_pages(self, task: DraftTask) -> RequestRows | None:
        """Return the pages of a request; None if no draft is requested or states of earlier tokens are missing."""
        if task.pages is None or task.max_nodes < 1 or task.max_depth < 1:
            return None
        return task.pages if self._rows_of(task.pages).states_end >= len(task.request.tokens) - 1 else None

    def _missing(
        self, tasks: Sequence[DraftTask], pages: Sequence[RequestRows]
    ) -> tuple[list[RowRange], Ints]:
        """Return the missing rows of committed tokens, and the first row that each request attends to."""
        runs, starts = [], []
        for task, task_pages in zip(tasks, pages, strict=True):
            rows, tokens = self._rows_of(task_pages), task.request.tokens
            end = len(tokens) - 1
            run = self._range(task_pages, tokens, rows.missing_from(self._state_offset), end)
            runs += [run] if run.first < end else []
            starts.append(max(run.start, self._start(rows, end)))
        return runs, np.array(starts, np.int32)

    def _range(self, pages: RequestRows, tokens: Sequence[int], first: int, end: int) -> RowRange:
        """Return these rows of a request, with the first row to which they attend."""
        rows = self._rows_of(pages)
        start = first if first > rows.end else self._start(rows, first)
        return RowRange(pages, rows, tokens, first, end, start)

    def _start(self, rows: ExtraRows, first: int) -> int:
        """Return the first row to which a pass attends whose own first row is `first`."""
        computed = max(rows.begin, self._state_offset)
        return computed if self._window is None else max(computed, first + 1 - self._window)

    def _features(self, commits: Sequence[Commit]) -> Sequence[tuple[States, int]]:
        """Return, per commit, a tensor of states and the index of its first row.

        States of long passes are copied, so that one request does not keep the whole pass's states alive.
        """
        states = [commit.hidden for commit in commits]
        together = [one for one in states if isinstance(one, KeptStates) and one.are_together]
        if commits and len(together) == len(commits):
            of_pass = together[0].of_pass
            most = KEPT_TOGETHER if len(commits) > 1 else KEPT_ALONE
            if num_states(of_pass) <= most and all(one.of_pass is of_pass for one in together):
                joined = concatenated_states(of_pass, self._taps)
                return [(joined, one.first) for one in together]
        return [(self._own_states(one), 0) for one in states]

    def _own_states(self, states: Mapping[Tap, Tensor]) -> States:
        """Return a copy of the states that this head reads."""
        if isinstance(states, KeptStates) and states.are_together:
            of_pass = states.of_pass
            if isinstance(of_pass, ConcatenatedStates) and of_pass.taps == self._taps:
                return of_pass.states[states.first : states.stop].copy()
        return torch.cat([states[tap] for tap in self._taps], dim=-1)

    def _fill_rows(self, runs: Sequence[RowRange]) -> None:
        """Compute these rows from the target's states."""
        head_output(self._filler, self._rows_from_target(runs, wanted=0), runs[0].pages.store)
        fill(runs)

    def _rows_from_target(
        self,
        runs: Sequence[RowRange],
        wanted: int,
        tails: Sequence[Draft] | None = None,
        tail_features: Tensor | None = None,
    ) -> HeadInput:
        """Return the input of a pass over committed rows, with `wanted` rows of logits per run.

        A run may have a tail of uncommitted tokens, which all have the features `tail_features`.
        """
        sequences: list[SequenceRows] = []
        states: list[States] = []
        for run, tail in zip(runs, tails or [Draft()] * len(runs), strict=True):
            count = run.end - run.first
            sequences.append(
                SequenceRows(run.pages.kv, run.tokens, count, tail, run_logits=wanted, first=run.first)
            )
            states.append(run.rows.states(run.first - self._state_offset, run.end - self._state_offset))
            if tail_features is not None and len(tail):
                states.append(tail_features.expand(len(tail), -1))
        arrays = self._buffers.lay_out(runs[0].pages.cache, sequences, ()).arrays
        starts = np.array([run.start for run in runs], np.int32)
        return HeadInput(arrays, starts, stacked(states), are_head_states=False)


def fill(runs: Sequence[RowRange]) -> None:
    """Record that these rows are computed."""
    for run in runs:
        run.rows.fill(run.first, run.end)
        run.rows.mark(run.pages.kv.chain)
