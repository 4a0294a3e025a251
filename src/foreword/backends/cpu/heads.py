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
from foreword.backends.cpu.packing import BLOCK_KINDS, WeightForm, rotated_group
from foreword.backends.cpu.weights import load_experts
from foreword.backends.interface import ChainPlan, HeadCall, HeadInput, HeadOutput, KnownChains, KvStore
from foreword.backends.weight_loader import piece_rows
from foreword.kv.states import as_array
from foreword.models.formats.checkpoint import QuantizedTensor
from foreword.models.heads.opening import Head
from foreword.models.heads.spec import MARKOV, Join
from foreword.models.rope import frequencies

if TYPE_CHECKING:
    from foreword.kernels import _native

_INPUT_NORMS = {
    Join.CONCAT: ("layers.0.input_layernorm", "layers.0.hidden_norm"),
    Join.FUSED: ("enorm", "hnorm"),
    Join.CONTEXT: ("", "hidden_norm"),
}
"""Norms of the token embedding and of the features, by kind of head."""

_QKV, _OUTPUT, _MLP = ("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj", "down_proj")


def _layer_blocks(head: Head) -> dict[str, QuantizedTensor]:
    """Return the matrices of the layers as blocks; nothing if one is not in 4 bits: one input is rounded one way."""
    found: dict[str, QuantizedTensor] = {}
    for name, shape in head.spec.shapes.items():
        if name.startswith("layers.") and len(shape) == 2:
            blocks = readable_blocks(head.kept, name)
            if blocks is None:
                return {}
            found[name] = blocks
    return found


