"""States of recurrent layers: one per committed chunk, and rows of the current chunk's tokens in a ring.

A state is written once and never changed: it is shared by reference count, like a page. Rows of draft tokens are
unreachable after a roll-back, which copies nothing.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from foreword.kv.block_pool import BlockPool
from foreword.kv.prefix_cache import PrefixNode

CHUNK = 64
"""Positions between two states. Chunks begin at multiples of it, so that rounding depends on positions alone."""

RING_ROWS = 2 * CHUNK
"""Rows of a ring: the current chunk's, and those of a tree's nodes after it."""

CHECKPOINT_EVERY = 512
"""Positions between two states of a prompt that are kept for the prefix cache."""

NO_STATE = 0
"""Slot of the state before the first token: zeros, never written."""


class StateSizes(NamedTuple):
    """Number of states and rings of a model with recurrent layers; none by default."""

    sequences: int = 0  # open at once
    checkpoints: int = 0  # states kept for the prefix cache

    @property
    def states(self) -> int:
        """State slots: a pass that enters a chunk writes a second state of its sequence."""
        return 1 + 2 * self.sequences + self.checkpoints

    @property
    def rings(self) -> int:
        return 2 * self.sequences

    def most_running(self, limit: int) -> int:
        """Return how many requests may run: one place is for a prompt that is kept for its siblings."""
        return min(limit, self.sequences - 1) if self.sequences else limit


NO_STATES = StateSizes()


class Chunk(NamedTuple):
    """The state before position `start`, and the ring of the rows from there on."""

    start: int
    state: int
    ring: int | None  # None: the state is only a checkpoint


@dataclass
class Counts:
    """Totals for metrics."""

    kept: int = 0  # checkpoints
    evicted: int = 0
    hits: int = 0  # sequences that began with one


class ChunkPool:
    """Allocates states and rings, and keeps states at published pages as checkpoints."""

    def __init__(self, sizes: StateSizes, page_size: int) -> None:
        if CHUNK % page_size:
            raise ValueError(f"a chunk of {CHUNK} positions is not a multiple of a page of {page_size}")
        self.sizes = sizes
        self.counts = Counts()
        self._page_size = page_size
        self._states, self._rings = BlockPool(sizes.states), BlockPool(sizes.rings)
        self._held = self._states.allocate(1)  # NO_STATE
        assert self._held == [NO_STATE]
        self._checkpoints: OrderedDict[PrefixNode, int] = OrderedDict()  # least recently used first

    @property
    def num_checkpoints(self) -> int:
        return len(self._checkpoints)

    @property
    def states_used(self) -> int:
        return self.sizes.states - self._states.num_free - len(self._held)

    def usable(self, chain: list[PrefixNode]) -> list[PrefixNode]:
        """Return the chain up to its last checkpoint: a sequence cannot begin elsewhere."""
        last = next((place for place in range(len(chain), 0, -1) if chain[place - 1] in self._checkpoints), 0)
        return chain[:last]

    def open(self, chain: Sequence[PrefixNode]) -> list[Chunk]:
        """Return the first chunk of a sequence that begins with these pages, which end at a checkpoint."""
        ring = self._rings.allocate(1)[0]
        state = NO_STATE
        if chain:
            state = self._checkpoints[chain[-1]]
            self._checkpoints.move_to_end(chain[-1])
            self.counts.hits += 1
        self._states.share([state])
        return [Chunk(len(chain) * self._page_size, state, ring)]

    def fork(self, chunks: Sequence[Chunk], rows: int) -> list[Chunk]:
        """Return the chunk of a sequence that shares the first `rows` rows; its ring is empty."""
        begin = read_chunk(chunks, rows)
        ring = self._rings.allocate(1)[0]
        self._states.share([begin.state])
        return [begin._replace(ring=ring)]

    def extend(self, chunks: list[Chunk], end: int) -> None:
        """Allocate the states and the ring that a pass over the rows before `end` writes; may be repeated."""
        last = chunks[-1].start
        newest = (end - 1) // CHUNK * CHUNK
        if newest <= last:
            return
        for start in range((last // CHECKPOINT_EVERY + 1) * CHECKPOINT_EVERY, newest, CHECKPOINT_EVERY):
            if self._states.num_free > 2 * self.sizes.sequences:  # never at the expense of a running sequence
                chunks.append(Chunk(start, self._states.allocate(1)[0], None))
        chunks.append(Chunk(newest, self._states.allocate(1)[0], self._rings.allocate(1)[0]))

    def drop_passed(self, chunks: list[Chunk], computed: int) -> None:
        """Release the chunks before that of the newest committed row."""
        while len(chunks) > 1 and chunks[1].start < computed:
            self._release(chunks.pop(0))

    def drop_from(self, chunks: list[Chunk], begin: int) -> None:
        while len(chunks) > 1 and chunks[-1].start >= begin:
            self._release(chunks.pop())

    def close(self, chunks: list[Chunk]) -> None:
        while chunks:
            self._release(chunks.pop())

    def keep_due(
        self, chunks: list[Chunk], computed: int, chain: Sequence[PrefixNode], ends_prompt: bool
    ) -> None:
        """Keep due states of committed chunks as checkpoints: some on the way, and the prompt's last one."""
        current = read_chunk(chunks, computed)
        for chunk in chunks:
            if chunk.start < computed and chunk.start % CHECKPOINT_EVERY == 0:
                self.keep(chunk, chain)
        if ends_prompt:
            self.keep(current, chain)
        self.drop_passed(chunks, computed)

    def keep(self, chunk: Chunk, chain: Sequence[PrefixNode]) -> None:
        """Keep the state as a checkpoint at its page, if that is published."""
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
            self.counts.kept += 1
        self._checkpoints.move_to_end(node)

    def forget(self, node: PrefixNode) -> None:
        state = self._checkpoints.pop(node, None)
        if state is not None:
            self._states.release([state])

    def check_integrity(self, sequences: Sequence[Sequence[Chunk]]) -> None:
        """Raise `AssertionError` if states or rings are leaked or shared wrongly."""
        states = [[chunk.state for chunk in chunks] for chunks in sequences]
        self._states.check_integrity([*states, self._held, list(self._checkpoints.values())])
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
    """Return the chunk whose state and rows a pass from row `begin` on reads."""
    return next(
        (chunk for chunk in reversed(chunks) if chunk.start < begin and chunk.ring is not None), chunks[0]
    )


def draft_room(last: int) -> int:
    """Return how many positions of its chunk follow position `last`: drafts end with their chunk."""
    return CHUNK - 1 - last % CHUNK
