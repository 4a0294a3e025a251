"""Draft heads in plain torch: the reference that faster backends are tested against."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear, pad, silu

from foreword.backends.batch import ForwardBatch
from foreword.backends.interface import Chains, HeadCall, HeadInput, HeadOutput, KvStore
from foreword.backends.torch.adapters import LayerAdapters
from foreword.backends.torch.attention import GroupView, PagedKv, group_views, paged_attention
from foreword.backends.torch.block_parts import block_indices, candidate_logits, convolution_weights, convolve
from foreword.backends.torch.kv_store import TorchKvStore
from foreword.backends.torch.layers import TorchLayers
from foreword.backends.torch.norms import rms_norm
from foreword.backends.torch.staging import StagedBatch, Staging
from foreword.backends.torch.weights import DecoderWeights, load_layer
from foreword.backends.weight_loader import stacked
from foreword.kv.states import as_tensor
from foreword.models.heads.opening import Head
from foreword.models.heads.spec import (
    CONFIDENCE,
    CONVOLUTIONS,
    DRAFTER_TENSORS,
    MARKOV,
    SELECTOR,
    TABLES,
    Join,
)
from foreword.models.rope import CosSin, Rotations, frequencies, rotate

_LAYERS = "layers."


@dataclass(frozen=True)
class TargetMatrices:
    """A target's embedding and output matrix, for heads that have none; and the device and dtype of heads."""

    embed: Callable[[Tensor], Tensor]  # ids [rows] -> [rows, hidden]
    project: Callable[[Tensor], Tensor]  # [rows, hidden] -> [rows, vocab]
    device: torch.device
    dtype: torch.dtype

    @staticmethod
    def of(weights: DecoderWeights[object]) -> "TargetMatrices":
        table = weights.embedding
        return TargetMatrices(
            lambda ids: embedding(ids, table), lambda x: linear(x, weights.head), table.device, table.dtype
        )


def load_tensor(head: Head, name: str, target: TargetMatrices) -> Tensor:
    return head.load(name, target.dtype).to(target.device)


@dataclass(frozen=True)
class HeadOps:
    """A backend's functions for norms, matrix products, and loading tensors."""

    norm: Callable[[Tensor, Tensor, float], Tensor] = rms_norm  # (rows, weight, eps)
    linear: Callable[[Any, Any, Tensor | None], Tensor] = linear  # (rows, weight, bias)
    load: Callable[[Head, str, TargetMatrices], Any] = load_tensor


