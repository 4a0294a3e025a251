"""Everything that a guess can touch, changed together or not at all."""

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

from foreword.acceptance.logprobs import TokenLogprobs
from foreword.kv.paged_cache import PagedCache, RowMove
from foreword.models.batch import ForwardBatch
from foreword.speculation.draft import Draft
from foreword.speculation.layout import Share, lay_out
from foreword.speculation.protocols import Scheduled


@dataclass(frozen=True)
class Verdict:
    """The accepted path through a draft and the tokens that it commits."""

    path: tuple[int, ...]  # accepted nodes, root first
    tokens: tuple[int, ...]  # their tokens, then one of the target's own unless the answer ended before it
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per token if the request wants them
    error: str | None = None  # why the request cannot go on
    drafted: int = 0  # nodes that were judged


NOTHING_DRAWN = Verdict((), ())
"""For a prompt chunk that does not reach the prompt's end."""


class Transaction:
    """One pass over several requests: reserves KV rows, then commits verdicts or leaves no trace."""

    def __init__(self, cache: PagedCache, scheduled: Sequence[Scheduled]) -> None:
        self._cache = cache
        self._scheduled = scheduled
        self._moves: list[RowMove] = []
        self._open = True

    def __enter__(self) -> "Transaction":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    def batch(self, drafts: Sequence[Draft]) -> ForwardBatch:
        """Reserve rows for everyone and lay out the pass. The pending row moves become part of it."""
        for share, draft in zip(self._scheduled, drafts, strict=True):
            self._cache.reserve(share.request.kv, share.run + len(draft))
        self._moves = self._cache.take_moves()
        shares = [
            Share(share.request.kv, share.request.tokens, share.run, draft, run_logits=int(share.reaches_end))
            for share, draft in zip(self._scheduled, drafts, strict=True)
        ]
        return lay_out(self._cache, shares, self._moves)

    def commit(self, verdicts: Sequence[Verdict]) -> None:
        """Tokens and KV of every request advance together."""
        self._open = False
        for share, verdict in zip(self._scheduled, verdicts, strict=True):
            self._cache.commit(share.request.kv, share.run, verdict.path)
            share.request.extend(verdict.tokens, verdict.logprobs)
            if verdict.error is not None:
                share.request.fail(verdict.error)

    def abort(self) -> None:
        """Nothing happened. Does nothing after a commit; safe to repeat."""
        if not self._open:
            return
        self._open = False
        for share in self._scheduled:
            self._cache.rollback(share.request.kv)
        self._cache.lose_moves(self._moves)
