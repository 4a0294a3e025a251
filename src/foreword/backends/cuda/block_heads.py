"""Heads on a GPU that draft a block in one pass (P-EAGLE, DFlash, DFlash2, DSpark): a captured graph with the draws."""

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from foreword.acceptance.noise import extend_keys
from foreword.acceptance.transfer import started
from foreword.backends.batch import BatchArrays, ForwardBatch, Ints
from foreword.backends.cuda.draws import as_chains, draw_ids, vocabulary_key, words
from foreword.backends.cuda.graphs import GraphsByMemory
from foreword.backends.cuda.heads import KernelHead
from foreword.backends.cuda.kernels.attention import AttentionMetadata
from foreword.backends.cuda.kernels.rotation import rotate_and_store
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
from foreword.backends.torch.block_parts import block_indices
from foreword.backends.torch.heads import TargetMatrices
from foreword.backends.torch.kv_store import TorchKvStore
from foreword.backends.torch.upload import Piece
from foreword.kv.states import as_tensor
from foreword.models.heads.opening import Head
from foreword.models.heads.spec import MARKOV, Join

_KV = "self_attn.joined_kv"
"""Name of a layer's key and value projections, which are a slice of its joined qkv matrix."""


@dataclass(frozen=True)
class BlockShape:
    """Key of a captured pass: everything that is fixed at capture."""

    pass_shape: PassShape
    context: int  # padded rows of committed tokens to store first; 0: none
    requests: int
    levels: int  # maximum draft tokens of a request that are drawn; 0: the pass draws none
    vocabulary: Hashable = None  # identifies the draft vocabulary


class _BlockInputs(NamedTuple):
    """Inputs of a pass other than its batch arrays, on the device and padded. Wanted rows are those with logits."""

    starts: Tensor  # int32 [rows], first valid KV row of the row's request
    last_positions: Tensor  # int32 [rows], last position that each row attends to
    positions: Tensor  # int32 [context], of the committed tokens to store
    slots: Tensor  # int32 [context], where to store them
    keys: Tensor  # int64 [wanted rows], noise keys
    temperature: Tensor  # float64 [wanted rows]
    row_indices: Tensor  # int32 [levels, requests], the wanted row of every draft token
    newest: Tensor  # int32 [requests], the token before the first draft token
    block_indices: (
        Tensor  # int32 [rows], places of rows in their blocks; empty in a head without convolutions
    )


