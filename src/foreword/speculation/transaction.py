"""Everything that a guess can touch, changed together or not at all."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

from foreword.backends.batch import ForwardBatch
from foreword.kv.paged_cache import KvSequence, PagedCache, RowMove
from foreword.speculation.draft import Draft
from foreword.speculation.layout import BatchBuffers, Share
from foreword.speculation.protocols import Scheduled, StepRequest
from foreword.speculation.verdict import Verdict

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Part:
    """A request's part of a pass, as it was when the pass began: it may be cancelled before the pass ends."""

    request: StepRequest
    kv: KvSequence
    run: int  # committed tokens that get their KV
    scored: int  # of these, the ones that tell how likely a prompt token was, in front of the newest token
    draws: bool  # whether the newest token is among them, so that the next one can be drawn

    @staticmethod
    def of(share: Scheduled) -> "Part":
        """Note how things are now."""
        return Part(share.request, share.request.kv, share.run, share.scored, share.reaches_end)


class Transaction:
    """One pass over several requests: reserves KV rows, then commits verdicts or leaves no trace.

    A request that is cancelled or preempted while the pass is under way has lost its KV sequence. What
    the pass found out about it is dropped; nobody else notices.
    """

    def __init__(self, cache: PagedCache, scheduled: Sequence[Scheduled]) -> None:
        self._cache = cache
        self.parts = [Part.of(share) for share in scheduled]
        self._moves: list[RowMove] = []
        self._open = True

    def __enter__(self) -> "Transaction":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    def reserve(self) -> None:
        """Take the pages that the committed tokens of this pass need; cached pages may give way to them."""
        for part in self.parts:
            self._cache.reserve(part.kv, part.run)

    def batch(self, drafts: Sequence[Draft], buffers: BatchBuffers | None = None) -> ForwardBatch:
        """Reserve rows for the guesses too and lay out the pass. The pending row moves become part of it."""
        for part, draft in zip(self.parts, drafts, strict=True):
            self._cache.reserve(part.kv, part.run + len(draft))
        self._moves = self._cache.take_moves()
        shares = [
            Share(part.kv, part.request.tokens, part.run, draft, run_logits=part.scored + part.draws)
            for part, draft in zip(self.parts, drafts, strict=True)
        ]
        return (buffers or BatchBuffers(entries=0)).lay_out(self._cache, shares, self._moves)

    def commit(self, verdicts: Sequence[Verdict]) -> list[bool]:
        """Everything about every request advances together; returns which of them were still there."""
        self._open = False
        return [self._commit_one(part, verdict) for part, verdict in zip(self.parts, verdicts, strict=True)]

    def _commit_one(self, part: Part, verdict: Verdict) -> bool:
        if not self._cache.is_open(part.kv):
            return False
        try:
            part.request.commit(verdict)
            self._cache.commit(part.kv, part.run, verdict.path)
            self._cache.publish(part.kv, part.request.tokens)
        except Exception as error:  # it fails alone: nobody else's verdict depends on it
            _log.exception("request %s could not take its tokens", part.request.request_id)
            self._cache.rollback(part.kv)
            part.request.fail(f"{type(error).__name__}: {error}")
        return True

    def abort(self) -> None:
        """Nothing happened. Does nothing after a commit; safe to repeat."""
        if not self._open:
            return
        self._open = False
        for part in self.parts:
            self._cache.rollback(part.kv)
        self._cache.lose_moves(self._moves)
