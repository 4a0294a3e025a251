"""Draft heads in plain torch: the reference that faster backends must equal."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear, silu

from foreword.backends.batch import ForwardBatch
from foreword.backends.interface import Chains, HeadCall, HeadInput, HeadOutput, KvStore
from foreword.backends.torch.attention import GroupView, LayerRows, group_views, paged_attention
from foreword.backends.torch.kv_store import TorchKvStore
from foreword.backends.torch.norms import rms_norm
from foreword.backends.torch.rotation import CosSin
from foreword.backends.torch.staging import StagedBatch, Staging
from foreword.backends.torch.weights import DecoderWeights
from foreword.kv.states import as_tensor
from foreword.models.config import LayerSpec
from foreword.models.heads.opening import Head
from foreword.models.heads.spec import CONFIDENCE, DRAFTERS_OWN, MARKOV, TABLES, Join
from foreword.models.rope import frequencies, rotate


@dataclass(frozen=True)
class LentEnds:
    """A target's embedding and output matrix, and the numbers in which its head computes."""

    embed: Callable[[Tensor], Tensor]  # ids [rows] -> [rows, hidden]
    project: Callable[[Tensor], Tensor]  # [rows, hidden] -> [rows, vocab]
    device: torch.device
    dtype: torch.dtype

    @staticmethod
    def of(weights: DecoderWeights) -> "LentEnds":
        """Those of a torch decoder."""
        table = weights.embedding
        return LentEnds(
            lambda ids: embedding(ids, table), lambda x: linear(x, weights.head), table.device, table.dtype
        )


@dataclass(frozen=True)
class PagedRows:
    """A head's rows in the pages of a store."""

    layers: Sequence[tuple[LayerRows, LayerRows]]  # keys and values of each
    page_size: int
    spare_slot: int  # padding writes here
    empty_slot: int  # stands for rows that are not there, and reads as numbers