class HeadPacker:
    """Packs the matrices of one head like the decoder's."""

    def __init__(self, head: Head, form: WeightForm, isa: str, threads: int) -> None:
        from foreword.kernels import _native

        self._head = head
        self._form = form
        self.isa = isa
        self._threads = threads
        self._arena = _native.Arena()
        self._packed = _layer_blocks(head) if form.keeps_blocks else {}
        self.nbytes = 0  # total bytes packed

    def matrix(self, name: str) -> "_native.PackedMatrix":
        """Pack a matrix with its bias, if any."""
        from foreword.kernels._native import PackedMatrix

        weight = name + ".weight"
        if self._form.floats:
            packed = PackedMatrix.keep_floats(self._arena, self._head.load(weight))
        elif self._form.keeps_blocks and (blocks := self._blocks(weight)) is not None:
            packed = PackedMatrix.keep_blocks(self._arena, blocks.kind, blocks.data, self._threads)
        else:
            packed = self._rounded(weight)
        if (bias := self.vector(name + ".bias")) is not None:
            packed.set_bias(bias)
        self.nbytes += packed.nbytes
        return packed

    def _blocks(self, name: str) -> QuantizedTensor | None:
        """Return the target's output rows, or a matrix of a head in 4 bits, as the files have them."""
        blocks = self._head.blocks(name) or self._packed.get(name)
        if blocks is None and self._packed:
            blocks = readable_blocks(self._head.kept, name)
        return blocks if blocks is not None and blocks.kind in BLOCK_KINDS else None

    def _rounded(self, name: str) -> "_native.PackedMatrix":
        """Round a matrix to 8 bits piece by piece."""
        from foreword.kernels._native import PackedMatrix

        rows, columns = self._head.spec.shapes[name]
        packed = PackedMatrix.rounded(self._arena, rows, columns, rotated_group(columns), True)
        done = 0
        for piece in self._head.pieces(name, piece_rows(columns)):
            packed.round_rows(done, piece, self.isa, self._threads)
            done += len(piece)
        return packed

    def matrices(self, names: list[str], biased: bool) -> "list[_native.PackedMatrix]":
        """Pack several matrices by tensor name, with their biases."""
        return [self.matrix(name.removesuffix(".weight")) for name in names]

    def floats(self, name: str, biased: bool = False) -> "_native.PackedMatrix":
        """Pack a matrix in float32."""
        from foreword.kernels._native import PackedMatrix

        packed = PackedMatrix.keep_floats(self._arena, self._head.load(name))
        if biased:
            packed.set_bias(self._head.load(name.removesuffix("weight") + "bias"))
        self.nbytes += packed.nbytes
        return packed

    def optional(self, name: str) -> "_native.PackedMatrix | None":
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
        """`ends` are the decoder's embedding and output matrix, for a head without its own."""
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
            inverse_frequencies=frequencies(spec.rope, layer.attention.head_dim).contiguous(),
        )
        self._set_inputs(packer)
        for index in range(len(spec.layers)):
            self._add_layer(packer, index)
        embedding, output = packer.optional("embed_tokens"), packer.optional("lm_head")
        self._native.set_ends(embedding or ends[0], output or ends[1], packer.vector("norm.weight"))
        self._markov = [packer.matrix(name) for name in MARKOV if spec.has(name + ".weight")]
        if self._markov:
            self._native.set_markov(*self._markov)
        self.weight_bytes = packer.nbytes

    def _set_inputs(self, packer: HeadPacker) -> None:
        spec = self.spec
        names = (
            ["input_norm.weight"]
            if spec.has("input_norm.weight")
            else [f"fc_norm.{i}.weight" for i in range(spec.num_taps)]
        )
        norms = [norm for name in names if (norm := packer.vector(name)) is not None]
        of_token, of_features = _INPUT_NORMS[spec.join]
        self._native.set_inputs(
            packer.optional("fc"),
            norms,
            packer.vector(of_token + ".weight"),
            packer.vector(of_features + ".weight"),
        )

    def _add_layer(self, packer: HeadPacker, index: int) -> None:
        prefix = f"layers.{index}."
        attention = [packer.matrix(f"{prefix}self_attn.{name}") for name in (*_QKV, *_OUTPUT)]
        layer, experts = self.spec.layers[index], None
        if layer.mlp.experts is None:
            mlp = [packer.matrix(f"{prefix}mlp.{name}") for name in _MLP]
        else:
            experts, mlp = load_experts(packer, layer.mlp, prefix)
        is_joined = index == 0 and self.spec.join is Join.CONCAT  # its input has its own norms
        mlp_norm = packer.vector(prefix + "post_attention_layernorm.weight")
        assert mlp_norm is not None
        self._native.add_layer(
            None if is_joined else packer.vector(prefix + "input_layernorm.weight"),
            mlp_norm,
            attention,
            mlp,
            packer.vector(prefix + "self_attn.q_norm.weight"),
            packer.vector(prefix + "self_attn.k_norm.weight"),
            experts=experts,
            score_scale=layer.attention.scale or 0.0,
        )

    def draft(self, call: HeadCall) -> HeadOutput | KnownChains:
        """Run one native call including draws; P-EAGLE's positions are drawn from its logits."""
        drafts_at_once = self.spec.mask_token_id is not None
        if call.plan is not None and (call.rows.are_own or not drafts_at_once):
            return self._chains(call, call.plan)
        if call.context is not None:
            self._forward(call.context, call.store)
        return self._forward(call.rows, call.store)

    def _forward(self, wanted: HeadInput, store: KvStore) -> HeadOutput:
        rows = len(wanted.arrays.logit_rows)
        logits = np.empty((rows, self.spec.draft_vocab_size), dtype=np.float32)
        states = np.empty((rows, self.spec.hidden_size), dtype=np.float32)
        memory, kind = self._place(store)
        self._native.forward(
            memory,
            kind,
            wanted.arrays,
            wanted.starts,
            as_array(wanted.features),
            wanted.are_own,
            logits,
            states,
        )
        return HeadOutput(torch.from_numpy(logits), torch.from_numpy(states))

    def _chains(self, call: HeadCall, plan: ChainPlan) -> KnownChains:
        rows, context, place, buffers = (
            call.rows,
            call.context,
            self._place(call.store),
            _ChainBuffers.of(plan),
        )
        arguments = (
            rows.arrays,
            rows.starts,
            as_array(rows.features),
            *_sampling_arguments(plan),
            *buffers.outputs(plan),
        )
        if rows.are_own:
            kept = None if context is None else (context.arrays, context.starts, as_array(context.features))
            self._native.block(*place, kept, *arguments)
        else:
            self._native.chain(*place, *arguments)
        return buffers.chains()

    def markov_before(self, tokens: Sequence[int]) -> Tensor:
        table = self._markov[0]
        read = np.empty((len(tokens), table.cols), np.float32)
        for row, token in enumerate(tokens):
            table.expand_row(token, read[row], self._isa)
        return torch.from_numpy(read)

    def markov_after(self, before: Tensor) -> Tensor:
        matrix = self._markov[1]
        logits = np.empty((len(before), matrix.rows), np.float32)
        matrix.multiply(before.contiguous().numpy(), logits, self._isa)
        return torch.from_numpy(logits)

    def _place(self, store: KvStore) -> "tuple[_native.KvStore, int]":
        """Return the store and index of its KV rows."""
        if not isinstance(store, CpuKvStore):
            raise ValueError("the KV store was made for another backend")
        return store.native, store.spec.index(self._rows)


def _sampling_arguments(plan: ChainPlan) -> tuple[Any, ...]:
    """Return the sampling parameters in the order of the bindings."""
    fields = [plan.records[name] for name in ("temperature", "top_k", "top_p", "min_p", "stem")]
    return plan.lengths, plan.steps, plan.token_ids, plan.vocab_size, *fields


class _ChainBuffers(NamedTuple):
    """Output buffers for draft tokens."""

    tokens: Ints  # [requests, longest chain], padded with -1
    confidence: NDArray[np.float32] | None

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
        tokens = [[token for token in row if token >= 0] for row in self.tokens.tolist()]
        if self.confidence is None:
            return KnownChains(tokens)
        confidence = self.confidence.tolist()
        return KnownChains(tokens, [row[: len(own)] for row, own in zip(confidence, tokens, strict=True)])
