"""The llama-family decoder on the compiled CPU kernels: one native call per pass."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from foreword.backends.batch import ForwardBatch, ForwardOutput, SideBySide
from foreword.backends.cpu.adapters import AdapterPacker
from foreword.backends.cpu.exits import CpuExit
from foreword.backends.cpu.experts import load_experts
from foreword.backends.cpu.heads import CpuHead, HeadPacker
from foreword.backends.cpu.kv_store import HEAD_ALIGNMENT, CpuKvStore
from foreword.backends.cpu.medusa import CpuMedusa
from foreword.backends.cpu.packing import FORMS, MatrixPacker, WeightForm
from foreword.backends.interface import DecodeSize, KvStore
from foreword.backends.support import Part, require_supported
from foreword.errors import CheckpointError
from foreword.kernels.native import choose_isa, choose_threads, native_status
from foreword.kv.spec import DECODER_ROWS, PageSpec, RowSpec
from foreword.models.adapters import Lora
from foreword.models.config import LayerSpec, ModelConfig, RopeSpec
from foreword.models.formats.checkpoint import Checkpoint
from foreword.models.heads.opening import Head
from foreword.models.layer_shapes import FINAL_NORM, norm_names
from foreword.models.rope import frequencies
from foreword.progress import Progress

if TYPE_CHECKING:
    from foreword.kernels import _native


@dataclass(frozen=True)
class CpuLayer:
    """What one layer is made of, packed."""

    attention_norm: Tensor | None  # None: the stream is read as it is
    mlp_norm: Tensor | None
    matrices: (
        "list[_native.PackedMatrix]"  # q, k, v, output, gate, up, down; the last three may be shared experts'
    )
    query_norm: Tensor | None
    key_norm: Tensor | None
    experts: "_native.Experts | None" = None
    after_attention: Tensor | None = None  # norms of what is added
    after_mlp: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Memory of the matrices."""
        experts = 0 if self.experts is None else self.experts.nbytes
        return sum(matrix.nbytes for matrix in self.matrices) + experts


@dataclass(frozen=True)
class CpuWeights:
    """A whole decoder, packed; several decoders may be built from the same."""

    layers: tuple[CpuLayer, ...]
    embedding: "_native.PackedMatrix"
    head: "_native.PackedMatrix"
    final_norm: Tensor


