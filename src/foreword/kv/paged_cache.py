"""Page tables of all requests: committed KV rows, then provisional ones of passes in flight."""

import sys
from collections.abc import Sequence

from foreword.kv.block_pool import BlockPool
from foreword.kv.chunks import NO_STATES, RING_ROWS, ChunkPool, StateSizes, draft_room, read_chunk
from foreword.kv.extra_rows import cached_rows
from foreword.kv.prefix_cache import PrefixCache, PrefixNode
from foreword.kv.sequence import FREED, KvSequence, RowMove, RowMoves, Window, check_sequences, publish_pages

PAGE_SIZE = 16
"""KV rows in one page."""


class PagedCache:
    """KV bookkeeping: reserves rows for a pass, then commits a path through them or rolls back.

    It never touches KV bytes: a pass executes the pending row moves, then writes its own rows. A page freed by a
    commit may therefore still be the source of a pending move; no pass writes it before that move is done.

    Several passes may be in flight; they are executed in launch order. Two of them may be over the same sequence if
    the rows that the first commits are known in advance.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int = PAGE_SIZE,
        prefix_caching: bool = False,
        window: int | None = None,
        states: StateSizes = NO_STATES,
    ) -> None:
        """Create an empty cache.

        `window`: number of newest rows of a sequence that are read; None: all. `states`: sizes for recurrent layers.
        """
        self.page_size = page_size
        self.pool = BlockPool(num_pages)
        self.prefix_caching = prefix_caching
        self.prefix_queries = 0  # tokens of opened prompts
        self.prefix_hits = 0  # those of them that were found in the cache
        self.chunks = ChunkPool(states, page_size) if states.sequences else None
        self._prefix = PrefixCache(self.pool, page_size, None if self.chunks is None else self.chunks.forget)
        self.void_rows = self._prefix.void_rows
        self._sequences: set[KvSequence] = set()
        self._moves = RowMoves()
        self._window = Window(window, page_size)

    @property
    def free_pages(self) -> int:
        return self.pool.num_free

    @property
    def available_pages(self) -> int:
        """Pages that can be allocated: free ones, and published ones without users."""
        return self.pool.num_free + self._prefix.num_idle

    def open(self, tenant: str = "", tokens: Sequence[int] = (), *, again: bool = False) -> KvSequence:
        """Open a sequence that starts with the tenant's published pages for `tokens`.

        At least the last token is left to compute, because its logits are needed. `again`: the request was preempted
        and had a sequence before; `prefix_queries` and `prefix_hits` do not count it twice.
        """
        chain = self._match(tenant, tokens)
        chunks = [] if self.chunks is None else self.chunks.open(chain)
        self._prefix.hold(chain)
        rows = len(chain) * self.page_size
        if self.prefix_caching and not again:
            self.prefix_queries += len(tokens)
            self.prefix_hits += rows
        pages = [node.page for node in chain]
        sequence = KvSequence(
            pages, rows, rows, tenant, chain, self.prefix_caching, extra=cached_rows(chain), chunks=chunks
        )
        self._sequences.add(sequence)
        return sequence

    def _match(self, tenant: str, tokens: Sequence[int]) -> list[PrefixNode]:
        """Return the published pages with which a sequence of these tokens can begin."""
        chain = self._prefix.match(tenant, tokens)
        return chain if self.chunks is None else self.chunks.usable(chain)

    @property
    def can_open(self) -> bool:
        """Return whether recurrent layers have states for one more sequence; True without such layers."""
        return self.chunks is None or len(self._sequences) < self.chunks.sizes.sequences

    @property
    def num_open(self) -> int:
        return len(self._sequences)

    def is_open(self, sequence: KvSequence) -> bool:
        return sequence in self._sequences

    def matching_pages(self, tenant: str, tokens: Sequence[int]) -> int:
        """Return how many published pages `open` would find for `tokens`, without side effects."""
        return len(self._match(tenant, tokens))

    def idle_matching_pages(self, tenant: str, tokens: Sequence[int]) -> int:
        """Return how many of the matching pages have no users: `open` reduces `available_pages` by this number."""
        return sum(self._prefix.is_idle(node) for node in self._match(tenant, tokens))

    def close(self, sequence: KvSequence) -> None:
        """Close a sequence: release its pages, and void its passes in flight.

        Published pages stay until they are evicted, and its newest recurrent state stays as a checkpoint.
        """
        if self.chunks is not None:
            self.chunks.keep(read_chunk(sequence.chunks, sequence.computed), sequence.chain)
            self.chunks.close(sequence.chunks)
        self._sequences.remove(sequence)
        self._moves.forget(sequence)
        self.pool.release(sequence.own_pages)
        self._prefix.release(sequence.chain)
        sequence.pages, sequence.chain, sequence.extra = [], [], {}
        sequence.computed = sequence.reserved = sequence.certain_rows = sequence.passes = 0
        sequence.losses += 1

    def fork(self, sequence: KvSequence, rows: int | None = None) -> KvSequence:
        """Open a second sequence with the first `rows` computed rows (default: all), and share their full pages.

        The rows of other pages are copied by pending moves. Two kinds of pages are not shared, because their rows are
        computed again if a move fails: pages that wait for a move, and those of the current chunk of recurrent layers,
        whose ring rows are moved.
        """
        rows = sequence.computed if rows is None else rows
        if not 0 <= rows <= sequence.computed:
            raise ValueError(f"{rows} rows cannot be forked: only {sequence.computed} are computed")
        if not self.can_fork(sequence, rows):
            raise AssertionError(f"`can_fork` is false for the first {rows} rows")
        chunks = [] if self.chunks is None else self.chunks.fork(sequence.chunks, rows)
        shared_rows = min(rows, self._moves.settled(sequence), *(chunk.start for chunk in chunks))
        shared = shared_rows // self.page_size  # number of pages
        copied_pages = self._allocate(self.pages_for(rows) - shared)
        chain = sequence.chain[:shared]
        self._prefix.hold(chain)
        self.pool.share(page for page in sequence.pages[len(chain) : shared] if page != FREED)
        pages = sequence.pages[:shared] + copied_pages
        extra = {name: extra_rows.fork(rows) for name, extra_rows in sequence.extra.items()}
        copy = KvSequence(
            pages, rows, rows, sequence.tenant, chain, sequence.publishes, extra=extra, chunks=chunks
        )
        self._sequences.add(copy)
        move_sources = self._moves.sources(sequence)
        for row in range(shared * self.page_size, rows):
            self._moves.add(copy, move_sources.get(row, self._slots(sequence, row)), row)
        return copy

    def can_fork(self, sequence: KvSequence, rows: int) -> bool:
        """Return whether the first `rows` rows can be forked.

        They must be present, and no pass in flight may be moving one of them. With recurrent layers, a state for the
        fork must be free, and the sequence must have a state before row `rows` to share.
        """
        first = self._moves.first_moving(sequence)
        has_state = self.chunks is None or (
            self.can_open and read_chunk(sequence.chunks, sequence.computed).start <= rows
        )
        return (first is None or rows <= first) and self._window.holds(sequence, rows) and has_state

    def is_busy(self, sequence: KvSequence) -> bool:
        """Return whether the next pass of the sequence depends on the outcome of a pass in flight."""
        return sequence.awaits_pass or self._moves.first_moving(sequence) is not None

    def begin_pass(self, sequences: Sequence[KvSequence]) -> None:
        """Start a pass over these sequences; raise, and start nothing, if one must wait for a pass in flight."""
        if any(map(self.is_busy, sequences)):
            raise AssertionError("a pass starts over a sequence that depends on a pass in flight")
        if len(set(map(id, sequences))) != len(sequences):
            raise AssertionError("a sequence is in the same pass twice")
        for sequence in sequences:
            sequence.begin_pass()

    def lose_pass(self, sequence: KvSequence, first: int) -> None:
        """Undo a failed pass that began at row `first`, and void later passes over the sequence."""
        if first == sequence.computed:  # the oldest pass in flight: any later one depends on it
            sequence.losses += 1
            sequence.passes, sequence.is_commit_known = 0, False
        else:  # the second pass: the first one goes on, and its commit is known
            sequence.passes, sequence.is_commit_known = 1, True
        sequence.certain_rows = max(0, first - sequence.computed)
        self.rollback(sequence)

    def publish(self, sequence: KvSequence, tokens: Sequence[int]) -> None:
        """Publish the full pages of committed rows, so that later sequences of the tenant can start with them.

        Also keep the due states of recurrent layers as checkpoints. `tokens` are committed: row i is the KV of token i.

        A page with a pending move, or held by a fork, is published by a later call. If the same text is published
        already, the sequence replaces its page by the published one, so that it holds all ancestors of the nodes that
        it adds.
        """
        if sequence.publishes and sequence.computed // self.page_size > len(sequence.chain):
            self._publish_pages(sequence, tokens)
        if self.chunks is not None:
            ends_prompt = not sequence.has_prompt_state and sequence.computed + 1 >= len(tokens)
            sequence.has_prompt_state |= ends_prompt
            self.chunks.keep_due(sequence.chunks, sequence.computed, sequence.chain, ends_prompt)

    def _publish_pages(self, sequence: KvSequence, tokens: Sequence[int]) -> None:
        final = min(self._moves.settled(sequence), len(tokens))
        if self.chunks is not None:  # a prefix hit cannot end after the last state
            final = min(final, read_chunk(sequence.chunks, sequence.computed).start)
        full = self._window.publishable(final // self.page_size)
        publish_pages(sequence, tokens, full, self._prefix, self.pool, self.page_size)

    def unpublish_suspect(self, sequence: KvSequence) -> None:
        """Unpublish the sequence's pages and all pages that continue them, because some may contain NaN.

        Sequences that use these pages keep them but publish nothing more.
        """
        sequence.publishes = False
        if not sequence.chain:
            return
        removed = self._prefix.remove(sequence.chain[0])
        for user in self._sequences:
            if user.chain and user.chain[0] in removed:
                user.chain, user.publishes = [], False

    def clear_prefix_cache(self) -> None:
        """Unpublish everything. Open sequences keep their rows but publish nothing more."""
        self._prefix.clear()
        for sequence in self._sequences:
            sequence.chain, sequence.publishes = [], False

    def pages_for(self, rows: int) -> int:
        """Return how many pages this many rows need."""
        return -(-rows // self.page_size)

    def reserve(self, sequence: KvSequence, rows: int) -> None:
        """Reserve `rows` rows for the next pass, or raise `OutOfPages` and change nothing.

        Published pages without users are evicted if there are too few free pages.
        """
        begin, size = sequence.computed + sequence.certain_rows, self.page_size
        end = begin + rows
        needed = -(-end // size) - len(sequence.pages)
        if needed > 0:
            sequence.pages += self._allocate(needed)
        was_reserved, sequence.reserved = sequence.reserved > begin, end
        if not was_reserved and self.pool.shares_any(sequence.pages[begin // size :]):
            raise AssertionError("a pass would write to a shared page")

    def slot(self, sequence: KvSequence, row: int) -> int:
        """Return the slot of a logical row."""
        return sequence.pages[row // self.page_size] * self.page_size + row % self.page_size

    def ring_slot(self, sequence: KvSequence, row: int) -> int | None:
        """Return the slot of a logical row in the rings; None without recurrent layers, or before the current chunk."""
        if self.chunks is None:
            return None
        chunk = read_chunk(sequence.chunks, sequence.computed)
        if chunk.ring is None or row < chunk.start:
            return None
        return chunk.ring * RING_ROWS + row - chunk.start

    def _slots(self, sequence: KvSequence, row: int) -> tuple[int, int | None]:
        return self.slot(sequence, row), self.ring_slot(sequence, row)

    def enter_chunk(self, sequence: KvSequence, end: int) -> None:
        """Allocate what a pass over the committed tokens before `end` writes, and release chunks that were passed."""
        if self.chunks is not None:
            self.chunks.drop_passed(sequence.chunks, sequence.computed)
            self.chunks.extend(sequence.chunks, end)

    def max_draft_depth(self, last: int) -> int:
        """Return the maximum depth of a draft after position `last`: recurrent layers end it with the chunk."""
        return sys.maxsize if self.chunks is None else draft_room(last)

    def commit(self, sequence: KvSequence, run: int, path: Sequence[int]) -> None:
        """Commit the first `run` reserved rows and, after them, the rows in `path`; discard the rest.

        `path`: indices of accepted draft tokens, ascending; node 0 has the first row after the run.
        """
        base = sequence.computed + run  # row of node 0
        if base + (path[-1] + 1 if path else 0) > sequence.reserved:
            raise ValueError("more rows are committed than were reserved")
        sequence.computed = base + len(path)
        if path and path[-1] >= len(path):  # nodes of other branches lie in between
            for level, node in enumerate(path):
                if node != level:
                    self._moves.add(sequence, self._slots(sequence, base + node), base + level)
        sequence.certain_rows = max(0, sequence.certain_rows - run)
        self.rollback(sequence, kept=1)
        self._window.release_unread(self.pool, sequence)

    def advance(self, sequence: KvSequence, rows: int) -> None:
        """Commit the first `rows` reserved rows; the others stay reserved."""
        if sequence.computed + rows > sequence.reserved:
            raise ValueError("more rows are committed than were reserved")
        sequence.computed += rows

    def rewind(self, sequence: KvSequence, rows: int) -> None:
        """Keep at most the first `rows` computed rows; later ones must be computed again."""
        if rows < sequence.published * self.page_size:
            raise AssertionError("published rows would be computed again")
        if self.chunks is not None and rows < sequence.chunks[0].start:
            raise AssertionError("rows before the oldest state would be computed again")
        self._moves.cut(sequence, rows)
        sequence.computed = min(sequence.computed, rows)
        self.rollback(sequence)

    def rollback(self, sequence: KvSequence, kept: int = 0) -> None:
        """Discard provisional rows that are not certain to be committed, and pages that only they need.

        May be repeated. The pages of the next `kept` rows stay, because drafters may have written their rows there.
        """
        begin = sequence.reserved = sequence.begin
        if self.chunks is not None:
            self.chunks.drop_from(sequence.chunks, begin)
        for rows in sequence.extra.values():
            if rows.end > sequence.computed:
                rows.clip(sequence.computed)
        num_pages = self.pages_for(begin + kept)
        if num_pages < len(sequence.pages):
            self.pool.release(sequence.pages[num_pages:])
            del sequence.pages[num_pages:]

    @property
    def pending_moves(self) -> tuple[RowMove, ...]:
        return self._moves.pending

    def take_moves(self) -> list[RowMove]:
        """Hand the pending moves to a pass, which later calls `settle_moves` or `lose_moves`."""
        return self._moves.take()

    def settle_moves(self, moves: Sequence[RowMove]) -> None:
        self._moves.settle(moves)

    def lose_moves(self, moves: Sequence[RowMove]) -> None:
        """Drop the moves of a failed pass; their rows, and all later ones, must be computed again."""
        self.settle_moves(moves)
        for move in moves:
            if move.owner in self._sequences:
                self.rewind(move.owner, move.row)

    def check_integrity(self) -> None:
        """Raise `AssertionError` if pages, tables, lengths, moves or published pages are inconsistent."""
        if self.chunks is not None:
            self.chunks.check_integrity([sequence.chunks for sequence in self._sequences])
        check_sequences(self._sequences, self.pool, self._prefix, self._moves, self.page_size)

    def _allocate(self, count: int) -> list[int]:
        """Allocate `count` pages, evicting published ones if needed, or raise `OutOfPages` and change nothing."""
        missing = count - self.pool.num_free
        if 0 < missing <= self._prefix.num_idle:
            self._prefix.evict(missing)
        return self.pool.allocate(count)
