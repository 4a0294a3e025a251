"""Bookkeeping of recurrent layers: one state per committed chunk, and a ring with the rows of the current chunk.

A state is written once and never changed, so that it can be shared by reference count, like a page. A roll-back copies
nothing: the ring rows of draft tokens just become unreachable.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from foreword.kv.block_pool import BlockPool
from foreword.kv.prefix_cache import PrefixNode

CHUNK = 64
"""Positions in a chunk. Chunks begin at multiples of it, so that rounding depends on positions alone."""

RING_ROWS = 2 * CHUNK
"""Rows of a ring: those of the current chunk, then those of draft tokens."""

CHECKPOINT_EVERY = 512
"""Positions between two states of a prompt that the prefix cache keeps."""

NO_STATE = 0
"""Slot of the state before the first token: zeros, never written."""


class StateSizes(NamedTuple):
    """Number of states and rings of a model with recurrent layers; both 0 without such layers."""

    sequences: int = 0  # maximum number of open sequences
    checkpoints: int = 0  # maximum number of states in the prefix cache

    @property
    def states(self) -> int:
        """State slots: `NO_STATE`, two per sequence (a pass that enters a chunk writes a second one), checkpoints."""
        return 1 + 2 * self.sequences + self.checkpoints

    @property
    def rings(self) -> int:
        """Rings: two per sequence, since a pass that enters a chunk writes a second one."""
        return 2 * self.sequences

    def most_running(self, limit: int) -> int:
        """Return how many requests may run, at most `limit`. One sequence is reserved.

        It holds the prompt of a request with several answers until all of them have forked it.
        """
        return min(limit, self.sequences - 1) if self.sequences else limit


NO_STATES = StateSizes()


class Chunk(NamedTuple):
    """The state before position `start`, and the ring with the rows from that position on."""

    start: int
    state: int  # slot
    ring: int | None  # index; None: the state is only a checkpoint


@dataclass
class Counts:
    """Totals for metrics."""

    evicted: int = 0  # checkpoints
    hits: int = 0  # sequences that began at a checkpoint


class ChunkPool:
    """Allocates states and rings. Keeps some states as checkpoints: those at which a prefix hit can end."""

    def __init__(self, sizes: StateSizes, page_size: int) -> None:
        if CHUNK % page_size:
            raise ValueError(f"the page size {page_size} does not divide the {CHUNK} positions of a chunk")
        self.sizes = sizes
        self.counts = Counts()
        self._page_size = page_size
        self._states, self._rings = BlockPool(sizes.states), BlockPool(sizes.rings)
        self._zero_state = self._states.allocate(1)  # the pool itself holds NO_STATE
        assert self._zero_state == [NO_STATE]
        self._checkpoints: OrderedDict[PrefixNode, int] = OrderedDict()  # least recently used first

    @property
    def num_checkpoints(self) -> int:
        return len(self._checkpoints)

    @property
    def states_used(self) -> int:
        return self.sizes.states - self._states.num_free - len(self._zero_state)

    def usable(self, chain: list[PrefixNode]) -> list[PrefixNode]:
        """Return the chain up to its last page with a checkpoint: a prefix hit cannot end elsewhere."""
        for pages in range(len(chain), 0, -1):
            if chain[pages - 1] in self._checkpoints:
                return chain[:pages]
        return []

    def open(self, chain: Sequence[PrefixNode]) -> list[Chunk]:
        """Allocate the first chunk of a sequence that begins with these pages, the last of which has a checkpoint."""
        ring = self._rings.allocate(1)[0]
        state = NO_STATE
        if chain:
            state = self._checkpoints[chain[-1]]
            self._checkpoints.move_to_end(chain[-1])
            self.counts.hits += 1
        self._states.share([state])
        return [Chunk(len(chain) * self._page_size, state, ring)]

    def fork(self, chunks: Sequence[Chunk], rows: int) -> list[Chunk]:
        """Allocate the first chunk of a fork that shares the first `rows` rows: the same state, an empty ring."""
        forked = read_chunk(chunks, rows)
        ring = self._rings.allocate(1)[0]
        self._states.share([forked.state])
        return [forked._replace(ring=ring)]

    def extend(self, chunks: list[Chunk], end: int) -> None:
        """Append the chunks that a pass over the rows before `end` enters. May be repeated.

        The last chunk gets a state and a ring. Of the chunks before it, only those that are due as checkpoints are
        appended, without a ring.
        """
        old_start = chunks[-1].start
        new_start = (end - 1) // CHUNK * CHUNK
        if new_start <= old_start:
            return
        first_due = (old_start // CHECKPOINT_EVERY + 1) * CHECKPOINT_EVERY
        for start in range(first_due, new_start, CHECKPOINT_EVERY):
            if self._states.num_free > 2 * self.sizes.sequences:  # running sequences come first
                chunks.append(Chunk(start, self._states.allocate(1)[0], None))
        chunks.append(Chunk(new_start, self._states.allocate(1)[0], self._rings.allocate(1)[0]))

    def drop_passed(self, chunks: list[Chunk], computed: int) -> None:
        """Release the chunks before the chunk of the newest committed row."""
        while len(chunks) > 1 and chunks[1].start < computed:
            self._release(chunks.pop(0))

    def drop_from(self, chunks: list[Chunk], begin: int) -> None:
        """Release the chunks that start at row `begin` or later, except the oldest chunk."""
        while len(chunks) > 1 and chunks[-1].start >= begin:
            self._release(chunks.pop())

    def close(self, chunks: list[Chunk]) -> None:
        """Release all chunks of a sequence."""
        while chunks:
            self._release(chunks.pop())

    def keep_due(
        self, chunks: list[Chunk], computed: int, chain: Sequence[PrefixNode], ends_prompt: bool
    ) -> None:
        """Keep the due states of committed chunks as checkpoints, then release the chunks before the current one.

        Due are states at multiples of `CHECKPOINT_EVERY`, and the current one where the prompt ends.
        """
        current = read_chunk(chunks, computed)
        for chunk in chunks:
            if chunk.start < computed and chunk.start % CHECKPOINT_EVERY == 0:
                self.keep(chunk, chain)
        if ends_prompt:
            self.keep(current, chain)
        self.drop_passed(chunks, computed)

    def keep(self, chunk: Chunk, chain: Sequence[PrefixNode]) -> None:
        """Keep the state as a checkpoint, if the page before it is published. Evicts the least recently used one."""
        pages = chunk.start // self._page_size
        if not 0 < pages <= len(chain) or not self.sizes.checkpoints:
            return
        node = chain[pages - 1]
        if node not in self._checkpoints:
            if len(self._checkpoints) == self.sizes.checkpoints:
                self.forget(next(iter(self._checkpoints)))
                self.counts.evicted += 1
            self._states.share([chunk.state])
            self._checkpoints[node] = chunk.state
        self._checkpoints.move_to_end(node)

    def forget(self, node: PrefixNode) -> None:
        """Drop the checkpoint at a page, if it has one."""
        state = self._checkpoints.pop(node, None)
        if state is not None:
            self._states.release([state])

    def check_integrity(self, sequences: Sequence[Sequence[Chunk]]) -> None:
        """Raise `AssertionError` if states or rings are leaked or shared wrongly."""
        states = [[chunk.state for chunk in chunks] for chunks in sequences]
        self._states.check_integrity([*states, self._zero_state, list(self._checkpoints.values())])
        rings = [[chunk.ring for chunk in chunks if chunk.ring is not None] for chunks in sequences]
        self._rings.check_integrity(rings)
        for chunks in sequences:
            starts = [chunk.start for chunk in chunks]
            if not starts or starts != sorted(set(starts)):
                raise AssertionError(f"chunks are out of order: {chunks}")

    def _release(self, chunk: Chunk) -> None:
        self._states.release([chunk.state])
        if chunk.ring is not None:
            self._rings.release([chunk.ring])


def read_chunk(chunks: Sequence[Chunk], begin: int) -> Chunk:
    """Return the chunk that a pass from row `begin` on reads: the newest chunk with a ring that starts before it."""
    for chunk in reversed(chunks):
        if chunk.start < begin and chunk.ring is not None:
            return chunk
    return chunks[0]


def draft_room(position: int) -> int:
    """Return how many positions follow this one in its chunk: a draft after it cannot be deeper."""
    return CHUNK - 1 - position % CHUNK
