"""Draft heads on the CPU kernels: one native call per pass, in the decoder's number format."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foreword.backends.batch import Ints
from foreword.backends.cpu.head_packing import HeadPacker
from foreword.backends.cpu.kv_store import CpuKvStore
from foreword.backends.cpu.latent import load_latent
from foreword.backends.cpu.weights import load_experts
from foreword.backends.interface import ChainPlan, HeadCall, HeadInput, HeadOutput, KnownChains, KvStore
from foreword.backends.torch.block_parts import candidate_logits
from foreword.backends.weight_loader import mixing_names
from foreword.kv.states import as_array
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

_MLP = ("gate_proj", "up_proj", "down_proj")


class CpuHead:
    """A draft head; it uses the decoder's threads."""

    drafts_early = False
    is_ready = True
    stops = True

    def __init__(
        self,
        head: Head,
        row_name: str,
        packer: HeadPacker,
        decoder: "_native.Decoder",
        target_matrices: "tuple[_native.PackedMatrix, _native.PackedMatrix]",
    ) -> None:
        """Pack a head whose KV rows have the name `row_name`.

        `target_matrices` are the decoder's embedding and output matrix, for a head that has none.
        """
        from foreword.kernels import _native

        spec = self.spec = head.spec
        self._row_name, self._isa = row_name, packer.isa
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
            embedding or target_matrices[0], output or target_matrices[1], packer.vector("norm.weight")
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
        names = mixing_names(layer)
        attention = [packer.matrix(f"{prefix}{name}") for name in (*names.inputs, *names.output)]
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
        if call.plan is not None and (call.rows.are_head_states or not has_mask_token):
            return self._chains(call, call.plan)
        if call.context is not None:
            self._forward(call.context, call.store)
        return self._forward(call.rows, call.store)

    def _forward(self, head_input: HeadInput, store: KvStore) -> HeadOutput:
        count = len(head_input.arrays.logit_rows)
        logits = np.empty((count, self.spec.draft_vocab_size), dtype=np.float32)
        states = np.empty((count, self.spec.hidden_size), dtype=np.float32)
        self._native.forward(
            *self._native_store(store),
            head_input.arrays,
            head_input.starts,
            as_array(head_input.features),
            head_input.are_head_states,
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
        if rows.are_head_states:
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
        """Return the compiled store, and the index of this head's KV rows among its kinds of rows."""
        if not isinstance(store, CpuKvStore):
            raise ValueError("the KV store was made for another backend")
        return store.native, store.spec.index(self._row_name)


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
