"""Base class of draft heads on a GPU: their layers on Triton kernels."""

from collections.abc import Callable, Hashable, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from torch.nn.functional import linear as library_linear
from torch.nn.functional import pad

from foreword.backends.cuda.compiling import kernels_of
from foreword.backends.cuda.draws import DraftIds
from foreword.backends.cuda.kernels.attention import AttentionMetadata
from foreword.backends.cuda.kernels.rotation import rotate_and_store
from foreword.backends.cuda.kernels.rows import activate, add_norm
from foreword.backends.cuda.layout import DECODE_ROWS
from foreword.backends.cuda.packed_products import Matrix, Rows
from foreword.backends.cuda.packing import concatenated, load_matrix
from foreword.backends.cuda.products import Products
from foreword.backends.cuda.upload import PassUpload, TiledRows, tiled_attention
from foreword.backends.interface import (
    ChainPlan,
    Chains,
    HeadCall,
    HeadInput,
    HeadOutput,
    KnownChains,
    KvStore,
)
from foreword.backends.torch.block_parts import convolve
from foreword.backends.torch.heads import HeadOps, HeadTensors, TargetMatrices, TorchHead
from foreword.backends.torch.kv_store import TorchKvStore
from foreword.backends.torch.norms import rms_norm
from foreword.backends.torch.upload import Upload
from foreword.kernels.recording import Variant, is_recording, recording
from foreword.models.heads.opening import Head
from foreword.models.heads.spec import CONVOLUTIONS, Join

LIBRARY_FROM = 65
"""Rows from which on cuBLAS is used, that is for prompts. Drafts need not have the same bits in every batch."""

_MORE_ENTRIES = 1 << 17
"""Upper bound of the 32-bit numbers that are uploaded for chains, besides the arrays of a pass."""


def _kernel_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if x.ndim != 2:
        return rms_norm(x, weight, eps)
    contiguous = x.contiguous()
    return add_norm(contiguous, None, weight, eps, torch.empty_like(contiguous))


def kernel_ops(quantization: str) -> HeadOps:
    """Return norms and products on Triton kernels; large products with unpacked weights use cuBLAS."""
    products = Products()

    def linear(x: Rows | Tensor, weight: Matrix, bias: Tensor | None) -> Tensor:
        numbers = x.numbers if isinstance(x, Rows) else x.contiguous()
        if isinstance(weight, Tensor) and len(numbers) >= LIBRARY_FROM:
            return library_linear(numbers, weight, bias)
        return products(x if isinstance(x, Rows) else numbers, weight, bias)

    def load(head: Head, name: str, target: TargetMatrices) -> Matrix:
        return load_matrix(head, name, target, quantization)

    return HeadOps(_kernel_norm, linear, load)


