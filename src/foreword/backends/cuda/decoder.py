"""The decoder on Triton kernels: decode passes are captured graphs, prompt chunks run eagerly."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Self

import torch
from torch import Tensor

from foreword.backends.batch import ForwardBatch, ForwardOutput, Tap, num_share_parts
from foreword.backends.cuda.adapters import AdapterTable, RowAdapters
from foreword.backends.cuda.block_heads import CudaBlockHead
from foreword.backends.cuda.chain_heads import CudaHead
from foreword.backends.cuda.compiling import kernels_of
from foreword.backends.cuda.graphs import GraphsByMemory
from foreword.backends.cuda.kernels.ancestors import ancestor_nodes, ancestor_slots, row_indices
from foreword.backends.cuda.kernels.attention import AttentionMetadata, latent_group
from foreword.backends.cuda.kernels.moves import move_rows
from foreword.backends.cuda.kernels.rows import add_norm, as_logits, fill_in, take_rows
from foreword.backends.cuda.layers import CudaLayers, LayerPass
from foreword.backends.cuda.layout import LOADED_ROWS, Layout, PassShape, decode_sizes
from foreword.backends.cuda.medusa import CudaMedusa
from foreword.backends.cuda.packed_products import Matrix, Rows
from foreword.backends.cuda.products import Product, Products
from foreword.backends.cuda.recurrent import RecurrentPass, move_ring
from foreword.backends.cuda.state_plan import plan_pieces
from foreword.backends.cuda.upload import PassUpload, UploadedPass
from foreword.backends.interface import DecodeSize, HeadRunner, KvStore
from foreword.backends.support import require_supported
from foreword.backends.torch.decoder import DescribedDecoder
from foreword.backends.torch.head_factory import TorchHeads
from foreword.backends.torch.heads import TargetMatrices
from foreword.backends.torch.kv_store import TorchKvStore
from foreword.backends.torch.upload import Piece
from foreword.backends.torch.weights import DecoderWeights
from foreword.errors import RequestError
from foreword.kv.spec import DECODER_ROWS, SCALE_BYTES
from foreword.models.adapters import Lora
from foreword.models.config import AttentionSpec, ModelConfig
from foreword.models.formats.checkpoint import Checkpoint
from foreword.models.heads.opening import Head
from foreword.models.rope import CosSin, Rotations

Result = tuple[Tensor, dict[Tap, Tensor], Tensor | None]
"""Logits, hidden states and shares of a pass, padded, in memory that the next pass overwrites."""


class CudaHeads:
    """Loads heads for a decoder, in the decoder's dtype."""

    def __init__(
        self, config: ModelConfig, weights: DecoderWeights[Matrix], quantization: str, captures: bool
    ) -> None:
        outer = DecoderWeights(weights.embedding, (), weights.final_norm, weights.head)
        self._reference = TorchHeads(config, outer, bucketed=True)
        self._target = TargetMatrices.of(weights)
        self._quantization, self._captures = quantization, captures

    def head(self, head: Head, row_name: str) -> HeadRunner:
        """Load a head that has KV rows; a head whose layers are not llama-style runs on torch."""
        if not head.spec.is_plain:
            return self._reference.head(head, row_name)
        # Only heads that draft several positions at once have a mask token.
        kind = CudaHead if head.spec.mask_token_id is None else CudaBlockHead
        return kind(head, row_name, self._target, self._quantization, captures=self._captures)

    def medusa(self, head: Head) -> CudaMedusa:
        """Load Medusa's heads."""
        return CudaMedusa(head, self._target, captures=self._captures)

    def exit(self, checkpoint: Checkpoint, layer: int, row_name: str) -> None:
        """Return None: the drafter then stores KV rows of all its layers, so that its passes can be captured."""