class CudaBlockHead(KernelHead):
    """A head that drafts a whole block; passes over draft tokens run on Triton kernels."""

    # No plans with `unsettled` texts: a block begins after the newest token, which must be known.
    drafts_early = False

    def __init__(
        self, head: Head, row_name: str, target: TargetMatrices, quantization: str, *, captures: bool
    ) -> None:
        super().__init__(head, row_name, target, quantization, captures=captures)
        self._reads_context = head.spec.join is Join.CONTEXT
        # Whether logits depend on the token before their position
        self._is_dependent = head.spec.selector is not None or head.spec.has(MARKOV[0] + ".weight")
        self._passes: GraphsByMemory[BlockShape, tuple[Tensor, Tensor]] = GraphsByMemory()
        if self._uses_kernels and self._reads_context:
            for index, layer in enumerate(head.spec.layers):
                for suffix in ("weight", "bias"):
                    joined = self._tensors.by_name.get(f"layers.{index}.self_attn.joined.{suffix}")
                    if joined is not None:
                        query_rows = layer.attention.num_heads * layer.attention.head_dim
                        self._tensors.by_name[f"layers.{index}.{_KV}.{suffix}"] = joined[query_rows:]

    def _chains(self, call: HeadCall, plan: ChainPlan) -> Chains | None:
        target_ids = self._ids.of(plan)
        start_event = started(self._features.device)
        result = None
        if target_ids is not None:
            result = self._run(call.context, call.rows, call.store, plan, target_ids)
        if result is None:
            # Kernels that are still being compiled: empty chains meanwhile. Otherwise they cannot run this pass, and
            # the caller grows the chains from logits.
            return None if self.is_ready else KnownChains([[]] * len(plan.steps), is_cold=True)
        (drawn, _), is_cold = result
        return as_chains(drawn, plan.steps, start_event, is_cold)

    def _output(self, head_input: HeadInput, store: KvStore) -> HeadOutput:
        """Return logits and states of the wanted rows, which are valid until the next pass."""
        num_logits = len(head_input.arrays.logit_rows)
        # The kernels run only passes over draft blocks. There, `are_head_states` is true in a head with a context
        # (DFlash: the rows have no features) and false in the others (the features are the target's states).
        is_draft = num_logits > 0 and head_input.are_head_states == self._reads_context
        result = self._run(None, head_input, store) if is_draft else None
        if result is None:
            return self._reference.forward(head_input, store)
        (logits, states), is_cold = result
        return HeadOutput(logits[:num_logits], states[:num_logits], is_cold)

    def _run(
        self,
        context: HeadInput | None,
        blocks: HeadInput,
        store: KvStore,
        plan: ChainPlan | None = None,
        target_ids: Tensor | None = None,
    ) -> tuple[tuple[Tensor, Tensor], bool] | None:
        """Return ((draft tokens or logits, states), whether the pass was cold); None: the kernels cannot run the pass.

        With a `plan`, the result has draft tokens [levels, requests], otherwise logits.
        """
        if not self._uses_kernels or not isinstance(store, TorchKvStore):
            return None
        batch = ForwardBatch.of(blocks.arrays)
        layout = Layout.of(batch, store.page_size, self._group, self._kv_heads)
        if layout.shape.has_trees or layout.shape.wide_tiles:
            return None
        shape = BlockShape(
            pass_shape=layout.shape,
            context=0 if context is None else padded_rows(len(context.features)),
            requests=padded_rows(len(blocks.starts)),
            levels=0 if plan is None else int(plan.steps.max()),
            vocabulary=None if plan is None else vocabulary_key(plan),
        )
        uploaded = self._upload.send(batch, layout, store.spare_slot)
        inputs = self._inputs(context, blocks, plan, shape, store)
        with_features = blocks if context is None and not self._reads_context else context
        features = self._features[:0]
        if with_features is not None:
            features = self._copy_features(
                as_tensor(with_features.features), shape.context or shape.pass_shape.rows
            )

        def body() -> tuple[Tensor, Tensor]:
            if context is not None:
                self._store_context(features, inputs, store)
            logits, states = self._pass(uploaded, inputs, features, store)
            return (logits if target_ids is None else self._draw(logits, states, inputs, target_ids)), states

        if not self._has_kernels(replace(shape, pass_shape=shape.pass_shape.kind), body):
            return None
        fits = max(shape.pass_shape.rows, shape.context) <= len(self._features)
        is_captured = self._captures and uploaded.is_fixed and fits
        return self._passes.of(store).run(shape, body) if is_captured else (body(), False)

    def _inputs(
        self,
        context: HeadInput | None,
        blocks: HeadInput,
        plan: ChainPlan | None,
        shape: BlockShape,
        store: TorchKvStore,
    ) -> _BlockInputs:
        rows, num_logits, requests = shape.pass_shape.rows, shape.pass_shape.logit_rows, shape.requests
        context_arrays = None if context is None else context.arrays
        empty = np.empty(0, np.int32)
        arrays, drawn = blocks.arrays, _Draws.of(plan, shape.levels)
        convolves = self.spec.convolution is not None
        pieces = [
            Piece(words(drawn.keys), (2 * num_logits,), 0),
            Piece(words(drawn.temperature), (2 * num_logits,), 0),
            Piece(blocks.starts, (rows,), 0),
            Piece(_last_positions(arrays), (rows,), 0),
            Piece(empty if context_arrays is None else context_arrays.positions, (shape.context,), 0),
            Piece(
                empty if context_arrays is None else context_arrays.slots, (shape.context,), store.spare_slot
            ),
            Piece(drawn.row_indices, (shape.levels, requests), 0),
            Piece(arrays.token_ids[arrays.row_starts[:-1]], (requests,), 0),
            Piece(block_indices(arrays.row_starts) if convolves else empty, (rows if convolves else 0,), 0),
        ]
        keys, temperature, starts, last_positions, positions, slots, *others = self._chain_upload.copy(pieces)
        draws = keys.view(torch.int64), temperature.view(torch.float64)
        return _BlockInputs(starts, last_positions, positions, slots, *draws, *others)

    def _store_context(self, features: Tensor, inputs: _BlockInputs, store: TorchKvStore) -> None:
        """Store keys and values of every layer, computed from the target's states."""
        context = self._tensors.context(features)
        cos_sin, (keys, values) = self._angles(inputs.positions), store.arrays(self._row_name)
        no_queries = context.new_empty((len(context), 0, self.spec.layers[0].attention.head_dim))
        for index in range(len(self.spec.layers)):
            kv = self._tensors.linear(context, f"layers.{index}.{_KV}")
            norms, eps = self._query_key_norms(index), self.spec.norm.eps
            rotate_and_store(kv, cos_sin, inputs.slots, norms, eps, keys[index], values[index], no_queries)

    def _pass(
        self, uploaded: UploadedPass, inputs: _BlockInputs, features: Tensor, store: TorchKvStore
    ) -> tuple[Tensor, Tensor]:
        """Return logits (float32) and states of the wanted rows."""
        batch = uploaded.batch
        # Rows of a block may attend to later positions of the block, so their own positions are not used here.
        metadata = AttentionMetadata(
            inputs.last_positions,
            batch.prefix_lens,
            batch.block_tables,
            uploaded.requests,
            store.page_size,
            starts=inputs.starts,
        )
        stream, attention_input = self._tensors.layer_inputs(
            batch.token_ids, features, are_head_states=self._reads_context
        )
        cos_sin = self._angles(batch.positions)
        stream = self._layers(
            stream,
            attention_input,
            cos_sin,
            metadata,
            batch.slots,
            uploaded.tiles,
            store,
            inputs.block_indices,
        )
        logits, states = self._tensors.logits_and_states(take_rows(stream, batch.logit_rows))
        return logits.float(), states

    def _draw(self, logits: Tensor, states: Tensor, inputs: _BlockInputs, target_ids: Tensor) -> Tensor:
        """Sample the draft token of every position, as ids of the target's vocabulary, int64 [levels, requests].

        -1: logits are not finite.

        In DSpark and DFlash2, logits depend on the previous token, so the positions are drawn in turn.
        """
        if not self._is_dependent:
            drawn = draw_ids(logits, inputs.temperature, inputs.keys, target_ids)
            return drawn[inputs.row_indices]
        previous, chain = inputs.newest, []
        for rows in inputs.row_indices:
            after = self._tensors.logits_after_ids(previous.clamp(min=0), logits[rows], states[rows])
            previous = draw_ids(after, inputs.temperature[rows], inputs.keys[rows], target_ids)
            chain.append(previous)
        return torch.stack(chain)