class KernelHead:
    """Base of heads on Triton kernels. Trees, prompts and unsupported passes run on the torch reference."""

    stops = False  # whether it ends chains early

    def __init__(
        self,
        head: Head,
        row_name: str,
        target: TargetMatrices,
        quantization: str,
        *,
        captures: bool,
    ) -> None:
        self.spec = head.spec
        self._tensors = HeadTensors(head, target, kernel_ops(quantization))
        self._reference = TorchHead(self._tensors, row_name, bucketed=True)
        self.markov_embeddings, self.logits_after = (
            self._tensors.markov_embeddings,
            self._tensors.logits_after,
        )
        attention = head.spec.layers[0].attention
        self._group, self._kv_heads = attention.num_heads // attention.num_kv_heads, attention.num_kv_heads
        self._row_name, self._captures = row_name, captures
        self._upload = PassUpload(target.device)
        self._chain_upload = Upload(target.device, _MORE_ENTRIES)
        width = head.spec.feature_width
        self._features = torch.zeros((DECODE_ROWS[-1], width), dtype=target.dtype, device=target.device)
        self._kernels = kernels_of(target.device) if target.device.type == "cuda" else None
        self._compiled: set[Hashable] = set()  # kinds of passes whose kernels are loaded
        self._requested: dict[Hashable, Sequence[Variant]] = {}  # by kind of pass, kernels being compiled
        self._ids = DraftIds(head.spec.draft_vocab_size, target.device)
        is_fully_rotated = 2 * len(self._tensors.frequencies) == attention.head_dim  # as the kernels require
        self._uses_kernels = head.spec.join is not Join.NONE and is_fully_rotated
        if self._uses_kernels:
            for index in range(len(head.spec.layers)):
                self._join(index, "self_attn.", ("q_proj", "k_proj", "v_proj"))
                self._join(index, "mlp.", ("gate_proj", "up_proj"))

    def _join(self, index: int, module: str, names: tuple[str, ...]) -> None:
        """Concatenate matrices of one module for the kernels, or use the reference for all passes if they do not match.

        The reference then reads views of the result, so that the head takes no more memory.
        """
        prefix, tensors = f"layers.{index}.{module}", self._tensors.by_name
        for suffix in ("weight", "bias"):
            parts = [tensors.get(f"{prefix}{name}.{suffix}") for name in names]
            present = [part for part in parts if part is not None]
            if not present:
                continue
            if len(present) < len(parts):
                self._uses_kernels = False
                continue
            whole = torch.cat(present) if isinstance(present[0], Tensor) else concatenated(present)
            if whole is None:
                self._uses_kernels = False
                continue
            tensors[f"{prefix}joined.{suffix}"] = whole
            bounds = [*accumulate(map(len, present), initial=0)]
            for name, (first, end) in zip(names, pairwise(bounds), strict=True):
                tensors[f"{prefix}{name}.{suffix}"] = whole[first:end]

    @property
    def weight_bytes(self) -> int:
        return self._reference.weight_bytes

    @property
    def is_ready(self) -> bool:
        """Return whether all requested kernels are compiled."""
        return self._kernels is None or all(map(self._kernels.are_ready, self._requested.values()))

    def _has_kernels(self, kind: Hashable, *bodies: Callable[[], object]) -> bool:
        """Return whether the kernels that `bodies` launch are loaded; request their compilation if not.

        Passes of one `kind` launch the same kernels.
        """
        if self._kernels is None or kind in self._compiled or is_recording():
            return True
        if kind not in self._requested:
            with recording() as missing:
                for body in bodies:
                    body()
            self._requested[kind] = tuple(missing)
            self._kernels.request(missing)
        if not self._kernels.are_ready(self._requested[kind]):
            return False
        del self._requested[kind]
        self._compiled.add(kind)
        return True

    @torch.inference_mode()
    def draft(self, call: HeadCall) -> HeadOutput | Chains:
        chains: Chains | None = None if call.plan is None else self._chains(call, call.plan)
        if chains is not None:
            return chains
        if call.plan is not None and call.plan.unsettled is not None:
            # Empty chains: the reference cannot read tokens that are still on the device.
            return KnownChains([[]] * len(call.plan.steps))
        if call.context is not None:
            self._reference.forward(call.context, call.store)
        return self._output(call.rows, call.store)

    def _chains(self, call: HeadCall, plan: ChainPlan) -> Chains | None:
        """Return the planned chains; None: the caller grows them from logits."""
        raise NotImplementedError

    def _output(self, head_input: HeadInput, store: KvStore) -> HeadOutput:
        """Return logits and states of the wanted rows."""
        raise NotImplementedError

    def _copy_features(self, features: Tensor, rows: int) -> Tensor:
        """Copy features to the memory that captured passes read."""
        if rows > len(self._features):
            return pad(features.to(self._features.dtype), (0, 0, 0, rows - len(features)))
        self._features[: len(features)] = features
        return self._features[:rows]

    def _layers(
        self,
        stream: Tensor,
        attention_input: Tensor,
        cos_sin: tuple[Tensor, Tensor],
        metadata: AttentionMetadata,
        slots: Tensor,
        tiles: TiledRows,
        store: TorchKvStore,
        block_indices: Tensor | None = None,
    ) -> Tensor:
        """Return the residual stream after all layers; write their KV rows.

        `attention_input` is that of the first layer. `block_indices` are the rows' places in their blocks, for
        convolutions.
        """
        keys, values = store.arrays(self._row_name)
        eps, stream = self.spec.norm.eps, stream.clone()
        for index, layer in enumerate(self.spec.layers):
            prefix, attention = f"layers.{index}.", layer.attention
            if index:
                attention_input = self._tensors.norm(stream, prefix + "input_layernorm.weight")
            weights = self._tensors.convolution_weights(attention_input, prefix + CONVOLUTIONS[0])
            attention_input = convolve(attention_input, weights, 0, block_indices)
            qkv = self._tensors.linear(attention_input, prefix + "self_attn.joined")
            queries = qkv.new_empty((len(qkv), attention.num_heads, attention.head_dim))
            norms = self._query_key_norms(index)
            rotate_and_store(qkv, cos_sin, slots, norms, eps, keys[index], values[index], queries)
            attended = tiled_attention(queries, keys[index], values[index], metadata, tiles)
            delta = self._tensors.linear(attended.view(len(attended), -1), prefix + "self_attn.o_proj")
            delta = convolve(delta, weights, 1, block_indices)
            normed = self._add_and_norm(stream, delta, prefix)
            weights = self._tensors.convolution_weights(normed.numbers, prefix + CONVOLUTIONS[1])
            if weights is not None:
                normed = Rows(convolve(normed.numbers, weights, 0, block_indices))
            gate_up = self._tensors.linear(normed, prefix + "mlp.joined")
            active = Rows.allocate(
                gate_up, gate_up.shape[1] // 2, self._tensors.by_name[prefix + "mlp.down_proj.weight"]
            )
            activate(gate_up, *active)
            stream += convolve(
                self._tensors.linear(active, prefix + "mlp.down_proj"), weights, 1, block_indices
            )
        return stream

    def _angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of every position, float32."""
        angles = positions.unsqueeze(-1).float() * self._tensors.frequencies
        return angles.cos(), angles.sin()

    def _query_key_norms(self, index: int) -> tuple[Tensor, Tensor] | None:
        """Return the norms of queries and keys; None if the layer has none."""
        query, key = (
            self._tensors.by_name.get(f"layers.{index}.self_attn.{name}_norm.weight") for name in ("q", "k")
        )
        return None if query is None or key is None else (query, key)

    def _add_and_norm(self, stream: Tensor, delta: Tensor, prefix: str) -> Rows:
        """Add `delta` to the residual stream in place; return the MLP's input, normed if the head has that norm."""
        name, tensors = prefix + "post_attention_layernorm.weight", self._tensors.by_name
        if not self.spec.has(name):
            return Rows(stream.add_(delta))
        normed = Rows.allocate(stream, stream.shape[1], tensors[prefix + "mlp.joined.weight"])
        add_norm(stream, delta, tensors[name], self.spec.norm.eps, *normed)
        return normed
