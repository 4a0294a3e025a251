"""Draft heads on the CPU kernels: one native call per pass, in the decoder's number format."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foreword.backends.batch import Ints
from foreword.backends.cpu.grouped import readable_blocks
from foreword.backends.cpu.kv_store import CpuKvStore
from foreword.backends.cpu.latent import AttentionNames, load_latent
from foreword.backends.cpu.packing import BLOCK_KINDS, WeightFormat, rotated_group_size
from foreword.backends.cpu.weights import load_experts
from foreword.backends.interface import ChainPlan, HeadCall, HeadInput, HeadOutput, KnownChains, KvStore
from foreword.backends.torch.block_parts import candidate_logits
from foreword.backends.weight_loader import piece_rows
from foreword.kv.states import as_array
from foreword.models.formats.checkpoint import QuantizedTensor
from foreword.models.heads.opening import Head
from foreword.models.heads.spec import CONVOLUTIONS, MARKOV, SELECTOR, BlockConvolution, Join
from foreword.models.rope import frequencies

if TYPE_CHECKING:
    from foreword.kernels import _native

_INPUT_NORMS = {
    Join.CONCAT: ("layers.0.input_layernorm", "layers.0.hidden_norm"),
    Join.FUSED: ("enorm", "hnorm"),
    Join.CONTEXT: ("", "hidden_norm"),
}
"""Names of the norms of the token embedding and of the features, by join; empty: none."""

_OUTPUT, _MLP = "self_attn.o_proj", ("gate_proj", "up_proj", "down_proj")


def _layer_blocks(head: Head) -> dict[str, QuantizedTensor]:
    """Return the layers' matrices as blocks by name; none if one matrix has no blocks.

    Matrices with the same input need formats that share it.
    """
    matrices: dict[str, QuantizedTensor] = {}
    for name, shape in head.spec.shapes.items():
        if name.startswith("layers.") and len(shape) == 2:
            blocks = readable_blocks(head.packed_tensor, name)
            if blocks is None:
                return {}
            matrices[name] = blocks
    return matrices


class HeadPacker:
    """Packs the matrices of one head in the decoder's number format."""

    def __init__(self, head: Head, number_format: WeightFormat, isa: str, threads: int) -> None:
        from foreword.kernels import _native

        self._head = head
        self._number_format = number_format
        self.isa = isa
        self._threads = threads
        self._arena = _native.Arena()
        self._layer_matrices = _layer_blocks(head) if number_format.keeps_blocks else {}
        self.nbytes = 0  # of all matrices packed until now

    def matrix(self, name: str) -> "_native.PackedMatrix":
        """Pack a matrix with its bias, if any, by module name."""
        packed = self.unbiased(name + ".weight")
        if (bias := self.vector(name + ".bias")) is not None:
            packed.set_bias(bias)
        return packed

    def unbiased(self, weight: str) -> "_native.PackedMatrix":
        """Pack a matrix by tensor name."""
        from foreword.kernels._native import PackedMatrix

        if self._number_format.is_float32:
            packed = PackedMatrix.keep_floats(self._arena, self._head.load(weight))
        elif self._number_format.keeps_blocks and (blocks := self._blocks(weight)) is not None:
            packed = PackedMatrix.keep_blocks(self._arena, blocks.kind, blocks.data, self._threads)
        else:
            packed = self._rounded(weight)
        self.nbytes += packed.nbytes
        return packed

    def _blocks(self, name: str) -> QuantizedTensor | None:
        """Return the blocks of a matrix, from the target's output matrix or the head's file; None if it has none."""
        blocks = self._head.blocks(name) or self._layer_matrices.get(name)
        if blocks is None and self._layer_matrices:
            blocks = readable_blocks(self._head.packed_tensor, name)
        return blocks if blocks is not None and blocks.kind in BLOCK_KINDS else None

    def _rounded(self, name: str) -> "_native.PackedMatrix":
        """Round a matrix to 8 bits piece by piece."""
        from foreword.kernels._native import PackedMatrix

        rows, columns = self._head.spec.shapes[name]
        packed = PackedMatrix.zeros_int8(self._arena, rows, columns, rotated_group_size(columns), True)
        first_row = 0
        for piece in self._head.pieces(name, piece_rows(columns)):
            packed.round_rows(first_row, piece, self.isa, self._threads)
            first_row += len(piece)
        return packed

    def matrices(self, names: list[str], biased: bool) -> "list[_native.PackedMatrix]":
        """Pack matrices by tensor name, with the biases that they have; `biased` is ignored."""
        return [self.matrix(name.removesuffix(".weight")) for name in names]

    def pack(self, values: Tensor) -> "_native.PackedMatrix":
        """Pack a float32 matrix that was made from a tensor of the head."""
        from foreword.kernels._native import PackedMatrix

        if self._number_format.is_float32:
            packed = PackedMatrix.keep_floats(self._arena, values)
        else:
            group_size = rotated_group_size(values.shape[1])
            packed = PackedMatrix.round_floats(self._arena, values, group_size, True, self.isa, self._threads)
        self.nbytes += packed.nbytes
        return packed

    def floats(self, name: str, biased: bool = False) -> "_native.PackedMatrix":
        """Pack a matrix in float32."""
        from foreword.kernels._native import PackedMatrix

        packed = PackedMatrix.keep_floats(self._arena, self._head.load(name))
        if biased:
            packed.set_bias(self._head.load(name.removesuffix("weight") + "bias"))
        self.nbytes += packed.nbytes
        return packed

    def optional(self, name: str) -> "_native.PackedMatrix | None":
        """Pack a matrix by module name; None if the head does not have it."""
        return self.matrix(name) if self._head.spec.has(name + ".weight") else None

    def vector(self, name: str) -> Tensor | None:
        """Return a norm or bias, float32 [n]; None if the head has none."""
        return self._head.load(name) if self._head.spec.has(name) else None