class TorchHead:
    """One head; its tensors go by speculators' names."""

    anticipates = False
    stops = False

    def __init__(self, head: Head, rows: str, ends: LentEnds, bucketed: bool) -> None:
        self.spec = head.spec
        self._rows = rows
        self._ends = ends
        self._weights = {
            name: head.load(name, ends.dtype).to(ends.device)
            for name in head.spec.shapes
            if self._reads(name)
        }
        head_dim = head.spec.layers[0].attention.head_dim
        self._frequencies = frequencies(head.spec.rope, head_dim).to(ends.device)
        self._staging = Staging(ends.device, bucketed)

    def _reads(self, name: str) -> bool:
        """Whether a tensor is one of its own weights."""
        return not name.startswith(CONFIDENCE) and name not in (*TABLES, *DRAFTERS_OWN)

    @property
    def weight_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._weights.values())

    @torch.inference_mode()
    def draft(self, call: HeadCall) -> HeadOutput | Chains:
        """Return logits: chains are grown from them."""
        if call.context is not None:
            self._forward(call.context, call.store)
        return self._forward(call.rows, call.store)

    def _forward(self, wanted: HeadInput, store: KvStore) -> HeadOutput:
        paged = self._paged(store)
        staged = self._staging.stage(ForwardBatch.of(wanted.arrays), paged.page_size, paged.spare_slot)
        batch, padding = staged.batch, len(staged.batch.token_ids) - len(wanted.features)
        features = torch.nn.functional.pad(
            as_tensor(wanted.features).to(self._ends.dtype), (0, 0, 0, padding)
        )
        cos_sin = self._turns(batch.positions)
        slots = batch.slots.long()
        if self.spec.join is Join.CONTEXT and not wanted.are_own:
            return self._keep_context(features, cos_sin, paged, slots)
        views = seen_from(
            wanted, staged, group_views(staged, paged.page_size, paged.empty_slot), paged.empty_slot
        )
        begun = self._begin(batch.token_ids, features, wanted.are_own)
        stream = self._run_layers(*begun, cos_sin, paged, slots, views)
        last = stream[batch.logit_rows][: staged.num_logits]
        normed = self._norm(last, "norm.weight")
        return HeadOutput(self._logits(normed), normed if self.spec.norm_output else last)

    @torch.inference_mode()
    def markov_before(self, tokens: Sequence[int]) -> Tensor:
        table = self._weights[MARKOV[0] + ".weight"]
        return table[torch.tensor(tokens, device=table.device)].float()

    @torch.inference_mode()
    def markov_after(self, before: Tensor) -> Tensor:
        return self._linear(before.to(self._ends.dtype), MARKOV[1]).float()

    def _paged(self, store: KvStore) -> PagedRows:
        """Where its rows are."""
        if not isinstance(store, TorchKvStore):
            raise ValueError("the KV store was made for another backend")
        keys, values = store.arrays(self._rows)
        layers = list(zip(keys.unbind(), values.unbind(), strict=True))
        return PagedRows(layers, store.page_size, store.spare_slot, store.empty_slot)

    def _begin(self, token_ids: Tensor, features: Tensor, are_own: bool) -> tuple[Tensor, Tensor]:
        """The residual stream, and what the first layer's attention reads."""
        own = self._weights.get("embed_tokens.weight")
        embedded = self._ends.embed(token_ids) if own is None else embedding(token_ids, own)
        if self.spec.join is Join.CONCAT:
            if not are_own and self.spec.has("fc.weight"):
                features = self._linear(self._normed_features(features), "fc")
            normed = self._norm(features, "layers.0.hidden_norm.weight")
            before = self._norm(embedded, "layers.0.input_layernorm.weight")
            stream = normed if self.spec.norm_before_residual else features
            return stream, torch.cat((before, normed), dim=-1)
        if self.spec.join is Join.FUSED:
            before, normed = self._norm(embedded, "enorm.weight"), self._norm(features, "hnorm.weight")
            stream = self._linear(torch.cat((before, normed), dim=-1), "fc")
        else:
            stream = embedded
        return stream, self._norm(stream, "layers.0.input_layernorm.weight")

    def _turns(self, positions: Tensor) -> CosSin:
        """Cosines and sines of every row."""
        angles = positions.unsqueeze(1).float() * self._frequencies
        return angles.cos().to(self._ends.dtype), angles.sin().to(self._ends.dtype)

    def _run_layers(
        self,
        stream: Tensor,
        attention_input: Tensor,
        cos_sin: CosSin,
        paged: PagedRows,
        slots: Tensor,
        views: list[GroupView],
    ) -> Tensor:
        """The stream after all layers."""
        for index, layer in enumerate(self.spec.layers):
            if index:
                attention_input = self._norm(stream, f"layers.{index}.input_layernorm.weight")
            stream = stream + self._attention(
                index, layer, attention_input, cos_sin, paged.layers[index], slots, views
            )
            stream = stream + self._mlp(index, stream)
        return stream

    def _keep_context(self, features: Tensor, cos_sin: CosSin, paged: PagedRows, slots: Tensor) -> HeadOutput:
        """The target's states become keys and values of every layer; nothing else comes of them."""
        context = self._norm(self._linear(features, "fc"), "hidden_norm.weight")
        for index, layer in enumerate(self.spec.layers):
            self._place(index, layer, context, cos_sin, paged.layers[index], slots)
        return HeadOutput(features.new_empty(0, self.spec.draft_vocab_size).float(), context[:0])

    def _normed_features(self, features: Tensor) -> Tensor:
        if self.spec.has("fc_norm.0.weight"):
            taps = features.chunk(self.spec.num_taps, dim=-1)
            normed = [self._norm(tap, f"fc_norm.{index}.weight") for index, tap in enumerate(taps)]
            return torch.cat(normed, dim=-1)
        return self._norm(features, "input_norm.weight")

    def _norm(self, x: Tensor, name: str) -> Tensor:
        """Normed, if the head has such a norm."""
        weight = self._weights.get(name)
        return x if weight is None else rms_norm(x, weight, self.spec.norm.eps)

    def _place(
        self,
        index: int,
        layer: LayerSpec,
        read: Tensor,
        cos_sin: CosSin,
        kv: tuple[LayerRows, LayerRows],
        slots: Tensor,
    ) -> None:
        """Write the keys and values of these rows."""
        keys = self._norm(self._heads(index, layer, read, "k"), f"layers.{index}.self_attn.k_norm.weight")
        kv[0][slots] = rotate(keys, *cos_sin)
        kv[1][slots] = self._heads(index, layer, read, "v")

    def _attention(
        self,
        index: int,
        layer: LayerSpec,
        read: Tensor,
        cos_sin: CosSin,
        kv: tuple[LayerRows, LayerRows],
        slots: Tensor,
        views: list[GroupView],
    ) -> Tensor:
        prefix = f"layers.{index}.self_attn."
        queries = self._norm(self._heads(index, layer, read, "q"), prefix + "q_norm.weight")
        self._place(index, layer, read, cos_sin, kv, slots)
        attended = paged_attention(rotate(queries, *cos_sin), *kv, views)
        return self._linear(attended.reshape(len(read), -1), prefix + "o_proj")

    def _heads(self, index: int, layer: LayerSpec, read: Tensor, name: str) -> Tensor:
        projected = self._linear(read, f"layers.{index}.self_attn.{name}_proj")
        return projected.view(len(read), -1, layer.attention.head_dim)

    def _mlp(self, index: int, stream: Tensor) -> Tensor:
        prefix = f"layers.{index}."
        normed = self._norm(stream, prefix + "post_attention_layernorm.weight")
        gate, up = (self._linear(normed, f"{prefix}mlp.{name}_proj") for name in ("gate", "up"))
        return self._linear(silu(gate) * up, prefix + "mlp.down_proj")

    def _logits(self, normed: Tensor) -> Tensor:
        own = self._weights.get("lm_head.weight")
        return (self._ends.project(normed) if own is None else linear(normed, own)).float()

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return linear(x, self._weights[name + ".weight"], self._weights.get(name + ".bias"))


def seen_from(
    wanted: HeadInput, staged: StagedBatch, views: list[GroupView], empty_slot: int
) -> list[GroupView]:
    """The views without the KV rows before each request's start, which may hold anything, also NaN."""
    device = staged.batch.token_ids.device
    starts = torch.zeros(len(staged.batch.kv_lens), dtype=torch.int64, device=device)
    starts[: len(wanted.starts)] = torch.from_numpy(wanted.starts).to(device)
    begun = []
    for view, group in zip(views, staged.groups, strict=True):
        logical = torch.arange(view.visible.shape[-1], device=device)
        seen = logical >= starts[group.members.long()][:, None]
        slots = torch.where(seen, view.slots, empty_slot)
        begun.append(replace(view, slots=slots, visible=view.visible & seen.unsqueeze(1)))
    return begun
