"""Draft heads in plain torch: the reference that faster backends must equal."""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear, silu

from foreword.backends.batch import ForwardBatch
from foreword.backends.interface import ChainPlan, HeadInput, HeadOutput, KvStore
from foreword.backends.torch.attention import GroupView, group_views, paged_attention
from foreword.backends.torch.kv_store import TorchKvStore
from foreword.backends.torch.norms import rms_norm
from foreword.backends.torch.staging import StagedBatch, Staging
from foreword.backends.torch.weights import DecoderWeights
from foreword.models.config import LayerSpec
from foreword.models.heads.opening import Head
from foreword.models.heads.spec import Join
from foreword.models.rope import frequencies, rotate


class TorchHead:
    """One head; its tensors go by speculators' names."""

    def __init__(self, head: Head, rows: str, target: DecoderWeights, bucketed: bool) -> None:
        self.spec = head.spec
        self._rows = rows
        device, dtype = target.embedding.device, target.embedding.dtype
        floats = [name for name in head.spec.shapes if name not in ("d2t", "t2d")]
        self._own = {name: head.load(name, dtype).to(device) for name in floats}
        lent = {"embed_tokens.weight": target.embedding, "lm_head.weight": target.head}
        self._weights = lent | self._own
        self._frequencies = frequencies(head.spec.rope, head.spec.layers[0].attention.head_dim).to(device)
        self._staging = Staging(device, bucketed)

    @property
    def weight_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._own.values())

    @torch.inference_mode()
    def forward(self, wanted: HeadInput, store: KvStore) -> HeadOutput:
        if not isinstance(store, TorchKvStore):
            raise ValueError("the KV store was made for another backend")
        staged = self._staging.stage(ForwardBatch.of(wanted.arrays), store.page_size, store.spare_slot)
        views = _from(
            wanted, staged, group_views(staged, store.page_size, store.empty_slot), store.empty_slot
        )
        batch, padding = staged.batch, len(staged.batch.token_ids) - len(wanted.features)
        features = torch.nn.functional.pad(wanted.features.to(self._own_dtype), (0, 0, 0, padding))
        angles = batch.positions.unsqueeze(1).float() * self._frequencies
        cos_sin = angles.cos().to(features.dtype), angles.sin().to(features.dtype)
        embedded = embedding(batch.token_ids, self._weights["embed_tokens.weight"])
        stream, attention_input = self._begin(embedded, features, wanted.are_own)
        keys, values = store.arrays(self._rows)
        for index, layer in enumerate(self.spec.layers):
            if index:
                attention_input = self._norm(stream, f"layers.{index}.input_layernorm.weight")
            kv = keys[index], values[index]
            stream = stream + self._attention(
                index, layer, attention_input, cos_sin, kv, batch.slots.long(), views
            )
            stream = stream + self._mlp(index, stream)
        last = stream[batch.logit_rows][: staged.num_logits]
        normed = self._norm(last, "norm.weight")
        logits = linear(normed, self._weights["lm_head.weight"]).float()
        return HeadOutput(logits, normed if self.spec.norm_output else last)

    def chain(self, wanted: HeadInput, plan: ChainPlan, store: KvStore) -> None:
        """It is asked level by level."""

    @property
    def _own_dtype(self) -> torch.dtype:
        return self._weights["embed_tokens.weight"].dtype

    def _begin(self, embedded: Tensor, features: Tensor, are_own: bool) -> tuple[Tensor, Tensor]:
        """The residual stream, and what the first layer's attention reads."""
        if self.spec.join is Join.FUSED:
            both = torch.cat((embedded, features), dim=-1)
            stream = linear(both, self._weights["fc.weight"], self._weights.get("fc.bias"))
            return stream, stream
        if not are_own and self.spec.has("fc.weight"):
            features = linear(
                self._normed_features(features), self._weights["fc.weight"], self._weights.get("fc.bias")
            )
        normed = self._norm(features, "layers.0.hidden_norm.weight")
        before = self._norm(embedded, "layers.0.input_layernorm.weight")
        stream = normed if self.spec.norm_before_residual else features
        return stream, torch.cat((before, normed), dim=-1)

    def _normed_features(self, features: Tensor) -> Tensor:
        if self.spec.has("fc_norm.0.weight"):
            taps = features.chunk(self.spec.num_taps, dim=-1)
            normed = [self._norm(tap, f"fc_norm.{index}.weight") for index, tap in enumerate(taps)]
            return torch.cat(normed, dim=-1)
        return self._norm(features, "input_norm.weight")

    def _norm(self, x: Tensor, name: str) -> Tensor:
        """Normed, if the head has such a norm."""
        return rms_norm(x, self._weights[name], self.spec.norm.eps) if self.spec.has(name) else x

    def _attention(
        self,
        index: int,
        layer: LayerSpec,
        read: Tensor,
        cos_sin: tuple[Tensor, Tensor],
        kv: tuple[Tensor, Tensor],
        slots: Tensor,
        views: list[GroupView],
    ) -> Tensor:
        def heads(name: str) -> Tensor:
            projected = self._linear(read, f"layers.{index}.self_attn.{name}_proj")
            return projected.view(len(read), -1, layer.attention.head_dim)

        prefix = f"layers.{index}.self_attn."
        queries = rotate(self._norm(heads("q"), prefix + "q_norm.weight"), *cos_sin)
        kv[0][slots] = rotate(self._norm(heads("k"), prefix + "k_norm.weight"), *cos_sin)
        kv[1][slots] = heads("v")
        attended = paged_attention(queries, *kv, views)
        return self._linear(attended.reshape(len(read), -1), prefix + "o_proj")

    def _mlp(self, index: int, stream: Tensor) -> Tensor:
        prefix = f"layers.{index}."
        normed = self._norm(stream, prefix + "post_attention_layernorm.weight")
        gate, up = (self._linear(normed, f"{prefix}mlp.{name}_proj") for name in ("gate", "up"))
        return self._linear(silu(gate) * up, prefix + "mlp.down_proj")

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return linear(x, self._weights[name + ".weight"], self._weights.get(name + ".bias"))


def _from(wanted: HeadInput, staged: StagedBatch, views: list[GroupView], empty_slot: int) -> list[GroupView]:
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