class CpuHead:
    """A draft head; it uses the decoder's threads."""

    drafts_early = False
    is_ready = True
    stops = True

    def __init__(
        self,
        head: Head,
        rows: str,
        packer: HeadPacker,
        decoder: "_native.Decoder",
        ends: "tuple[_native.PackedMatrix, _native.PackedMatrix]",
    ) -> None:
        """Pack a head that has KV rows of the name `rows`.

        `ends` are the decoder's embedding and output matrix, for a head without its own.
        """
        from foreword.kernels import _native

        spec = self.spec = head.spec
        self._rows, self._isa = rows, packer.isa
        layer = spec.layers[0]
        self._native = _native.Head(
            decoder,
            draft_vocab_size=spec.draft_vocab_size,
            feature_width=spec.feature_width,
            join=spec.join.value,
            norm_before_residual=spec.norm_before_residual,
            norm_output=spec.norm_output,
            hidden_size=spec.hidden_size,
            intermediate_size=layer.mlp.intermediate_size,
            num_heads=layer.attention.num_heads,
            num_kv_heads=layer.attention.num_kv_heads,
            head_dim=layer.attention.head_dim,
            rms_norm_eps=spec.norm.eps,
            magnitude=spec.rope.magnitude,
            inverse_frequencies=frequencies(spec.rope, layer.attention.rotary_dim).contiguous(),
        )
        self._set_inputs(packer)
        for index in range(len(spec.layers)):
            self._add_layer(packer, index)
        embedding, output = packer.optional("embed_tokens"), packer.optional("lm_head")
        self._native.set_embedding_and_output(
            embedding or ends[0], output or ends[1], packer.vector("norm.weight")
        )
        self._markov = [packer.matrix(name) for name in MARKOV if spec.has(name + ".weight")]
        if self._markov:
            self._native.set_markov(*self._markov)
        self._vectors: list[_native.PackedMatrix] = []  # the selector's matrices, in the order of SELECTOR
        if (selector := spec.selector) is not None:
            predecessor, successor, projection = self._vectors = [packer.unbiased(name) for name in SELECTOR]
            self._native.set_selector(
                predecessor,
                successor,
                projection,
                selector.candidates,
                selector.logit_scale,
                selector.logit_cap or 0.0,
                selector.embedding_scale,
            )
        self.weight_bytes = packer.nbytes

    def _set_inputs(self, packer: HeadPacker) -> None:
        spec = self.spec
        names = (
            ["input_norm.weight"]
            if spec.has("input_norm.weight")
            else [f"fc_norm.{i}.weight" for i in range(spec.num_taps)]
        )
        norms = [norm for name in names if (norm := packer.vector(name)) is not None]
        embedding_norm, feature_norm = _INPUT_NORMS[spec.join]
        self._native.set_inputs(
            packer.optional("fc"),
            norms,
            packer.vector(embedding_norm + ".weight"),
            packer.vector(feature_norm + ".weight"),
        )

    def _add_layer(self, packer: HeadPacker, index: int) -> None:
        prefix = f"layers.{index}."
        layer, experts = self.spec.layers[index], None
        names = AttentionNames.of(layer.attention)
        attention = [packer.matrix(f"{prefix}{name}") for name in (*names.inputs, _OUTPUT)]
        if layer.mlp.experts is None:
            mlp = [packer.matrix(f"{prefix}mlp.{name}") for name in _MLP]
        else:
            experts, mlp = load_experts(packer, layer.mlp, prefix)
        has_input_norms = index == 0 and self.spec.join is Join.CONCAT  # instead of a layer norm
        mlp_norm = packer.vector(prefix + "post_attention_layernorm.weight")
        assert mlp_norm is not None
        self._native.add_layer(
            None if has_input_norms else packer.vector(prefix + "input_layernorm.weight"),
            mlp_norm,
            attention,
            mlp,
            None if names.query_norm is None else packer.vector(f"{prefix}{names.query_norm}.weight"),
            None if names.key_norm is None else packer.vector(f"{prefix}{names.key_norm}.weight"),
            experts=experts,
            score_scale=layer.attention.scale or 0.0,
            latent=load_latent(packer, layer.attention, prefix),
        )
        if self.spec.convolution is not None:
            self._native.set_convolutions(
                *(_load_convolution(packer, self.spec.convolution, prefix + name) for name in CONVOLUTIONS)
            )

    def draft(self, call: HeadCall) -> HeadOutput | KnownChains:
        """Run a pass. Return chains if the native call can draft them, else logits and states.

        P-EAGLE returns logits: it drafts with mask tokens, and its rows read features.
        """
        has_mask_token = self.spec.mask_token_id is not None
        if call.plan is not None and (call.rows.are_own or not has_mask_token):
            return self._chains(call, call.plan)
        if call.context is not None:
            self._forward(call.context, call.store)
        return self._forward(call.rows, call.store)

    def _forward(self, head_input: HeadInput, store: KvStore) -> HeadOutput:
        count = len(head_input.arrays.logit_rows)
        logits = np.empty((count, self.spec.draft_vocab_size), dtype=np.float32)
        states = np.empty((count, self.spec.hidden_size), dtype=np.float32)
        native_store, kind = self._native_store(store)
        self._native.forward(
            native_store,
            kind,
            head_input.arrays,
            head_input.starts,
            as_array(head_input.features),
            head_input.are_own,
            logits,
            states,
        )
        return HeadOutput(torch.from_numpy(logits), torch.from_numpy(states))

    def _chains(self, call: HeadCall, plan: ChainPlan) -> KnownChains:
        rows, context, buffers = call.rows, call.context, _ChainBuffers.of(plan)
        store_arguments = self._native_store(call.store)
        arguments = (
            rows.arrays,
            rows.starts,
            as_array(rows.features),
            *_sampling_arguments(plan),
            *buffers.outputs(plan),
        )
        if rows.are_own:
            context_arguments = (
                None if context is None else (context.arrays, context.starts, as_array(context.features))
            )
            self._native.draft_blocks(*store_arguments, context_arguments, *arguments)
        else:
            self._native.draft_chains(*store_arguments, *arguments)
        return buffers.chains()

    def markov_embeddings(self, tokens: Sequence[int]) -> Tensor:
        return self._rows_of(self._markov[0], tokens)

    def logits_after(self, tokens: Sequence[int], logits: Tensor, states: Tensor) -> Tensor:
        if self.spec.selector is None:
            return logits + self._product(self._markov[1], self.markov_embeddings(tokens))
        predecessor, successor, projection = self._vectors

        def vectors_of(candidates: Tensor) -> Tensor:
            rows = self._rows_of(successor, candidates.flatten().tolist())
            return rows.view(*candidates.shape, -1)

        previous, projected = self._rows_of(predecessor, tokens), self._product(projection, states)
        return candidate_logits(self.spec.selector, logits, previous, projected, vectors_of)

    def _rows_of(self, matrix: "_native.PackedMatrix", indices: Sequence[int]) -> Tensor:
        """Return rows of a matrix, float32 [indices, columns]."""
        rows = np.empty((len(indices), matrix.cols), np.float32)
        for row, index in zip(rows, indices, strict=True):
            matrix.expand_row(index, row, self._isa)
        return torch.from_numpy(rows)

    def _product(self, matrix: "_native.PackedMatrix", x: Tensor) -> Tensor:
        """Return the product of rows with a matrix, float32 [rows of x, rows of the matrix]."""
        product = np.empty((len(x), matrix.rows), np.float32)
        matrix.multiply(x.contiguous().numpy(), product, self._isa)
        return torch.from_numpy(product)

    def _native_store(self, store: KvStore) -> "tuple[_native.KvStore, int]":
        """Return the compiled store, and the index of this head's kind of KV rows in it."""
        if not isinstance(store, CpuKvStore):
            raise ValueError("the KV store was made for another backend")
        return store.native, store.spec.index(self._rows)