class CpuDecoder:
    """A decoder on the CPU kernels."""

    is_shape_invariant = True  # tests/integration/test_shape_invariance.py

    def __init__(self, config: ModelConfig, weights: CpuWeights, form: WeightForm, threads: int) -> None:
        from foreword.kernels import _native

        layer = require_supported(config, "cpu")
        self.config = config
        self.form = form
        self._attention = layer.attention
        self._weights = weights
        self._native = _native.Decoder(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=max(spec.mlp.intermediate_size for spec in config.layers),
            num_heads=layer.attention.num_heads,
            num_kv_heads=layer.attention.num_kv_heads,
            head_dim=layer.attention.head_dim,
            rms_norm_eps=config.norm.eps,
            magnitude=config.rope.magnitude,
            inverse_frequencies=frequencies(config.rope, layer.attention.head_dim).contiguous(),
            isa=choose_isa(native_status().instruction_sets),
            threads=threads,
            embedding_scale=config.embedding_scale,
            logit_scale=config.logit_scale,
            logit_softcap=config.logit_softcap or 0.0,
        )
        ropes = self._add_ropes()
        for packed, spec in zip(weights.layers, config.layers, strict=True):
            self._native.add_layer(
                packed.attention_norm,
                packed.mlp_norm,
                packed.matrices,
                packed.query_norm,
                packed.key_norm,
                experts=packed.experts,
                window=spec.attention.window or 0,
                rotated=spec.attention.is_rotated,
                score_scale=spec.attention.scale or 0.0,
                after_attention=packed.after_attention,
                after_mlp=packed.after_mlp,
                residual_scale=spec.residual_scale,
                rope=ropes[spec.attention.rope],
                softcap=spec.attention.softcap or 0.0,
                gelu=spec.mlp.activation != "silu",
            )
        self._native.set_ends(weights.embedding, weights.head, weights.final_norm)

    def _add_ropes(self) -> dict[RopeSpec | None, int]:
        """Numbers of the ways in which layers turn; None is the model's own."""
        others = dict.fromkeys(layer.attention.rope for layer in self.config.layers if layer.attention.rope)
        dim = self._attention.head_dim
        return {None: 0} | {
            rope: self._native.add_rope(frequencies(rope, dim).contiguous(), rope.magnitude)
            for rope in others
        }

    def set_adapter(self, slot: int, adapter: Lora | None) -> None:
        """What is added for the requests whose slot in a batch is this one; None takes it away."""
        packed = None
        if adapter is not None:
            packer = AdapterPacker(self.isa, self.threads, self.form.floats)
            packed = packer.layers(adapter, self._weights.layers)
        self._native.set_adapter(slot, packed)

    @property
    def layer_bytes(self) -> int:
        """Memory of the layers' matrices."""
        return sum(layer.nbytes for layer in self._weights.layers)

    def with_layers(self, layers: Sequence[int]) -> "CpuDecoder":
        """A decoder that runs only these layers of this one: the same weights."""
        weights = replace(self._weights, layers=tuple(self._weights.layers[layer] for layer in layers))
        return CpuDecoder(self.config.with_layers(layers), weights, self.form, self.threads)

    def beside(self, checkpoint: Checkpoint) -> "CpuDecoder":
        """A decoder with the layers of another checkpoint, and this one's embedding, head and final norm."""
        return load_cpu_decoder(checkpoint, FORMS["q4"], threads=self.threads, ends=self._weights)

    def followed_by(self, more: Checkpoint) -> "CpuDecoder":
        """A decoder that runs this one's layers, then those of another checkpoint and that one's final norm."""
        form = self.form if self.form.floats else FORMS["int8"]
        packer = MatrixPacker(more, form, self.isa, self.threads, None)
        weights = replace(
            self._weights,
            layers=(*self._weights.layers, *_load_layers(packer, more.config)),
            final_norm=packer.vector(FINAL_NORM),
        )
        return CpuDecoder(self.config.followed_by(more.config), weights, self.form, self.threads)

    def exit(self, more: Checkpoint, layer: int, rows: str) -> CpuExit:
        """The first layers on this decoder's KV rows, then the layer of another checkpoint on `rows`."""
        lower = self.with_layers(range(layer))
        whole = lower.followed_by(more)
        own_bytes = whole.layer_bytes - lower.layer_bytes
        return CpuExit(whole._native, self.config.vocab_size, rows, own_bytes)

    def head(self, head: Head, rows: str) -> CpuHead:
        """A draft head in this decoder's numbers, on its threads."""
        if any(layer.attention.gated for layer in head.spec.layers):
            raise CheckpointError(
                f"{head.files.path}: {Part.GATED.value} does not run on the CPU kernels; use --backend torch"
            )
        ends = self._weights.embedding, self._weights.head
        return CpuHead(head, rows, self._packer(head), self._native, ends)

    def medusa(self, head: Head) -> CpuMedusa:
        """Medusa's heads in this decoder's numbers."""
        return CpuMedusa(head, self._packer(head), self._weights.head)

    def _packer(self, head: Head) -> HeadPacker:
        return HeadPacker(head, self.form, self.isa, self.threads)

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def isa(self) -> str:
        return self._native.isa

    @property
    def threads(self) -> int:
        return self._native.threads

    @property
    def weight_bytes(self) -> int:
        """Memory of the packed matrices."""
        return self._native.weight_bytes

    def sizes_to_prepare(self, requests: int, length: int, rows: int) -> Sequence[DecodeSize]:
        """Nothing is compiled or captured."""
        return ()

    def kv_rows(self) -> RowSpec:
        """Keys and values of all layers."""
        return RowSpec(
            DECODER_ROWS,
            self.config.num_layers,
            self._attention.num_kv_heads,
            self._attention.head_dim,
            window=self.config.widest_window,
            dtype="float32",
            alignment=HEAD_ALIGNMENT,
        )

    def new_kv_store(self, num_pages: int, page_size: int, extra: Sequence[RowSpec] = ()) -> CpuKvStore:
        """Memory for this decoder's rows and the `extra` ones; it is touched only when it is used."""
        return CpuKvStore(PageSpec.of(self.kv_rows(), extra), num_pages, page_size)

    def forward(self, batch: ForwardBatch, store: KvStore) -> ForwardOutput:
        """One pass over all rows of `batch`; KV rows are moved and written as it says."""
        if not isinstance(store, CpuKvStore):
            raise ValueError("the KV store was made for another decoder")
        arrays = batch.arrays  # handing over torch tensors takes longer than a small pass
        taps = list(dict.fromkeys(batch.taps))
        logits = np.empty((len(arrays.logit_rows), self.config.vocab_size), dtype=np.float32)
        hidden = np.empty((len(arrays.hidden_rows), len(taps) * self.config.hidden_size), dtype=np.float32)
        self._native.forward(store.native, arrays, taps, logits, hidden, batch.adapters)
        return ForwardOutput(torch.from_numpy(logits), SideBySide(taps, hidden) if taps else {})