class CudaDecoder(DescribedDecoder[Matrix]):
    """A decoder on Triton kernels, whose rows have the same bits in any batch."""

    is_shape_invariant = True  # tests/integration/test_shape_invariance.py
    _ring_dtype = None
    _move_rows = staticmethod(move_rows)

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights[Matrix],
        products: Products | None = None,
        *,
        enforce_eager: bool = False,
        packs_kv: bool = False,
        quantization: str = "auto",
    ) -> None:
        """Options of the decoder and of its heads:

        - `enforce_eager`: capture no passes, neither of the decoder nor of its heads.
        - `packs_kv`: store the decoder's keys and values in 8 bits; heads' KV rows stay in the dtype of the weights.
        - `quantization`: format of the heads' matrices; the decoder's `weights` are already packed.
        """
        super().__init__(config, weights)
        self._kv_rows = replace(self._kv_rows, packed=packs_kv)
        if packs_kv and (self._kv_rows.values == 0 or self._kv_rows.head_dim % SCALE_BYTES):
            raise RequestError(
                f"the KV rows of this {config.architecture} model cannot be kept in 8 bits; leave out --kv-cache-dtype"
            )
        self._attention_spec = require_supported(config).attention
        self._rotations = Rotations(config.layers, config.rope, self.device)
        self._embedding_scale = torch.tensor(config.embedding_scale, dtype=weights.dtype).item()
        self._geometry = _tile_geometry(self._attention_spec)
        self._upload = PassUpload(self.device)
        self._graphs: GraphsByMemory[PassShape, Result] = GraphsByMemory()
        self._captures = self.device.type == "cuda" and not enforce_eager
        self.kernels = kernels_of(self.device) if self.device.type == "cuda" else None
        self._compiled: set[Hashable] = set()  # kinds of passes whose kernels are loaded
        self._table = AdapterTable(config, self.device)
        self._quantization = quantization
        self._products = products or Products()
        self._layers = CudaLayers(config.layers, weights.layers, config.norm.eps, self._products)
        if self.kernels is not None:
            checked = [*self._layers.all_products, Product(weights.head)]
            self.kernels.compile(lambda: self._products.compute_some(checked))
            self._products.check_library(checked)

    def set_adapter(self, slot: int, adapter: Lora | None) -> None:
        """Set the adapter of a slot; None removes it. The requests of a batch name slots."""
        self._table.check(slot)
        super().set_adapter(slot, adapter)
        self._table.set(slot, self._adapters.get(slot))

    @property
    def heads(self) -> CudaHeads:
        """Return a loader of heads in this decoder's dtype."""
        return CudaHeads(self.config, self.weights, self._quantization, self._captures)

    def with_weights(self, config: ModelConfig, weights: DecoderWeights[Matrix]) -> Self:
        return type(self)(
            config,
            weights,
            self._products,
            enforce_eager=not self._captures,
            packs_kv=self._kv_rows.packed,
            quantization=self._quantization,
        )

    @contextmanager
    def observing_experts(self, observe: Callable[[Tensor], None]) -> Iterator[None]:
        """Call `observe` with the experts that every mixture chooses, int32 [rows, per token]; do not capture."""
        captures, self._captures = self._captures, False
        for mixture in self._layers.mixtures.values():
            mixture.observe = observe
        try:
            yield
        finally:
            self._captures = captures
            for mixture in self._layers.mixtures.values():
                mixture.observe = None

    def sizes_to_prepare(self, requests: int, length: int, rows: int) -> Sequence[DecodeSize]:
        """Return the sizes whose passes are captured."""
        return decode_sizes(requests, length, rows, self._geometry[1]) if self._captures else ()

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, store: KvStore) -> ForwardOutput:
        """Run one pass over all rows of `batch` (on the CPU) without waiting for the device."""
        store = self._checked_store(batch, store)
        if not all(slot in self._adapters for slot in batch.adapters if slot):
            raise ValueError("the batch names an adapter slot that has no adapter")
        layout = Layout.of(batch, store.page_size, *self._geometry)
        uploaded = self._upload.send(batch, layout, store.spare_slot, self._plan(batch, layout, store))
        store.move(uploaded.batch.kv_copies)
        if store.recurrent is not None and uploaded.states is not None:
            move_ring(store.recurrent, uploaded.states)
        if batch.drawn_before is not None:
            fill_in(uploaded.batch.token_ids, batch.drawn_before)

        def body() -> Result:
            return self._run(layout.shape, uploaded, store)

        def load() -> bool:
            return self._load_kernels(layout.shape, body)

        if self._captures and layout.shape.is_decode and uploaded.is_fixed:
            (logits, padded, shares), is_cold = self._graphs.of(store).run(layout.shape, body, load)
        else:
            load()
            (logits, padded, shares), is_cold = body(), False
        hidden = {tap: rows[: len(batch.hidden_rows)].clone() for tap, rows in padded.items()}
        if shares is not None:
            shares = shares[: len(batch.kv_lens), : num_share_parts(batch)].clone()
        scale, cap = self.config.logit_scale, self.config.logit_softcap
        return ForwardOutput(as_logits(logits[: len(batch.logit_rows)], scale, cap), hidden, is_cold, shares)

    def _load_kernels(self, shape: PassShape, body: Callable[[], Result]) -> bool:
        """Compile the kernels of a pass if needed; return whether the pass launches only these kernels."""
        if self.kernels is None:
            return False
        if (kind := shape.kind) not in self._compiled:
            self.kernels.compile(body)
            self._compiled.add(kind)
        return shape.rows <= LOADED_ROWS and self.kernels.none_at_launch

    def _run(self, shape: PassShape, uploaded: UploadedPass, store: TorchKvStore) -> Result:
        batch, weights, eps = uploaded.batch, self.weights, self.config.norm.eps
        stream = take_rows(weights.embedding, batch.token_ids, self._embedding_scale)
        keys, values = store.arrays(DECODER_ROWS)
        metadata = self._metadata(shape, uploaded, store.page_size)
        inputs = LayerPass(
            uploaded=uploaded,
            metadata=metadata,
            cos_sin=self._cos_sin(batch.positions),
            keys=keys,
            values=values,
            spare_slot=store.spare_slot,
            adapters=RowAdapters(self._table, uploaded.adapters) if shape.has_adapters else None,
            kind_indices=self._kind_indices,
            recurrent=self._recurrent(shape, uploaded, store),
        )
        normed, delta = Rows.allocate(stream, self.config.hidden_size, weights.layers[0].qkv), None
        # `delta` is the output of the previous sublayer. Until it is added to the stream it lacks these three:
        delta_norm: tuple[Tensor | None, float] = None, 1.0  # norm weights, scale
        bias: Tensor | None = None  # only if `delta` is in parts
        hidden: dict[Tap, Tensor] = {}
        for index, (layer, spec) in enumerate(zip(weights.layers, self.config.layers, strict=True)):
            first_norm = layer.input_norm if spec.mixes else layer.mlp_norm
            layer_input = add_norm(stream, delta, first_norm, eps, *normed, *delta_norm, bias)
            self._store_hidden(hidden, Tap(index), shape, batch, stream)
            if spec.mixes:
                delta = self._layers.mixing(index, normed._replace(numbers=layer_input), inputs)
                delta_norm, bias = (layer.after_attention, spec.residual_scale), layer.output_bias
            if spec.mixes and spec.has_mlp:
                layer_input = add_norm(stream, delta, layer.mlp_norm, eps, *normed, *delta_norm, bias)
            if spec.has_mlp:
                delta = self._layers.mlp(index, normed._replace(numbers=layer_input), inputs)
                delta_norm, bias = (layer.after_mlp, spec.residual_scale), None
        last_norm = add_norm(stream, delta, weights.final_norm, eps, normed.numbers, None, *delta_norm, bias)
        self._store_hidden(hidden, Tap(self.config.num_layers), shape, batch, stream)
        self._store_hidden(hidden, Tap(self.config.num_layers, normed=True), shape, batch, last_norm)
        logits = self._products(take_rows(last_norm, batch.logit_rows), weights.head, None)
        return logits, hidden, metadata.shares

    def _plan(self, batch: ForwardBatch, layout: Layout, store: TorchKvStore) -> list[Piece]:
        """Return the arrays that name the states and ring rows of recurrent layers; empty: there are none."""
        spec = self.config.recurrent
        if spec is None or store.recurrent is None:
            return []
        return plan_pieces(batch, layout, spec.kernel, store.recurrent.ring.inputs.shape[1])

    def _recurrent(
        self, shape: PassShape, uploaded: UploadedPass, store: TorchKvStore
    ) -> RecurrentPass | None:
        if store.recurrent is None or uploaded.states is None:
            return None
        batch = uploaded.batch
        ancestors = ancestor_nodes(batch.ancestor_masks) if shape.has_trees else None
        return RecurrentPass(store.recurrent, uploaded.states, batch.positions, ancestors)

    def _cos_sin(self, positions: Tensor) -> list[CosSin]:
        """Return float32 cosines and sines of every layer, with width 0 for a layer without rotary embedding."""
        nothing = torch.empty((len(positions), 0), device=positions.device)
        rotations = self._rotations.of(positions, torch.float32)
        return [(nothing, nothing) if cos_sin is None else cos_sin for cos_sin in rotations]

    def _store_hidden(
        self, hidden: dict[Tap, Tensor], tap: Tap, shape: PassShape, batch: ForwardBatch, states: Tensor
    ) -> None:
        if tap in shape.taps:
            hidden[tap] = take_rows(states, batch.hidden_rows)

    def _metadata(self, shape: PassShape, uploaded: UploadedPass, page_size: int) -> AttentionMetadata:
        batch = uploaded.batch
        ancestors = uploaded.requests
        if shape.has_trees:
            ancestors = ancestor_slots(
                batch.prefix_lens, batch.ancestor_masks, uploaded.requests, batch.block_tables, page_size
            )
        positions, prefixes = batch.positions, batch.prefix_lens
        if shape.has_gaps:
            positions = row_indices(prefixes, batch.ancestor_masks)
        shares = None
        if shape.wants_shares:
            shares = torch.zeros((shape.rows, shape.parts), device=positions.device)
        return AttentionMetadata(
            positions, prefixes, batch.block_tables, ancestors, page_size, shape.has_trees, shares=shares
        )


def _tile_geometry(spec: AttentionSpec) -> tuple[int, int, int]:
    """Return query heads per KV head, KV heads, and dimensions of a key, as `Layout.of` expects them."""
    if spec.latent is None:
        return spec.num_heads // spec.num_kv_heads, spec.num_kv_heads, spec.head_dim
    group = latent_group(spec.num_heads)
    return group, spec.num_heads // group, spec.latent.kv_rank
