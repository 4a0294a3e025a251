"""Update of everything that a pass changes, atomic for each request: tokens, KV rows and sampler state."""

import logging
from collections.abc import Mapping, Sequence

import torch

from foreword.backends.batch import ForwardBatch, Tap
from foreword.backends.interface import KvStore
from foreword.kv.paged_cache import PagedCache
from foreword.kv.sequence import KvSequence, RowMove
from foreword.speculation.draft import Draft
from foreword.speculation.layout import BatchBuffers, SequenceRows
from foreword.speculation.requests import DraftPlan, PassEntry, Verdict

_log = logging.getLogger(__name__)


class Transaction:
    """One pass over several requests: reserves KV rows, then commits the verdicts or restores the earlier state.

    A request that is cancelled or preempted during the pass loses its KV sequence: its verdict is dropped, and other
    requests are not affected. A sequence may be in two passes in flight if the first has no draft for it. If the first
    pass fails, the sequence is also dropped from the second.
    """

    def __init__(self, cache: PagedCache, entries: Sequence[PassEntry]) -> None:
        """Begin a pass of all sequences; raise an exception and begin none if one depends on a pass in flight."""
        self.cache = cache
        self.entries = list(entries)
        self._moves: list[RowMove] = []
        cache.begin_pass([entry.kv for entry in entries])
        self._open = True

    def __enter__(self) -> "Transaction":
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()

    def reserve(self) -> None:
        """Reserve pages for the run of every entry; this may evict pages from the prefix cache."""
        for entry in self.entries:
            self.cache.reserve(entry.kv, entry.run)

    def prepare_drafter_rows(self, plans: Sequence[DraftPlan | None], store: KvStore) -> None:
        """Reserve rows after the text for planned drafters that write KV rows, and execute pending row moves.

        The moves are executed now, because the pass would execute them later and overwrite the drafters' rows. A
        drafter's temporary rows (`needs.scratch`) beyond `max_nodes` are reserved only as far as pages are free.
        """
        planned = [
            (entry, plan)
            for entry, plan in zip(self.entries, plans, strict=True)
            if plan is not None and plan.drafter.traits.needs.uses_pages
        ]
        for entry, plan in planned:
            self.cache.reserve(entry.kv, entry.run + plan.max_nodes)
        for entry, plan in planned:
            self._reserve_free(entry, entry.run + plan.drafter.traits.needs.scratch)
        if planned:
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
        """Reserve rows for the draft tokens and lay out the pass, with all pending row moves.

        Hidden states at `taps` are kept for entries that are `observed`; by default no entry is. If an entry's last
        token is still being sampled by the previous pass, `drawn_at` has the index of the row that samples it, among
        that pass's judged rows (see `Acceptance`).
        """
        has_chunks = self.cache.chunks is not None
        for entry, draft in zip(self.entries, drafts, strict=True):
            count = entry.run + len(draft.parents)
            if entry.kv.reserved != entry.computed + count:
                self.cache.reserve(entry.kv, count)
            if has_chunks:
                self.cache.enter_chunk(entry.kv, entry.computed + entry.run)
        moves = self.cache.take_moves()
        self._moves += moves
        observed = observed or [False] * len(self.entries)
        rows = [
            SequenceRows(
                entry.kv,
                entry.request.tokens,
                entry.run,
                draft,
                run_logits=entry.scored + entry.draws,
                wants_hidden=is_observed,
                first=entry.computed,
                drawn_at=(drawn_at[entry.kv],) if entry.pending and drawn_at is not None else (),
                adapter=entry.request.adapter_slot,
            )
            for entry, draft, is_observed in zip(self.entries, drafts, observed, strict=True)
        ]
        batch = (buffers or BatchBuffers(entries=0)).lay_out(self.cache, rows, moves, taps, self._moves)
        for entry, draft in zip(self.entries, drafts, strict=True):
            if not draft.parents:
                entry.kv.declare_commit(entry.run)
        return batch

    def reserve_early(self, rows: Sequence[int]) -> None:
        """Reserve this number of rows per entry, including its run and draft, as far as pages are free.

        Drafting that starts before the verdict writes these rows; no other pass uses them meanwhile.
        """
        for entry, count in zip(self.entries, rows, strict=True):
            self._reserve_free(entry, count)

    def _reserve_free(self, entry: PassEntry, rows: int) -> None:
        """Reserve `rows` rows from the entry's first one on, as far as pages are free; never fewer than before."""
        kv, cache = entry.kv, self.cache
        available = (len(kv.pages) + cache.free_pages) * cache.page_size - entry.computed
        rows = min(rows, available)
        if kv.reserved < entry.computed + rows:
            cache.reserve(kv, rows)

    def commit(self, verdicts: Sequence[Verdict]) -> list[bool]:
        """Commit all verdicts; return for each entry whether its request was still active."""
        self._open = False
        for entry in self.entries:
            if entry.is_present:
                entry.kv.end_pass()
        self.cache.settle_moves(self._moves)
        return [
            self._commit_entry(entry, verdict) for entry, verdict in zip(self.entries, verdicts, strict=True)
        ]

    def _commit_entry(self, entry: PassEntry, verdict: Verdict) -> bool:
        """Commit one verdict; return whether the request was still active. If it fails, only this request fails."""
        cache = self.cache
        if not entry.is_present:
            return False
        try:
            entry.request.commit(verdict)
            cache.commit(entry.kv, entry.run, verdict.path)
            if verdict.poisoned:
                cache.unpublish_suspect(entry.kv)
            else:
                cache.publish(entry.kv, entry.request.tokens)
        except Exception as error:  # No other verdict depends on this one.
            _log.exception("request %s could not take its tokens", entry.request.request_id)
            cache.rollback(entry.kv)
            entry.request.fail(f"{type(error).__name__}: {error}")
        return True

    def abort(self) -> None:
        """Restore the state before the pass. No effect after `commit`; may be repeated."""
        if not self._open:
            return
        self._open = False
        for entry in self.entries:
            if entry.is_present:
                self.cache.lose_pass(entry.kv, entry.computed)
        self.cache.lose_moves(self._moves)
