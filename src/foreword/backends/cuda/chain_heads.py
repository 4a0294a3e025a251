"""Heads on a GPU that draft token by token (EAGLE, MTP): captured graphs without a host round trip between tokens.

A chain consists of two kinds of captures: the pass over committed tokens, which draws the first draft token, and a
level, which runs the newest draft tokens and draws the next ones. A level is captured once and replayed for every
depth: on the device it reads its level number, and from that its inputs. A chain that is drafted often is also captured
as a whole, which saves the gaps between its levels.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from foreword.acceptance.transfer import started
from foreword.backends.batch import MAX_DRAFT_NODES, ForwardBatch
from foreword.backends.cuda.draws import as_chains, draw_ids, vocabulary_key, words
from foreword.backends.cuda.graphs import GraphsByMemory
from foreword.backends.cuda.heads import KernelHead
from foreword.backends.cuda.kernels.attention import PART, AttentionMetadata, RowTiles
from foreword.backends.cuda.kernels.chains import (
    ChainLevels,
    ChainStarts,
    Level,
    compute_chain_levels,
    count_accepted,
    take_level,
)
from foreword.backends.cuda.kernels.rows import fill_in, take_rows
from foreword.backends.cuda.layout import Layout, PassShape, rounded_parts
from foreword.backends.cuda.upload import TiledRows, UploadedPass
from foreword.backends.interface import (
    ChainPlan,
    Chains,
    HeadCall,
    HeadInput,
    KnownChains,
)
from foreword.backends.torch.heads import TargetMatrices
from foreword.backends.torch.kv_store import TorchKvStore
from foreword.backends.torch.upload import Piece
from foreword.kv.states import as_tensor
from foreword.models.heads.opening import Head

_MOST_CHAINS = 1 << 12
"""Maximum requests of one call."""

RUNS_BEFORE_CAPTURE = 64
"""Number of runs after which a chain of one shape is captured as a single graph."""

_USUAL_LEVELS = 16
"""Maximum depth of usual chains. Deeper ones have their own memory and graphs, sized for `MAX_DRAFT_NODES`."""


@dataclass(frozen=True)
class FirstShape:
    """Key of a captured pass over committed tokens: everything that is fixed at capture."""

    pass_shape: PassShape
    max_levels: int  # levels for which memory is allocated
    vocabulary: Hashable  # identifies the draft vocabulary


@dataclass(frozen=True)
class LevelShape:
    """Key of a captured level: everything that is fixed at capture."""

    requests: int
    max_levels: int  # levels for which memory is allocated
    num_parts: int  # attention parts (`attention.PART`) of the longest text with its draft
    splits: bool  # whether every part has its own program
    vocabulary: Hashable  # identifies the draft vocabulary


class ChainShape(NamedTuple):
    """Key of a chain that is captured as one graph."""

    first: FirstShape
    level: LevelShape
    depth: int  # number of levels: the draft tokens of the longest chain


class _ChainInputs(NamedTuple):
    """Inputs of a chain other than those of its first pass, on the device; requests are padded."""

    chain_starts: ChainStarts
    temperature: Tensor  # float64 [requests]
    starts: Tensor  # int32 [requests], first valid KV row of each request
    tiles: RowTiles  # of one row each
    tables: Tensor  # int32 [requests, pages], block tables


class _ChainState(NamedTuple):
    """Memory that a level reads after the first pass or the previous level has written it."""

    levels: Tensor  # int32 [requests], draft tokens drawn so far
    # int64 [max levels, requests], target ids of the draft tokens; -1 where logits are not finite
    drawn: Tensor
    level: Level  # inputs of the next level
    states: Tensor  # [requests, hidden size], the head's states after the newest tokens
    chain_levels: ChainLevels
    cos_sin: tuple[Tensor, Tensor]  # float32 [max levels, requests, dim / 2]


class CudaHead(KernelHead):
    """A head that drafts token by token: its chains run on Triton kernels."""

    def __init__(
        self, head: Head, row_name: str, target: TargetMatrices, quantization: str, *, captures: bool
    ) -> None:
        super().__init__(head, row_name, target, quantization, captures=captures)
        self._accepted = torch.zeros(_MOST_CHAINS, dtype=torch.int32, device=target.device)
        self._first_graphs: GraphsByMemory[FirstShape, None] = GraphsByMemory()
        self._level_graphs: GraphsByMemory[LevelShape, None] = GraphsByMemory()
        self._chain_graphs: GraphsByMemory[ChainShape, None] = GraphsByMemory()
        self._run_counts: dict[ChainShape, int] = {}
        self._states: dict[tuple[int, int], _ChainState] = {}  # by levels and requests
        self.drafts_early = self._uses_kernels

    def _chains(self, call: HeadCall, plan: ChainPlan) -> Chains | None:
        """Return the planned chains; None: the caller grows them from the reference's logits.

        Top-k, top-p and min-p are not applied: they would only remove tokens that the target rarely draws.
        """
        target_ids, head_input, store = self._ids.of(plan), call.rows, call.store
        if not self._uses_kernels or target_ids is None or not isinstance(store, TorchKvStore):
            return None
        if len(plan.steps) > _MOST_CHAINS:
            return None
        batch = ForwardBatch.of(head_input.arrays)
        layout = Layout.of(batch, store.page_size, self._group, self._kv_heads)
        depth, unsettled = int(plan.steps.max()), plan.unsettled
        longest = int(plan.lengths.max()) + depth  # tokens of the longest text with its draft
        if unsettled is not None:
            longest += unsettled.draft_indices.shape[1]
        pages = max(-(-longest // store.page_size), batch.arrays.sizes.pages)
        capacity = layout.shape.logit_rows  # padded number of requests
        max_levels = _USUAL_LEVELS if depth <= _USUAL_LEVELS else MAX_DRAFT_NODES
        first = FirstShape(layout.shape, max_levels, vocabulary_key(plan))
        num_parts = rounded_parts(-(-pages * store.page_size // PART), len(plan.steps))
        level = LevelShape(capacity, max_levels, num_parts, layout.shape.splits, first.vocabulary)
        start_event = started(self._features.device)
        uploaded = self._upload.send(batch, layout, store.spare_slot)
        inputs = self._inputs(head_input, plan, level, uploaded, store.page_size)
        if unsettled is not None:
            fill_in(uploaded.batch.token_ids, unsettled.drawn)
        features = self._copy_features(as_tensor(head_input.features), layout.shape.rows)
        state = self._state(max_levels, capacity)

        def run_first() -> None:
            self._run_first(uploaded, inputs, state, features, target_ids, store)

        def run_level() -> None:
            self._run_level(level, inputs, state, target_ids, store)

        shape_key = ChainShape(first, level, depth)
        runs = self._run_counts.get(shape_key, 0)
        if not runs:
            kind = replace(first, pass_shape=first.pass_shape.kind), replace(level, num_parts=0)
            if not self._has_kernels(kind, run_first, run_level):
                return KnownChains([[]] * len(plan.steps), is_cold=True)
        self._run_counts[shape_key] = runs + 1
        is_captured = self._captures and layout.shape.is_decode and uploaded.is_fixed
        is_cold = self._run(shape_key, run_first, run_level, runs, store if is_captured else None)
        return as_chains(state.drawn[:depth], plan.steps, start_event, is_cold)

    def _run(
        self,
        shape_key: ChainShape,
        run_first: Callable[[], None],
        run_level: Callable[[], None],
        runs: int,
        store: TorchKvStore | None,
    ) -> bool:
        """Run a chain; with a store, as captured graphs. Return whether the run was cold (compiled or captured)."""

        def run_all() -> None:
            run_first()
            for _ in range(1, shape_key.depth):
                run_level()

        if store is None:
            run_all()
            return False
        if runs >= RUNS_BEFORE_CAPTURE:
            return self._chain_graphs.of(store).run(shape_key, run_all, self._is_loaded)[1]
        is_cold = self._first_graphs.of(store).run(shape_key.first, run_first, self._is_loaded)[1]
        levels = self._level_graphs.of(store)
        for _ in range(1, shape_key.depth):
            is_cold |= levels.run(shape_key.level, run_level, self._is_loaded)[1]
        return is_cold

    def _is_loaded(self) -> bool:
        """Return whether all requested kernels are loaded, so that a chain can be captured without a first run."""
        return self._kernels is not None and self._kernels.none_at_launch

    def _state(self, max_levels: int, capacity: int) -> _ChainState:
        """Return the memory that captures of this many levels and requests read and write; allocate it if needed."""
        if (max_levels, capacity) not in self._states:
            device, half = self._features.device, len(self._tensors.frequencies)
            cosines, sines = torch.zeros((2, max_levels, capacity, half), device=device)
            self._states[max_levels, capacity] = _ChainState(
                torch.zeros(capacity, dtype=torch.int32, device=device),
                torch.zeros((max_levels, capacity), dtype=torch.int64, device=device),
                Level.empty(capacity, half, device),
                torch.zeros((capacity, self.spec.hidden_size), dtype=self._features.dtype, device=device),
                ChainLevels.empty(max_levels, capacity, device),
                (cosines, sines),
            )
        return self._states[max_levels, capacity]

    def _inputs(
        self,
        head_input: HeadInput,
        plan: ChainPlan,
        shape: LevelShape,
        uploaded: UploadedPass,
        page_size: int,
    ) -> _ChainInputs:
        capacity, unsettled, pages = shape.requests, plan.unsettled, shape.num_parts * PART // page_size
        ones, row_numbers = np.ones(len(plan.steps), np.int32), np.arange(capacity, dtype=np.int32)
        # Captures read these arrays at fixed offsets, which must depend only on the number of requests. So arrays with
        # other sizes come last.
        pieces = [
            Piece(words(plan.records["stem"]), (2 * capacity,), 0),
            Piece(words(plan.records["temperature"].astype(np.float64)), (2 * capacity,), 0),
            Piece(head_input.starts, (capacity,), 0),
            Piece(plan.lengths, (capacity,), 0),
            Piece(plan.steps, (capacity,), 0),
            Piece(plan.lengths + plan.steps if unsettled is None else unsettled.row_ends, (capacity,), 0),
            Piece(ones, (capacity,), 0),
            Piece(row_numbers, (capacity,), 0),
            Piece(head_input.arrays.block_tables, (capacity, pages), 0),
        ]
        if unsettled is not None:
            pieces += [
                Piece(unsettled.first_rows, (capacity,), 0),
                Piece(unsettled.draft_indices, (capacity, unsettled.draft_indices.shape[1]), -1),
            ]
        stems, temperature, starts, lengths, steps, ends, counts, rows, tables, *pending = (
            self._chain_upload.copy(pieces)
        )
        accepted = self._accepted[:capacity]
        if unsettled is None:
            accepted.zero_()
        else:
            first_rows, draft_indices = pending
            count_accepted(unsettled.drawn, first_rows, unsettled.drafted, draft_indices, accepted)
        chain_starts = ChainStarts(
            uploaded.batch.logit_rows, accepted, lengths, steps, ends, stems.view(torch.int64)
        )
        tiles = RowTiles(rows, counts, rows, 1)
        return _ChainInputs(chain_starts, temperature.view(torch.float64), starts, tiles, tables)

    def _run_first(
        self,
        uploaded: UploadedPass,
        inputs: _ChainInputs,
        state: _ChainState,
        features: Tensor,
        target_ids: Tensor,
        store: TorchKvStore,
    ) -> None:
        """Run the committed tokens, compute positions and slots of all levels, and sample the first draft tokens."""
        batch, tables, chain_levels = uploaded.batch, uploaded.batch.block_tables, state.chain_levels
        metadata = AttentionMetadata(
            batch.positions,
            batch.prefix_lens,
            tables,
            uploaded.requests,
            store.page_size,
            starts=inputs.starts,
        )
        stream, attention_input = self._tensors.layer_inputs(batch.token_ids, features, are_head_states=False)
        cos_sin = self._angles(batch.positions)
        stream = self._layers(stream, attention_input, cos_sin, metadata, batch.slots, uploaded.tiles, store)
        compute_chain_levels(inputs.chain_starts, tables, store.page_size, store.spare_slot, chain_levels)
        angles = chain_levels.positions.unsqueeze(-1).float() * self._tensors.frequencies
        torch.cos(angles, out=state.cos_sin[0])
        torch.sin(angles, out=state.cos_sin[1])
        state.levels.zero_()
        final_rows = take_rows(stream, chain_levels.last)
        self._draw(final_rows, chain_levels.keys[0], inputs, state, target_ids)

    def _run_level(
        self,
        shape: LevelShape,
        inputs: _ChainInputs,
        state: _ChainState,
        target_ids: Tensor,
        store: TorchKvStore,
    ) -> None:
        """Run the newest draft tokens and sample the next ones."""
        level = state.level
        requests = inputs.tiles.requests
        metadata = AttentionMetadata(
            level.position, level.prefix_len, inputs.tables, requests, store.page_size, starts=inputs.starts
        )
        tiles = TiledRows(inputs.tiles, shape.num_parts, shape.splits, None)
        stream, attention_input = self._tensors.layer_inputs(level.tokens, state.states, are_head_states=True)
        cos_sin = level.cosine, level.sine
        final_rows = self._layers(stream, attention_input, cos_sin, metadata, level.slot, tiles, store)
        self._draw(final_rows, level.key, inputs, state, target_ids)

    def _draw(
        self, final_rows: Tensor, keys: Tensor, inputs: _ChainInputs, state: _ChainState, target_ids: Tensor
    ) -> None:
        """Sample the token after every row, and prepare the inputs of the next level."""
        logits, states = self._tensors.logits_and_states(final_rows)
        state.states.copy_(states)
        tokens = draw_ids(logits, inputs.temperature, keys, target_ids)
        take_level(state.levels, tokens, state.chain_levels, state.cos_sin, state.drawn, state.level)
