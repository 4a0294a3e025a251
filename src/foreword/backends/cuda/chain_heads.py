"""Heads on a GPU that draft token by token (EAGLE, MTP): captured graphs without a host round trip in between.

A chain consists of two kinds of captures: the pass over committed tokens with the first draw, and a level, which runs
the newest draft tokens and draws the next ones. A level is captured once and replayed for every depth: it reads its
level number, and from it its inputs, on the device. A chain that is drafted often is also captured as a whole, which
saves the gaps between its levels.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from foreword.acceptance.transfer import started
from foreword.backends.batch import MAX_DRAFT_NODES, ForwardBatch
from foreword.backends.cuda.draws import as_chains, drawn_ids, names_in, words
from foreword.backends.cuda.graphs import GraphsByMemory
from foreword.backends.cuda.heads import KernelHead
from foreword.backends.cuda.kernels.attention import PART, RowTiles, Sight
from foreword.backends.cuda.kernels.chains import (
    ChainEnds,
    ChainPlaces,
    Level,
    chain_places,
    count_accepted,
    take_level,
)
from foreword.backends.cuda.kernels.rows import fill_in, take_rows
from foreword.backends.cuda.layout import DECODE_ROWS, Layout, PassShape, rounded_parts
from foreword.backends.cuda.upload import TiledRows, UploadedPass
from foreword.backends.interface import (
    ChainPlan,
    Chains,
    HeadCall,
    HeadInput,
    HeadOutput,
    KnownChains,
    KvStore,
)
from foreword.backends.torch.heads import TargetMatrices
from foreword.backends.torch.kv_store import TorchKvStore
from foreword.backends.torch.upload import Piece
from foreword.kv.states import as_tensor
from foreword.models.heads.opening import Head

_MOST_CHAINS = 1 << 12
"""Maximum requests of one call."""

OFTEN = 64
"""Number of runs after which a chain of some depth is captured as one graph."""

_USUAL_LEVELS = 16
"""Usual maximum depth, for which memory is allocated; deeper chains have their own memory and graphs."""


@dataclass(frozen=True)
class FirstShape:
    """Key of a captured pass over committed tokens: everything that is fixed at capture."""

    rows: PassShape
    most: int  # maximum levels
    names: Hashable  # identifies the draft vocabulary


@dataclass(frozen=True)
class LevelShape:
    """Key of a captured level: everything that is fixed at capture."""

    requests: int
    most: int  # maximum levels
    parts: int  # attention parts of the longest text with its draft
    splits: bool  # whether every part has its own program
    names: Hashable  # identifies the draft vocabulary


class ChainShape(NamedTuple):
    """Key of a chain that is captured as one graph."""

    first: FirstShape
    level: LevelShape
    depth: int


class _ChainInputs(NamedTuple):
    """Inputs of a chain other than those of its first pass, on the device; requests are padded."""

    ends: ChainEnds
    temperature: Tensor  # float64 [requests]
    starts: Tensor  # int32 [requests], first valid KV row of each request
    tiles: RowTiles  # one row each
    tables: Tensor  # int32 [requests, pages]


class _ChainState(NamedTuple):
    """State that a level reads from the previous one."""

    levels: Tensor  # int32 [requests], draft tokens drawn so far
    drawn: Tensor  # int64 [most, requests], target ids of the draft tokens; -1 where logits are not finite
    level: Level
    states: Tensor  # [requests, hidden size]
    places: ChainPlaces
    cos_sin: tuple[Tensor, Tensor]  # float32 [most, requests, dim / 2]


class CudaHead(KernelHead):
    """A head that drafts token by token: its chains run on Triton kernels."""

    def __init__(
        self, head: Head, rows: str, ends: TargetMatrices, quantization: str, *, captures: bool
    ) -> None:
        super().__init__(head, rows, ends, quantization, captures=captures, captured_rows=DECODE_ROWS[-1])
        self._accepted = torch.zeros(_MOST_CHAINS, dtype=torch.int32, device=ends.device)
        self._first_graphs: GraphsByMemory[FirstShape, None] = GraphsByMemory()
        self._level_graphs: GraphsByMemory[LevelShape, None] = GraphsByMemory()
        self._chain_graphs: GraphsByMemory[ChainShape, None] = GraphsByMemory()
        self._run_counts: dict[ChainShape, int] = {}
        self._states: dict[tuple[int, int], _ChainState] = {}  # by levels and requests
        self.drafts_early = self._uses_kernels

    def _output(self, wanted: HeadInput, store: KvStore) -> HeadOutput:
        return self._reference.forward(wanted, store)

    def _chains(self, call: HeadCall, plan: ChainPlan) -> Chains | None:
        """Return planned chains; None: use the reference's logits.

        Top-k, top-p and min-p are not applied: they would cut tokens that the target rarely draws.
        """
        names, wanted, store = self._ids.of(plan), call.rows, call.store
        if not self._uses_kernels or names is None or not isinstance(store, TorchKvStore):
            return None
        if len(plan.steps) > _MOST_CHAINS:
            return None
        batch = ForwardBatch.of(wanted.arrays)
        layout = Layout.of(batch, store.page_size, self._group, self._kv_heads)
        depth, unsettled = int(plan.steps.max()), plan.unsettled
        longest = int(plan.lengths.max()) + depth + (0 if unsettled is None else unsettled.places.shape[1])
        pages = max(-(-longest // store.page_size), batch.arrays.sizes.pages)
        room, most = layout.shape.logit_rows, _USUAL_LEVELS if depth <= _USUAL_LEVELS else MAX_DRAFT_NODES
        first = FirstShape(layout.shape, most, names_in(plan))
        parts = rounded_parts(-(-pages * store.page_size // PART), len(plan.steps))
        level = LevelShape(room, most, parts, layout.shape.splits, first.names)
        began = started(self._features.device)
        uploaded = self._upload.send(batch, layout, store.spare_slot)
        given = self._inputs(wanted, plan, level, uploaded, store.page_size)
        if unsettled is not None:
            fill_in(uploaded.batch.token_ids, unsettled.drawn)
        features, state = (
            self._copy_features(as_tensor(wanted.features), layout.shape.rows),
            self._state(most, room),
        )

        def run_first() -> None:
            self._run_first(uploaded, given, state, features, names, store)

        def run_level() -> None:
            self._run_level(level, given, state, names, store)

        shape_key = ChainShape(first, level, depth)
        runs = self._run_counts.get(shape_key, 0)
        if not runs:
            kind = replace(first, rows=first.rows.kind), replace(level, parts=0)
            if not self._has_kernels(kind, run_first, run_level):
                return KnownChains([[]] * len(plan.steps), is_cold=True)
        self._run_counts[shape_key] = runs + 1
        is_captured = self._captures and layout.shape.is_decode and uploaded.stays
        is_cold = self._run(shape_key, run_first, run_level, runs, store if is_captured else None)
        # Other chains may run before these tokens are verified, and all write their result to the same memory.
        return as_chains(state.drawn[:depth].clone(), plan.steps, began, is_cold)

    def _run(
        self,
        shape_key: ChainShape,
        run_first: Callable[[], None],
        run_level: Callable[[], None],
        runs: int,
        store: TorchKvStore | None,
    ) -> bool:
        """Run a chain; with a store, by captured graphs. Return whether it was cold (compiled or captured)."""

        def run_all() -> None:
            run_first()
            for _ in range(1, shape_key.depth):
                run_level()

        if store is None:
            run_all()
            return False
        if runs >= OFTEN:
            return self._chain_graphs.of(store).run(shape_key, run_all, self._is_loaded)[1]
        is_cold = self._first_graphs.of(store).run(shape_key.first, run_first, self._is_loaded)[1]
        levels = self._level_graphs.of(store)
        for _ in range(1, shape_key.depth):
            is_cold |= levels.run(shape_key.level, run_level, self._is_loaded)[1]
        return is_cold

    def _is_loaded(self) -> bool:
        """Return whether all kernels of a chain are loaded: it has run before, or they were compiled."""
        return self._kernels is not None and self._kernels.has_all

    def _state(self, most: int, room: int) -> _ChainState:
        """Return the memory that captures of this many levels and requests read and write."""
        if (most, room) not in self._states:
            device, half = self._features.device, len(self._tensors.frequencies)
            cosines, sines = torch.zeros((2, most, room, half), device=device)
            self._states[most, room] = _ChainState(
                torch.zeros(room, dtype=torch.int32, device=device),
                torch.zeros((most, room), dtype=torch.int64, device=device),
                Level.empty(room, half, device),
                torch.zeros((room, self.spec.hidden_size), dtype=self._features.dtype, device=device),
                ChainPlaces.empty(most, room, device),
                (cosines, sines),
            )
        return self._states[most, room]

    def _inputs(
        self, wanted: HeadInput, plan: ChainPlan, shape: LevelShape, uploaded: UploadedPass, page_size: int
    ) -> _ChainInputs:
        room, unsettled, pages = shape.requests, plan.unsettled, shape.parts * PART // page_size
        ones, places = np.ones(len(plan.steps), np.int32), np.arange(room, dtype=np.int32)
        # Inputs of the first pass come first, so that their offsets depend only on the number of requests.
        pieces = [
            Piece(words(plan.records["stem"]), (2 * room,), 0),
            Piece(words(plan.records["temperature"].astype(np.float64)), (2 * room,), 0),
            Piece(wanted.starts, (room,), 0),
            Piece(plan.lengths, (room,), 0),
            Piece(plan.steps, (room,), 0),
            Piece(plan.lengths + plan.steps if unsettled is None else unsettled.ends, (room,), 0),
            Piece(ones, (room,), 0),
            Piece(places, (room,), 0),
            Piece(wanted.arrays.block_tables, (room, pages), 0),
        ]
        if unsettled is not None:  # after the inputs that every chain has, whose offsets must not change
            pieces += [
                Piece(unsettled.first, (room,), 0),
                Piece(unsettled.places, (room, unsettled.places.shape[1]), -1),
            ]
        stems, temperature, starts, lengths, steps, ends, counts, rows, tables, *judged = self._more.copy(
            pieces
        )
        accepted = self._accepted[:room]
        if unsettled is None:
            accepted.zero_()
        else:
            count_accepted(unsettled.drawn, judged[0], unsettled.drafted, judged[1], accepted)
        chain = ChainEnds(uploaded.batch.logit_rows, accepted, lengths, steps, ends, stems.view(torch.int64))
        tiles = RowTiles(rows, counts, rows, 1)
        return _ChainInputs(chain, temperature.view(torch.float64), starts, tiles, tables)

    def _run_first(
        self,
        uploaded: UploadedPass,
        given: _ChainInputs,
        state: _ChainState,
        features: Tensor,
        names: Tensor,
        store: TorchKvStore,
    ) -> None:
        """Run the committed tokens, compute the slots of all levels, and sample the first draft token."""
        batch, tables, places = uploaded.batch, uploaded.batch.block_tables, state.places
        sight = Sight(
            batch.positions,
            batch.prefix_lens,
            tables,
            uploaded.requests,
            store.page_size,
            False,
            given.starts,
        )
        stream, read = self._tensors.begin(batch.token_ids, features, are_own=False)
        cos_sin = self._angles(batch.positions)
        stream = self._layers(stream, read, cos_sin, sight, batch.slots, uploaded.tiles, store)
        chain_places(given.ends, tables, store.page_size, store.spare_slot, places)
        angles = places.positions.unsqueeze(-1).float() * self._tensors.frequencies
        torch.cos(angles, out=state.cos_sin[0])
        torch.sin(angles, out=state.cos_sin[1])
        state.levels.zero_()
        last = take_rows(stream, places.last, stream.new_empty((len(places.last), stream.shape[1])))
        self._draw(last, places.keys[0], given, state, names)

    def _run_level(
        self, shape: LevelShape, given: _ChainInputs, state: _ChainState, names: Tensor, store: TorchKvStore
    ) -> None:
        """Run the newest draft tokens and sample the next ones."""
        level = state.level
        requests = given.tiles.requests
        sight = Sight(
            level.position, level.seen, given.tables, requests, store.page_size, False, given.starts
        )
        tiles = TiledRows(given.tiles, shape.parts, shape.splits, None)
        stream, read = self._tensors.begin(level.tokens, state.states, are_own=True)
        cos_sin = level.cosine, level.sine
        last = self._layers(stream, read, cos_sin, sight, level.slot, tiles, store)
        self._draw(last, level.key, given, state, names)

    def _draw(
        self, last: Tensor, keys: Tensor, given: _ChainInputs, state: _ChainState, names: Tensor
    ) -> None:
        """Sample the token after every row, and prepare the inputs of the next level."""
        logits, states = self._tensors.outcome(last)
        state.states.copy_(states)
        tokens = drawn_ids(logits, given.temperature, keys, names)
        take_level(state.levels, tokens, state.places, state.cos_sin, state.drawn, state.level)
