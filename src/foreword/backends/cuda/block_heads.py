"""Heads on a GPU that draft all positions in one pass (P-EAGLE, DFlash, DSpark): one captured graph, draws included."""

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from foreword.acceptance.noise import extend_keys
from foreword.acceptance.transfer import started
from foreword.backends.batch import BatchArrays, ForwardBatch, Ints
from foreword.backends.cuda.draws import as_chains, drawn_ids, names_in, words
from foreword.backends.cuda.graphs import GraphsByMemory
from foreword.backends.cuda.heads import KernelHead
from foreword.backends.cuda.kernels.attention import Sight
from foreword.backends.cuda.kernels.rotation import rotate_and_keep
from foreword.backends.cuda.kernels.rows import take_rows
from foreword.backends.cuda.layout import Layout, PassShape, padded_rows
from foreword.backends.cuda.upload import UploadedPass
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
from foreword.models.heads.spec import MARKOV, Join

_KV = "self_attn.joined_kv"
"""Key and value projections of a layer: a slice of its qkv matrix."""


@dataclass(frozen=True)
class BlockShape:
    """Key of a captured pass: everything that is fixed at capture."""

    rows: PassShape
    context: int  # rows of committed tokens to store first; 0: none
    requests: int
    levels: int  # positions that are drawn; 0: none
    names: Hashable = None  # identity of the draft vocabulary


class _BlockInputs(NamedTuple):
    """Inputs of a pass other than its batch arrays, on the device and padded."""

    starts: Tensor  # int32 [rows], first valid KV row of the row's request
    seen: Tensor  # int32 [rows], last position that each row attends to
    positions: Tensor  # int32 [context]
    slots: Tensor  # int32 [context]
    keys: Tensor  # int64 [wanted rows], noise keys
    temperature: Tensor  # float64 [wanted rows]
    places: Tensor  # int32 [levels, requests], the wanted row of every position
    newest: Tensor  # int32 [requests], the token before the first draft token


CAPTURED_ROWS = 512
"""Rows of the largest pass that is captured: 32 requests with blocks of 16."""