class _Draws(NamedTuple):
    """Sampling parameters of the wanted rows of a pass."""

    keys: np.ndarray  # uint64 [wanted rows]
    temperature: np.ndarray  # float64 [wanted rows]
    row_indices: Ints  # [levels, requests], index of the wanted row

    @staticmethod
    def of(plan: ChainPlan | None, levels: int) -> "_Draws":
        if plan is None:
            return _Draws(np.empty(0, np.uint64), np.empty(0, np.float64), np.empty((0, 0), np.int32))
        # The wanted rows are those of the first request's draft tokens, then the second's, and so on.
        num_tokens = int(plan.steps.sum())
        firsts = np.cumsum(plan.steps) - plan.steps  # [requests], index of each request's first wanted row
        request_of_token = np.repeat(np.arange(len(plan.steps)), plan.steps)
        level = np.arange(num_tokens) - firsts[request_of_token]
        # A request with fewer draft tokens draws its last one again; the result is not read.
        row_indices = firsts + np.minimum(np.arange(levels)[:, None], plan.steps - 1)
        return _Draws(
            extend_keys(plan.records["stem"][request_of_token], plan.lengths[request_of_token] + level),
            plan.records["temperature"][request_of_token].astype(np.float64),
            row_indices.astype(np.int32),
        )


def _last_positions(arrays: BatchArrays) -> Ints:
    """Return the last position that each row attends to: its own, or the block's last with bidirectional attention."""
    num_drafted: Ints = np.unpackbits(arrays.ancestor_masks.view(np.uint8), axis=1).sum(
        axis=1, dtype=np.int32
    )
    return arrays.prefix_lens + num_drafted - 1
