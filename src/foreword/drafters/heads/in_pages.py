"""Heads with KV rows in the target's pages: how the rows of committed tokens come about."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from foreword.backends.batch import Ints, SideBySide, Tap, joined_states, num_states
from foreword.backends.interface import HeadInput, head_output
from foreword.drafters.heads.loading import HEAD, LoadedRows
from foreword.kv.extra_rows import ExtraRows
from foreword.kv.states import States, stacked
from foreword.speculation.draft import Draft
from foreword.speculation.drafting import Commit, Drafter, DrafterNeeds, DraftTask, RequestRows
from foreword.speculation.layout import BatchBuffers, SequenceRows
from foreword.speculation.observing import KeptStates

FILLED_AT_ONCE = 16
"""Committed rows that are left to the next draft; more of them are filled when they are observed."""

KEPT_TOGETHER, KEPT_ALONE = 256, 16
"""Rows of a pass whose features are taken in one go, and kept as long as any of them is: not those of prompts. Where
the head observes one request only, the others' rows would be kept without use."""


class Run(NamedTuple):
    """Rows of one request that are made from the target's own states."""

    pages: RequestRows
    rows: ExtraRows
    tokens: Sequence[int]
    first: int
    end: int
    lag: int

    @property
    def start(self) -> int:
        """The first row that these see."""
        return self.first if self.first > self.rows.end else max(self.rows.begin, self.lag)


class HeadInPages(Drafter):
    """What such heads share. Their rows follow the request wherever it goes: nothing is kept here.

    The rows of committed tokens are made from the target's states, those of draft tokens from the head's own states;
    the latter are made again when their tokens are committed.
    """

    traits = HEAD

    def __init__(self, head: LoadedRows, lag: int, scratch: int) -> None:
        """A row is made from the states of the position `lag` before it: so many first tokens have none."""
        self._filler = head.runner
        self._kind = head.rows.name
        self._taps = head.taps
        self._vocabulary = head.vocabulary
        self._lag = lag
        self._buffers = BatchBuffers()
        self.traits = replace(self.traits, needs=DrafterNeeds(head.taps, (head.rows,), scratch=scratch))

    def observe(self, commits: Sequence[Commit]) -> None:
        """Keep the newest states; where drafts are wanted, long stretches get their rows at once."""
        runs, heard, lag = [], [], self._lag
        kind = self._kind
        for commit, (features, at) in zip(commits, self._features(commits), strict=True):
            assert commit.pages is not None
            rows = commit.pages.kv.rows_of(kind, lag)
            rows.add(commit.first, features, at, commit.rows)
            heard.append(rows)
            if commit.is_on and commit.settled - rows.end > FILLED_AT_ONCE:
                first, end = rows.missing_from(lag), min(commit.settled, rows.known + lag)
                if end - first > FILLED_AT_ONCE:
                    runs.append(Run(commit.pages, rows, commit.request.tokens, first, end, lag))
        if runs:
            self._fill_rows(runs)
        for rows in heard:
            rows.keep_newest()

    def memory_bytes(self) -> int:
        """Its own weights; its KV rows are part of the engine's memory."""
        return self._filler.weight_bytes

    def _rows_of(self, pages: RequestRows) -> ExtraRows:
        return pages.kv.rows_of(self._kind, self._lag)

    def _known_pages(self, task: DraftTask) -> RequestRows | None:
        """Return the pages of a request that wants a draft, if the states of all tokens but the newest are known."""
        if task.pages is None or task.max_nodes < 1 or task.max_depth < 1:
            return None
        return task.pages if self._rows_of(task.pages).known >= len(task.request.tokens) - 1 else None

    def _missing(self, tasks: Sequence[DraftTask], pages: Sequence[RequestRows]) -> tuple[list[Run], Ints]:
        """Return the rows of committed tokens that are not there yet, and the first row that each request sees."""
        runs, starts = [], []
        for task, found in zip(tasks, pages, strict=True):
            rows, end = self._rows_of(found), len(task.request.tokens) - 1
            run = Run(found, rows, task.request.tokens, rows.missing_from(self._lag), end, self._lag)
            runs += [run] if run.first < end else []
            starts.append(run.start if run.first < end else rows.begin)
        return runs, np.array(starts, np.int32)

    def _features(self, commits: Sequence[Commit]) -> Sequence[tuple[States, int]]:
        """States and the row of them with which those of each begin.

        Those of long passes are copied: else one request would keep the states of all who were in it.
        """
        states = [commit.hidden for commit in commits]
        together = [one for one in states if isinstance(one, KeptStates) and one.are_together]
        if commits and len(together) == len(commits):
            of_pass = together[0].of_pass
            most = KEPT_TOGETHER if len(commits) > 1 else KEPT_ALONE
            if num_states(of_pass) <= most and all(one.of_pass is of_pass for one in together):
                joined = joined_states(of_pass, self._taps)
                return [(joined, one.first) for one in together]
        return [(self._own_states(one), 0) for one in states]

    def _own_states(self, states: Mapping[Tap, Tensor]) -> States:
        """A copy, whatever else the pass has kept."""
        if isinstance(states, KeptStates) and states.are_together:
            of_pass = states.of_pass
            if isinstance(of_pass, SideBySide) and of_pass.taps == self._taps:
                return of_pass.states[states.first : states.stop].copy()
        return torch.cat([states[tap] for tap in self._taps], dim=-1)

    def _fill_rows(self, runs: Sequence[Run]) -> None:
        """Make rows from the target's states."""
        head_output(self._filler, self._true_rows(runs, wanted=0), runs[0].pages.store)
        fill(runs)

    def _true_rows(
        self,
        runs: Sequence[Run],
        wanted: int,
        tails: Sequence[Draft] | None = None,
        tail_features: Tensor | None = None,
    ) -> HeadInput:
        """The rows of a pass. After a run may come a tail that is no committed text; its rows share their features."""
        parts: list[SequenceRows] = []
        states: list[States] = []
        for run, tail in zip(runs, tails or [Draft()] * len(runs), strict=True):
            count = run.end - run.first
            parts.append(
                SequenceRows(run.pages.kv, run.tokens, count, tail, run_logits=wanted, first=run.first)
            )
            states.append(run.rows.states(run.first - self._lag, run.end - self._lag))
            if tail_features is not None and len(tail):
                states.append(tail_features.expand(len(tail), -1))
        arrays = self._buffers.lay_out(runs[0].pages.cache, parts, ()).arrays
        starts = np.array([run.start for run in runs], np.int32)
        return HeadInput(arrays, starts, stacked(states), are_own=False)


def fill(runs: Sequence[Run]) -> None:
    """The rows are there now."""
    for run in runs:
        run.rows.fill(run.first, run.end)
        run.rows.mark(run.pages.kv.chain)