class CudaBlockHead(KernelHead):
    """A head that drafts a whole block; passes over draft tokens run on Triton kernels."""

    drafts_early = False  # its chains come from one pass over known texts

    def __init__(
        self, head: Head, rows: str, ends: TargetMatrices, quantization: str, *, captures: bool
    ) -> None:
        super().__init__(head, rows, ends, quantization, captures=captures, captured_rows=CAPTURED_ROWS)
        self._reads_context = head.spec.join is Join.CONTEXT
        self._is_markov = head.spec.has(MARKOV[0] + ".weight")
        self._passes: GraphsByMemory[BlockShape, tuple[Tensor, Tensor]] = GraphsByMemory()
        if self._uses_kernels and self._reads_context:
            for index, layer in enumerate(head.spec.layers):
                for kind in ("weight", "bias"):
                    whole = self._tensors.by_name.get(f"layers.{index}.self_attn.joined.{kind}")
                    if whole is not None:
                        queries = layer.attention.num_heads * layer.attention.head_dim
                        self._tensors.by_name[f"layers.{index}.{_KV}.{kind}"] = whole[queries:]

    def _chains(self, call: HeadCall, plan: ChainPlan) -> Chains | None:
        names = self._ids.of(plan)
        began = started(self._features.device)
        found = None if names is None else self._run(call.context, call.rows, call.store, plan, names)
        if found is None:
            return None if self.is_ready else KnownChains([[]] * len(plan.steps), is_cold=True)
        (drawn, _), is_cold = found
        return as_chains(drawn, plan.steps, began, is_cold)

    def _output(self, wanted: HeadInput, store: KvStore) -> HeadOutput:
        """The result is valid until the next pass."""
        is_draft = len(wanted.arrays.logit_rows) > 0 and wanted.are_own == self._reads_context
        found = self._run(None, wanted, store) if is_draft else None
        if found is None:
            return self._reference.forward(wanted, store)
        outcome, is_cold = found
        logits, states = (rows[: len(wanted.arrays.logit_rows)] for rows in outcome)
        return HeadOutput(logits, states, is_cold)

    def _run(
        self,
        context: HeadInput | None,
        blocks: HeadInput,
        store: KvStore,
        plan: ChainPlan | None = None,
        names: Tensor | None = None,
    ) -> tuple[tuple[Tensor, Tensor], bool] | None:
        """Return draft tokens [levels, requests] if there is a plan, else logits; states; and whether it was cold.

        None: it cannot.
        """
        if not self._uses_kernels or not isinstance(store, TorchKvStore):
            return None
        batch = ForwardBatch.of(blocks.arrays)
        layout = Layout.of(batch, store.page_size, self._group, self._kv_heads)
        if layout.shape.has_trees or layout.shape.wide_tiles:
            return None
        shape = BlockShape(
            layout.shape,
            0 if context is None else padded_rows(len(context.features)),
            padded_rows(len(blocks.starts)),
            0 if plan is None else int(plan.steps.max()),
            None if plan is None else names_in(plan),
        )
        uploaded = self._upload.send(batch, layout, store.spare_slot)
        given = self._inputs(context, blocks, plan, shape, store)
        read = blocks if context is None and not self._reads_context else context
        features = self._features[:0]
        if read is not None:
            features = self._copy_features(as_tensor(read.features), shape.context or shape.rows.rows)

        def body() -> tuple[Tensor, Tensor]:
            if context is not None:
                self._keep(features, given, store)
            logits, states = self._pass(shape, uploaded, given, features, store)
            return (logits if names is None else self._drawn(logits, given, names)), states

        if not self._has_kernels(replace(shape, rows=shape.rows.kind), body):
            return None
        fits = max(shape.rows.rows, shape.context) <= self._captured_rows
        captured = self._captures and uploaded.stays and fits
        return self._passes.of(store).run(shape, body) if captured else (body(), False)

    def _inputs(
        self,
        context: HeadInput | None,
        blocks: HeadInput,
        plan: ChainPlan | None,
        shape: BlockShape,
        store: TorchKvStore,
    ) -> _BlockInputs:
        rows, wanted, requests = shape.rows.rows, shape.rows.logit_rows, shape.requests
        kept = None if context is None else context.arrays
        none = np.empty(0, np.int32)
        arrays, drawn = blocks.arrays, _Draws.of(plan, shape.levels)
        pieces = [
            Piece(words(drawn.keys), (2 * wanted,), 0),
            Piece(words(drawn.temperature), (2 * wanted,), 0),
            Piece(blocks.starts, (rows,), 0),
            Piece(_seen(arrays), (rows,), 0),
            Piece(none if kept is None else kept.positions, (shape.context,), 0),
            Piece(none if kept is None else kept.slots, (shape.context,), store.spare_slot),
            Piece(drawn.places, (shape.levels, requests), 0),
            Piece(arrays.token_ids[arrays.row_starts[:-1]], (requests,), 0),
        ]
        keys, temperature, starts, seen, positions, slots, places, newest = self._more.copy(pieces)
        draws = keys.view(torch.int64), temperature.view(torch.float64)
        return _BlockInputs(starts, seen, positions, slots, *draws, places, newest)

    def _keep(self, features: Tensor, given: _BlockInputs, store: TorchKvStore) -> None:
        """Compute keys and values of every layer from the target's states."""
        context = self._tensors.context(features)
        cos_sin, (keys, values) = self._angles(given.positions), store.arrays(self._rows)
        no_queries = context.new_empty((len(context), 0, self.spec.layers[0].attention.head_dim))
        for index in range(len(self.spec.layers)):
            made = self._tensors.linear(context, f"layers.{index}.{_KV}")
            norms, eps = self._pair_of_norms(index), self.spec.norm.eps
            rotate_and_keep(made, cos_sin, given.slots, norms, eps, keys[index], values[index], no_queries)

    def _pass(
        self,
        shape: BlockShape,
        uploaded: UploadedPass,
        given: _BlockInputs,
        features: Tensor,
        store: TorchKvStore,
    ) -> tuple[Tensor, Tensor]:
        """Return logits and states of the wanted rows."""
        batch = uploaded.batch
        sight = Sight(
            given.seen,
            batch.prefix_lens,
            batch.block_tables,
            uploaded.requests,
            store.page_size,
            False,
            given.starts,
        )
        stream, read = self._tensors.begin(batch.token_ids, features, are_own=self._reads_context)
        # Rows of a block may attend to later positions of the block.
        cos_sin = self._angles(batch.positions)
        stream = self._layers(stream, read, cos_sin, sight, batch.slots, uploaded.tiles, store)
        last = take_rows(stream, batch.logit_rows, stream.new_empty((shape.rows.logit_rows, stream.shape[1])))
        logits, states = self._tensors.outcome(last)
        return logits.float(), states

    def _drawn(self, logits: Tensor, given: _BlockInputs, names: Tensor) -> Tensor:
        """Return the target's ids, int64 [levels, requests]; -1 where the logits are not finite."""
        if not self._is_markov:
            drawn = drawn_ids(logits, given.temperature, given.keys, names)
            return drawn[given.places]
        before, chain = given.newest, []
        for rows in given.places:
            after = self.markov_after(self._tensors.by_name[MARKOV[0] + ".weight"][before.clamp(min=0)])
            now = given.temperature[rows], given.keys[rows]
            before = drawn_ids(logits[rows] + after, *now, names)
            chain.append(before)
        return torch.stack(chain)


class _Draws(NamedTuple):
    """Sampling parameters of the wanted rows of a pass."""

    keys: np.ndarray  # uint64 [wanted rows]
    temperature: np.ndarray  # float64 [wanted rows]
    places: Ints  # [levels, requests]

    @staticmethod
    def of(plan: ChainPlan | None, levels: int) -> "_Draws":
        if plan is None:
            return _Draws(np.empty(0, np.uint64), np.empty(0, np.float64), np.empty((0, 0), np.int32))
        ends = np.cumsum(plan.steps)
        owners = np.repeat(np.arange(len(plan.steps)), plan.steps)
        level = np.arange(ends[-1]) - np.repeat(ends - plan.steps, plan.steps)
        # A request with fewer positions draws its last one again; the result is not read.
        places = ends - plan.steps + np.minimum(np.arange(levels)[:, None], plan.steps - 1)
        return _Draws(
            extend_keys(plan.records["stem"][owners], plan.lengths[owners] + level),
            plan.records["temperature"][owners].astype(np.float64),
            places.astype(np.int32),
        )


def _seen(arrays: BatchArrays) -> Ints:
    """Last position that each row attends to: its own, or the block's last if attention in a block is bidirectional."""
    drafted: Ints = np.unpackbits(arrays.ancestor_masks.view(np.uint8), axis=1).sum(axis=1, dtype=np.int32)
    return arrays.prefix_lens + drafted - 1