class HeadTensors:
    """A head's tensors, named as in the speculators library, and its computation before and after the layers."""

    def __init__(self, head: Head, target: TargetMatrices, ops: HeadOps | None = None) -> None:
        self.head, self.spec, self.target = head, head.spec, target
        self._ops = ops or HeadOps()
        # Tensors; or matrices in a packed format that only the backend's products read
        self.by_name: dict[str, Any] = {
            name: self._ops.load(head, name, target) for name in head.spec.shapes if self._is_read(name)
        }
        head_dim = head.spec.layers[0].attention.head_dim
        self.frequencies = frequencies(head.spec.rope, head_dim).to(target.device)

    def _is_read(self, name: str) -> bool:
        """Return whether runners read this tensor from `by_name`; `ModuleLayers` or the drafter load the others."""
        is_drafter_tensor = name.startswith(CONFIDENCE) or name in (*TABLES, *DRAFTER_TENSORS)
        return not is_drafter_tensor and (self.spec.is_plain or not name.startswith(_LAYERS))

    @property
    def nbytes(self) -> int:
        """Return the bytes of all tensors. A "joined" tensor shares its memory with others, and is not counted."""
        return sum(tensor.nbytes for name, tensor in self.by_name.items() if "joined" not in name)

    def norm(self, x: Tensor, name: str) -> Tensor:
        """Return the rows, normalised if the head has a norm of this name."""
        weight = self.by_name.get(name)
        return x if weight is None else self._ops.norm(x, weight, self.spec.norm.eps)

    def linear(self, x: Any, name: str) -> Tensor:  # noqa: ANN401 - rows as the backend's products read them
        return self._ops.linear(x, self.by_name[name + ".weight"], self.by_name.get(name + ".bias"))

    def layer_inputs(self, token_ids: Tensor, features: Tensor, are_own: bool) -> tuple[Tensor, Tensor]:
        """Return the residual stream, and the input of the first layer's attention.

        `are_own`: the features are the head's own states, not the target's.
        """
        table = self.by_name.get("embed_tokens.weight")
        embedded = self.target.embed(token_ids) if table is None else embedding(token_ids, table)
        if self.spec.join is Join.CONCAT:
            if not are_own and self.spec.has("fc.weight"):
                features = self.linear(self._normed_features(features), "fc")
            normed = self.norm(features, "layers.0.hidden_norm.weight")
            normed_embedding = self.norm(embedded, "layers.0.input_layernorm.weight")
            stream = normed if self.spec.norm_before_residual else features
            return stream, torch.cat((normed_embedding, normed), dim=-1)
        if self.spec.join is Join.FUSED:
            normed_embedding = self.norm(embedded, "enorm.weight")
            normed = self.norm(features, "hnorm.weight")
            stream = self.linear(torch.cat((normed_embedding, normed), dim=-1), "fc")
        else:
            selector = self.spec.selector
            stream = embedded if selector is None else embedded * selector.embedding_scale
        return stream, self.norm(stream, "layers.0.input_layernorm.weight")

    def _normed_features(self, features: Tensor) -> Tensor:
        if self.spec.has("fc_norm.0.weight"):
            taps = features.chunk(self.spec.num_taps, dim=-1)
            normed = [self.norm(tap, f"fc_norm.{index}.weight") for index, tap in enumerate(taps)]
            return torch.cat(normed, dim=-1)
        return self.norm(features, "input_norm.weight")

    def context(self, features: Tensor) -> Tensor:
        """Return what DFlash's layers compute keys and values of committed tokens from, given the target's states."""
        return self.norm(self.linear(features, "fc"), "hidden_norm.weight")

    def logits_and_states(self, final_rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits, in the dtype in which they are computed, and the states of rows after all layers."""
        normed, output = self.norm(final_rows, "norm.weight"), self.by_name.get("lm_head.weight")
        logits = self.target.project(normed) if output is None else self._ops.linear(normed, output, None)
        return logits, normed if self.spec.norm_output else final_rows

    @torch.inference_mode()
    def markov_embeddings(self, tokens: Sequence[int]) -> Tensor:
        table: Tensor = self.by_name[MARKOV[0] + ".weight"]
        return table[torch.tensor(tokens, device=table.device)].float()

    @torch.inference_mode()
    def logits_after(self, tokens: Sequence[int], logits: Tensor, states: Tensor) -> Tensor:
        return self.logits_after_ids(torch.tensor(tokens, device=logits.device), logits, states)

    def logits_after_ids(self, tokens: Tensor, logits: Tensor, states: Tensor) -> Tensor:
        """Return what `HeadRunner.logits_after` does, for tokens on the device."""
        if self.spec.selector is None:
            embeddings = self.by_name[MARKOV[0] + ".weight"][tokens]
            return logits + self.linear(embeddings, MARKOV[1]).float()
        predecessor, successor, projection = (self.by_name[name] for name in SELECTOR)
        projected = self._ops.linear(states, projection, None)
        return candidate_logits(
            self.spec.selector,
            logits,
            predecessor[tokens],
            projected,
            lambda candidates: successor[candidates],
        )

    def convolution_weights(self, x: Tensor, module: str) -> Tensor | None:
        """Return the weights of a module's convolutions for its input x; None: the head has none (DFlash2)."""
        if self.spec.convolution is None:
            return None
        generated = self.linear(x, module + ".kernel_projection")
        return convolution_weights(self.by_name[module + ".base_kernel"], generated)


class PlainLayers:
    """Llama-style layers of a head."""

    nbytes = 0  # their weights are among the head's tensors

    def __init__(self, tensors: HeadTensors) -> None:
        self._tensors = tensors

    def rotations(self, positions: Tensor) -> CosSin:
        angles, dtype = positions.unsqueeze(1).float() * self._tensors.frequencies, self._tensors.target.dtype
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def run(
        self,
        stream: Tensor,
        attention_input: Tensor,
        cos_sin: CosSin,
        kv: Sequence[PagedKv],
        block_indices: Tensor,
    ) -> Tensor:
        """Return the residual stream after all layers; `attention_input` is that of the first layer.

        `block_indices` [rows] are the places of rows in their blocks, which convolutions read.
        """
        tensors = self._tensors
        for index, layer_kv in enumerate(kv):
            prefix = f"layers.{index}."
            if index:
                attention_input = tensors.norm(stream, prefix + "input_layernorm.weight")
            weights = tensors.convolution_weights(attention_input, prefix + CONVOLUTIONS[0])
            attention_input = convolve(attention_input, weights, 0, block_indices)
            attended = self._attention(index, attention_input, cos_sin, layer_kv)
            stream = stream + convolve(attended, weights, 1, block_indices)
            mlp_input = tensors.norm(stream, prefix + "post_attention_layernorm.weight")
            weights = tensors.convolution_weights(mlp_input, prefix + CONVOLUTIONS[1])
            mlp_output = self._mlp(index, convolve(mlp_input, weights, 0, block_indices))
            stream = stream + convolve(mlp_output, weights, 1, block_indices)
        return stream

    def write_rows(self, context: Tensor, cos_sin: CosSin, kv: Sequence[PagedKv]) -> None:
        """Write the keys and values of every layer, computed from `HeadTensors.context`."""
        for index, layer_kv in enumerate(kv):
            self._write_layer(index, context, cos_sin, layer_kv)

    def _write_layer(self, index: int, attention_input: Tensor, cos_sin: CosSin, kv: PagedKv) -> None:
        kv.keys[kv.slots] = rotate(self._heads(index, attention_input, "k"), *cos_sin)
        kv.values[kv.slots] = self._heads(index, attention_input, "v")

    def _attention(self, index: int, attention_input: Tensor, cos_sin: CosSin, kv: PagedKv) -> Tensor:
        queries = self._heads(index, attention_input, "q")
        self._write_layer(index, attention_input, cos_sin, kv)
        attended = paged_attention(rotate(queries, *cos_sin), kv.keys, kv.values, kv.views)
        return self._tensors.linear(
            attended.reshape(len(attention_input), -1), f"layers.{index}.self_attn.o_proj"
        )

    def _heads(self, index: int, attention_input: Tensor, name: str) -> Tensor:
        """Return queries ("q"), keys ("k") or values ("v"), [rows, heads, dim], normed if the head has that norm."""
        prefix, attention = f"layers.{index}.self_attn.{name}", self._tensors.spec.layers[index].attention
        projected = self._tensors.linear(attention_input, f"{prefix}_proj").view(
            len(attention_input), -1, attention.head_dim
        )
        return self._tensors.norm(projected, f"{prefix}_norm.weight")

    def _mlp(self, index: int, normed: Tensor) -> Tensor:
        prefix, tensors = f"layers.{index}.", self._tensors
        gate, up = (tensors.linear(normed, f"{prefix}mlp.{name}_proj") for name in ("gate", "up"))
        return tensors.linear(silu(gate) * up, prefix + "mlp.down_proj")


@dataclass(frozen=True)
class _ModuleTensors:
    """A `LayerSource` with the tensors of an MTP module's layers."""

    head: Head
    target: TargetMatrices

    @property
    def hidden_size(self) -> int:
        return self.head.spec.hidden_size

    def tensor(self, name: str) -> Tensor:
        return load_tensor(self.head, name, self.target)

    def matrix(self, names: Sequence[str]) -> Tensor:
        return stacked([self.tensor(name) for name in names])

    def floats(self, name: str) -> Tensor:
        return self.head.load(name).to(self.target.device)

    def nothing(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.target.dtype, device=self.target.device)


class ModuleLayers:
    """Layers of an MTP module, which may be of any model family and run like a decoder's."""

    def __init__(self, head: Head, target: TargetMatrices) -> None:
        spec, source = head.spec, _ModuleTensors(head, target)
        loaded = [load_layer(source, layer, f"{_LAYERS}{index}.") for index, layer in enumerate(spec.layers)]
        self.nbytes = sum(layer.nbytes for layer in loaded)
        self._layers = TorchLayers(spec.layers, loaded, spec.norm.eps)
        self._rotations = Rotations(spec.layers, spec.rope, target.device)
        self._dtype = target.dtype

    def rotations(self, positions: Tensor) -> CosSin:
        cos_sin = self._rotations.of(positions, self._dtype)[0]
        assert cos_sin is not None
        return cos_sin

    def run(
        self,
        stream: Tensor,
        attention_input: Tensor,
        cos_sin: CosSin,
        kv: Sequence[PagedKv],
        block_indices: Tensor,
    ) -> Tensor:
        for index, layer_kv in enumerate(kv):
            stream = self._layers.run(index, stream, cos_sin, layer_kv, LayerAdapters())
        return stream

    def write_rows(self, context: Tensor, cos_sin: CosSin, kv: Sequence[PagedKv]) -> None:
        raise NotImplementedError("MTP modules read features in every row; they store none without a token")


class TorchHead:
    """A draft head, loaded for a decoder."""

    drafts_early = False
    is_ready = True
    stops = False

    def __init__(self, tensors: HeadTensors, row_name: str, bucketed: bool) -> None:
        self.spec = tensors.spec
        self._tensors = tensors
        self._row_name = row_name
        self._layers: PlainLayers | ModuleLayers = (
            PlainLayers(tensors) if tensors.spec.is_plain else ModuleLayers(tensors.head, tensors.target)
        )
        self._staging = Staging(tensors.target.device, bucketed)
        self.markov_embeddings, self.logits_after = tensors.markov_embeddings, tensors.logits_after

    @property
    def weight_bytes(self) -> int:
        return self._tensors.nbytes + self._layers.nbytes

    @torch.inference_mode()
    def draft(self, call: HeadCall) -> HeadOutput | Chains:
        """Return logits, from which the caller grows chains; the plan is not used."""
        if call.context is not None:
            self.forward(call.context, call.store)
        return self.forward(call.rows, call.store)

    def forward(self, head_input: HeadInput, store: KvStore) -> HeadOutput:
        """Run one pass and write its KV rows; return logits and states of the logit rows."""
        if not isinstance(store, TorchKvStore):
            raise ValueError("the KV store was made for another backend")
        staged = self._staging.stage(ForwardBatch.of(head_input.arrays), store.page_size, store.spare_slot)
        batch, padding = staged.batch, len(staged.batch.token_ids) - len(head_input.features)
        features = pad(as_tensor(head_input.features).to(self._tensors.target.dtype), (0, 0, 0, padding))
        cos_sin, slots = self._layers.rotations(batch.positions), batch.slots.long()
        layer_arrays = list(zip(*store.arrays(self._row_name), strict=True))
        if self.spec.join is Join.CONTEXT and not head_input.are_own:
            context = self._tensors.context(features)
            self._layers.write_rows(context, cos_sin, [PagedKv(*layer, slots, []) for layer in layer_arrays])
            return HeadOutput(features.new_empty(0, self.spec.draft_vocab_size).float(), context[:0])
        all_views = group_views(staged, store.page_size, store.empty_slot)
        views = views_from_start(head_input, staged, all_views, store.empty_slot)
        inputs = self._tensors.layer_inputs(batch.token_ids, features, head_input.are_own)
        kv = [PagedKv(*layer, slots, views) for layer in layer_arrays]
        indices = torch.from_numpy(block_indices(head_input.arrays.row_starts)).to(slots.device)
        stream = self._layers.run(*inputs, cos_sin, kv, pad(indices, (0, padding)))
        logits, states = self._tensors.logits_and_states(stream[batch.logit_rows][: staged.num_logits])
        return HeadOutput(logits.float(), states)


def views_from_start(
    head_input: HeadInput, staged: StagedBatch, views: list[GroupView], empty_slot: int
) -> list[GroupView]:
    """Return the views without the KV rows before each request's start, which are unwritten and may contain NaN."""
    device = staged.batch.token_ids.device
    starts = torch.zeros(len(staged.batch.kv_lens), dtype=torch.int64, device=device)
    starts[: len(head_input.starts)] = torch.from_numpy(head_input.starts).to(device)
    masked = []
    for view, group in zip(views, staged.groups, strict=True):
        logical = torch.arange(view.visible.shape[-1], device=device)
        is_after_start = logical >= starts[group.members.long()][:, None]
        slots = torch.where(is_after_start, view.slots, empty_slot)
        masked.append(replace(view, slots=slots, visible=view.visible & is_after_start.unsqueeze(1)))
    return masked
