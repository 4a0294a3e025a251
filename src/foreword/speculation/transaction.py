"""Everything that a draft can touch, changed together or not at all."""

import logging
from collections.abc import Mapping, Sequence
from types import TracebackType

import torch

from foreword.backends.batch import ForwardBatch, Tap
from foreword.backends.interface import KvStore
from foreword.kv.paged_cache import PagedCache
from foreword.kv.sequence import KvSequence, RowMove
from foreword.speculation.draft import Draft
from foreword.speculation.layout import BatchBuffers, SequenceRows
from foreword.speculation.requests import DraftPlan, PassEntry
from foreword.speculation.verdict import Verdict

_log = logging.getLogger(__name__)


class Transaction:
    """One pass over several requests: reserves KV rows, then commits verdicts or leaves no trace.

    A request that is cancelled or preempted while the pass is in flight has lost its KV sequence. What
    the pass found out about it is dropped; the others are not affected. A sequence takes part in a second
    pass only after one without drafts; if that one fails, the second is dropped, too.
    """

    def __init__(self, cache: PagedCache, entries: Sequence[PassEntry]) -> None:
        """Take hold of the sequences; raises, and holds none, if a pass is in flight for one of them."""
        self.cache = cache
        self.entries = list(entries)
        self._moves: list[RowMove] = []
        cache.begin_pass([entry.kv for entry in entries])
        self._open = True

    def __enter__(self) -> "Transaction":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    def reserve(self) -> None:
        """Take the pages that the committed tokens of this pass need; cached pages may give way to them."""
        for entry in self.entries:
            self.cache.reserve(entry.kv, entry.run)

    def reserve_drafter_rows(self, plans: Sequence[DraftPlan | None], store: KvStore) -> None:
        """Make the pages ready for drafters that keep rows of their own in them and are asked now.

        They write after the text, as far as its pages were found free, and they read what was committed: so pending
        moves are done here and not by the pass, which would put an older row over one that they have written.
        """
        asked = [
            (entry, plan, plan.drafter.traits.needs.scratch)
            for entry, plan in zip(self.entries, plans, strict=True)
            if plan is not None and plan.drafter.traits.needs.rows
        ]
        for entry, plan, _ in asked:
            self.cache.reserve(entry.kv, entry.run + plan.max_nodes)
        for entry, plan, scratch in asked:
            if scratch <= plan.max_nodes:
                continue
            room = (len(entry.kv.pages) + self.cache.free_pages) * self.cache.page_size - entry.computed
            self.cache.reserve(
                entry.kv, max(entry.kv.reserved - entry.computed, min(entry.run + scratch, room))
            )
        if asked:
            self._moves = self.cache.take_moves()
            if self._moves:
                copies = [(move.source, self.cache.slot(move.owner, move.row)) for move in self._moves]
                store.move(torch.tensor(copies, dtype=torch.int32))

    def batch(
        self,
        drafts: Sequence[Draft],
        buffers: BatchBuffers | None = None,
        taps: tuple[Tap, ...] = (),
        observed: Sequence[bool] = (),
        drawn_at: Mapping[KvSequence, int] | None = None,
    ) -> ForwardBatch:
        """Reserve rows for the draft tokens too and lay out the pass. The pending row moves become part of it.

        `taps` are the hidden states that are kept, of the entries that are `observed`. `drawn_at` tells at which of its
        drawing rows the pass before draws the tokens that are pending.
        """
        for entry, draft in zip(self.entries, drafts, strict=True):
            count = entry.run + len(draft.parents)
            if entry.kv.reserved != entry.computed + count:
                self.cache.reserve(entry.kv, count)
        moves = self.cache.take_moves()
        self._moves += moves
        watched = observed or [False] * len(self.entries)
        rows = [
            SequenceRows(
                entry.kv,
                entry.request.tokens,
                entry.run,
                draft,
                0,  # all of its nodes
                entry.scored + entry.draws,
                wants,
                entry.computed,
                (drawn_at[entry.kv],) if entry.pending and drawn_at is not None else (),
                entry.request.adapter_slot,
            )
            for entry, draft, wants in zip(self.entries, drafts, watched, strict=True)
        ]
        batch = (buffers or BatchBuffers(entries=0)).lay_out(self.cache, rows, moves, taps)
        for entry, draft in zip(self.entries, drafts, strict=True):
            if not draft.parents:
                entry.kv.foresee(entry.run)
        return batch

    def reserve_early(self, rows: Sequence[int]) -> None:
        """Take pages for so many rows of every entry, its run and draft tokens included, as far as they are free.

        For early drafting: until the verdict, no other pass writes these rows.
        """
        cache = self.cache
        for entry, count in zip(self.entries, rows, strict=True):
            room = (len(entry.kv.pages) + cache.free_pages) * cache.page_size - entry.computed
            if entry.kv.reserved < entry.computed + min(count, room):
                cache.reserve(entry.kv, min(count, room))

    def commit(self, verdicts: Sequence[Verdict]) -> list[bool]:
        """Everything about every request advances together; returns which of them were still there."""
        self._open = False
        for entry in self.entries:
            if entry.is_present:
                entry.kv.end_pass()
        self.cache.settle_moves(self._moves)
        pairs = zip(self.entries, verdicts, strict=True)
        return [self._commit_one(entry, verdict) for entry, verdict in pairs]

    def _commit_one(self, entry: PassEntry, verdict: Verdict) -> bool:
        cache = self.cache
        if not entry.is_present:
            return False
        try:
            entry.request.commit(verdict)
            cache.commit(entry.kv, entry.run, verdict.path)
            if verdict.poisoned:
                cache.distrust(entry.kv)
            else:
                cache.publish(entry.kv, entry.request.tokens)
        except Exception as error:  # it fails alone: no other verdict depends on it
            _log.exception("request %s could not take its tokens", entry.request.request_id)
            cache.rollback(entry.kv)
            entry.request.fail(f"{type(error).__name__}: {error}")
        return True

    def abort(self) -> None:
        """Nothing happened. Does nothing after a commit; safe to repeat."""
        if not self._open:
            return
        self._open = False
        for entry in self.entries:
            if entry.is_present:
                self.cache.lose_pass(entry.kv, entry.computed)
        self.cache.lose_moves(self._moves)