def load_cpu_decoder(
    checkpoint: Checkpoint,
    form: WeightForm,
    *,
    threads: int | None = None,
    ends: CpuWeights | None = None,
    progress: Progress | None = None,
) -> CpuDecoder:
    """Pack a checkpoint's weights and build its decoder; `ends` lends its embedding, head and last norm."""
    config = checkpoint.config
    isa, workers = choose_isa(native_status().instruction_sets), choose_threads(threads)
    packer = MatrixPacker(checkpoint, form, isa, workers, progress)
    layers = _load_layers(packer, config)
    weights = _load_ends(packer, config) if ends is None else ends
    return CpuDecoder(config, replace(weights, layers=layers), form, workers)


def _load_ends(packer: MatrixPacker, config: ModelConfig) -> CpuWeights:
    embedding = packer.matrices(["model.embed_tokens.weight"], biased=False)[0]
    head = embedding if config.tied_embeddings else packer.matrices(["lm_head.weight"], biased=False)[0]
    return CpuWeights((), embedding, head, packer.vector(FINAL_NORM))


def _load_layers(packer: MatrixPacker, config: ModelConfig) -> tuple[CpuLayer, ...]:
    require_supported(config, "cpu")
    return tuple(
        _load_layer(packer, layer, f"model.layers.{index}.") for index, layer in enumerate(config.layers)
    )


def _load_layer(packer: MatrixPacker, layer: LayerSpec, prefix: str) -> CpuLayer:
    def matrices(names: str, biased: bool) -> "list[_native.PackedMatrix]":
        return packer.matrices([f"{prefix}{name}.weight" for name in names.split()], biased)

    def norm(name: str | None) -> Tensor | None:
        return None if name is None else packer.vector(f"{prefix}{name}.weight")

    experts, norms = None, norm_names(layer)
    if layer.mlp.experts is None:
        mlp = [
            *matrices("mlp.gate_proj mlp.up_proj", layer.mlp.bias),
            *matrices("mlp.down_proj", layer.mlp.bias),
        ]
    else:
        experts, mlp = load_experts(packer, layer.mlp, prefix)
    return CpuLayer(
        attention_norm=norm(norms.before_attention),
        mlp_norm=norm(norms.before_mlp),
        matrices=[
            *matrices("self_attn.q_proj self_attn.k_proj self_attn.v_proj", layer.attention.bias),
            *matrices("self_attn.o_proj", layer.attention.output_bias),
            *mlp,
        ],
        query_norm=norm("self_attn.q_norm" if layer.attention.qk_norm else None),
        key_norm=norm("self_attn.k_norm" if layer.attention.qk_norm else None),
        experts=experts,
        after_attention=norm(norms.after_attention),
        after_mlp=norm(norms.after_mlp),
    )