def _load_convolution(
    packer: HeadPacker, convolution: BlockConvolution, module: str
) -> "_native.BlockConvolution":
    from foreword.kernels import _native

    base = packer.vector(module + ".base_kernel")
    assert base is not None
    projection = packer.matrix(module + ".kernel_projection")
    return _native.BlockConvolution(convolution.taps, convolution.group, base.flatten(), projection)


def _sampling_arguments(plan: ChainPlan) -> tuple[Any, ...]:
    """Return the sampling parameters in the order of the bindings."""
    fields = [plan.records[name] for name in ("temperature", "top_k", "top_p", "min_p", "stem")]
    return plan.lengths, plan.steps, plan.token_ids, plan.vocab_size, *fields


class _ChainBuffers(NamedTuple):
    """Output arrays for drafted chains."""

    tokens: Ints  # [requests, longest chain], padded with -1
    confidence: NDArray[np.float32] | None  # the same shape; None: not requested

    @staticmethod
    def of(plan: ChainPlan) -> "_ChainBuffers":
        shape = len(plan.steps), max(plan.steps.tolist())
        return _ChainBuffers(
            np.empty(shape, np.int32), None if plan.stop is None else np.empty(shape, np.float32)
        )

    def outputs(self, plan: ChainPlan) -> tuple[Any, ...]:
        """Return the output arguments in the order of the bindings."""
        stop = plan.stop
        return self.tokens, None if stop is None else (stop.edges, stop.rates, stop.least, self.confidence)

    def chains(self) -> KnownChains:
        """Return the chains that the native call has written."""
        tokens = [[token for token in row if token >= 0] for row in self.tokens.tolist()]
        if self.confidence is None:
            return KnownChains(tokens)
        confidence = self.confidence.tolist()
        return KnownChains(tokens, [row[: len(chain)] for row, chain in zip(confidence, tokens, strict=True)])
