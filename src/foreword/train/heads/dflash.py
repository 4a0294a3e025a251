"""Trains a DFlash head, which replaces a block of mask tokens after the newest token in one pass.

Every row that predicts an answer token has a block: the next token, then mask tokens. A *slot* is a position in a
block. The block attends to keys and values computed from the target's states up to this row, and to itself.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear

from foreword.backends.torch.norms import rms_norm
from foreword.models.formats.checkpoint import Checkpoint
from foreword.models.heads.writing import head_sizes, layer_config
from foreword.models.rope import rotate
from foreword.train.heads.config_files import speculators_config
from foreword.train.heads.learner import (
    HeadVocabulary,
    LearnedFiles,
    Learner,
    TapsHead,
    TapsRecipe,
    by_file_name,
    vocabulary_tensors,
)
from foreword.train.passes.attention import chain_attention
from foreword.train.passes.layers import LayerFunctions, LayerHalves, LayerTensors, layer_tensors, tracked
from foreword.train.passes.packing import PackedBatch
from foreword.train.passes.target import Features, FrozenTarget
from foreword.train.texts.documents import Document

_LAYER = {
    "self_attn.q_proj": "q", "self_attn.k_proj": "kv", "self_attn.v_proj": "kv", "self_attn.o_proj": "o",
    "mlp.gate_proj": "up", "mlp.up_proj": "up", "mlp.down_proj": "down",
}  # fmt: skip
"""Matrices of a layer -> key of the matrix's shape in `sizes` of `DFlashLearner.__init__`."""
_OUTPUT = "lm_head.weight"
_NORMS = ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm")


@dataclass(frozen=True)
class DFlashRecipe(TapsRecipe):
    """Shape of a head; the default taps are `spread_taps`."""

    layers: int = 2
    draft_tokens: int = 4  # mask tokens per block
    causal: bool = False  # JetSpec: a row of a block attends only to earlier rows of the block

    method: ClassVar[str] = "dflash"

    def build(self, target: FrozenTarget, vocabulary: HeadVocabulary, compiled: bool = False) -> Learner:
        return DFlashLearner(target, vocabulary, self, compiled=compiled).to(target.device)


def spread_taps(num_layers: int) -> tuple[int, ...]:
    """Return three evenly spaced taps from the second to the third last layer."""
    last = max(num_layers - 4, 1)
    return tuple(sorted({min(2 + round(i * (last - 1) / 2), num_layers) for i in range(3)}))


class DFlashLearner(TapsHead):
    """A DFlash head in training: its blocks attend to keys and values computed from the target's states."""

    mask_token: Tensor

    def __init__(
        self, target: FrozenTarget, vocabulary: HeadVocabulary, recipe: DFlashRecipe, compiled: bool = False
    ) -> None:
        taps = recipe.taps or spread_taps(target.config.num_layers)
        hidden, (heads, kv_heads, dim) = target.config.hidden_size, target.sizes
        intermediate = recipe.intermediate or head_sizes(target.config).intermediate
        sizes = {
            "q": (heads * dim, hidden), "kv": (kv_heads * dim, hidden), "o": (hidden, heads * dim),
            "up": (intermediate, hidden), "down": (hidden, intermediate),
        }  # fmt: skip
        indices = range(recipe.layers)
        shapes = {f"layers.{i}.{name}": sizes[kind] for i in indices for name, kind in _LAYER.items()}
        shapes["fc"] = (hidden, len(taps) * hidden)
        widths = {f"layers.{i}.{name}": dim if "attn" in name else hidden for i in indices for name in _NORMS}
        widths |= {"hidden_norm": hidden, "norm": hidden}
        super().__init__(target, vocabulary, taps, shapes, widths)
        self._recipe, self._intermediate = recipe, intermediate
        self.register_buffer("mask_token", torch.zeros((), dtype=torch.int64))
        self._halves = LayerHalves(compiled=compiled)

    @torch.no_grad()
    def begin(self, documents: Sequence[Document], seed: int) -> None:
        """Initialise the weights; the mask token is the rarest token of the texts."""
        super().begin(documents, seed)
        counts = np.zeros(self.target.config.vocab_size, np.int64)
        for document in documents:
            np.add.at(counts, document.tokens, 1)
        self.mask_token.fill_(int(counts.argmin()))

    def loss_steps(self, depth: int) -> int:
        return min(depth, self._recipe.draft_tokens)

    def steps(self, batch: PackedBatch, features: Features, count: int) -> Iterator[Tensor]:
        target, eps, slots = self.target, self.target.config.norm.eps, self._recipe.draft_tokens + 1
        weights = {
            name: tensor.to(target.dtype) for name, tensor in self.weights().items() if name != _OUTPUT
        }
        text_states = linear(self.scaled_taps(features), weights["fc.weight"])
        text_states = rms_norm(text_states, weights["hidden_norm.weight"], eps)
        rows = batch.tail_rows
        masks = self.mask_token.expand(len(rows) * (slots - 1))
        # [slots of the block * tail rows, hidden], slot by slot
        stream = embedding(torch.cat((batch.input_tokens(0), masks)), target.weights.embedding)
        positions = torch.cat([batch.positions[rows] + 1 + slot for slot in range(slots)])
        stream = tracked(stream) if self._recipe.layers > 1 else stream
        rotation, text_rotation = target.head_rotation(positions), target.head_rotation(batch.positions)
        for index in range(self._recipe.layers):
            prefix = f"layers.{index}."
            tensors = layer_tensors(weights, prefix)
            text_kv = self._keys_values(text_states, tensors, text_rotation)
            layer = self._functions(prefix, weights)
            stream = self._layer(stream, rotation, text_kv, tensors, batch, layer)
        states = rms_norm(stream, weights["norm.weight"], eps).view(slots, len(rows), -1)
        yield from states[1 : 1 + count]

    def _layer(
        self,
        stream: Tensor,
        rotation: tuple[Tensor, Tensor],
        text_kv: tuple[Tensor, Tensor],
        tensors: LayerTensors,
        batch: PackedBatch,
        layer: LayerFunctions,
    ) -> Tensor:
        """Run one layer over all slots of all blocks."""
        eps, slots = self.target.config.norm.eps, self._recipe.draft_tokens + 1
        q, k, v = (
            part.reshape(slots, -1, *part.shape[1:])
            for part in layer.before(stream, *rotation, tensors, self.target.sizes, eps)
        )
        block_kv = list(zip(k.unbind(), v.unbind(), strict=True))
        # How many slots of the block each slot attends to.
        ends = range(1, slots + 1) if self._recipe.causal else [slots] * slots
        # The window includes the newest token, whose row is in the block.
        text_window = None if self._recipe.window is None else self._recipe.window - 1
        attended = [
            chain_attention(queries, *text_kv, block_kv[:end], batch.tails, batch.texts, text_window)
            for queries, end in zip(q.unbind(), ends, strict=True)
        ]
        return layer.after(stream, torch.cat(attended), tensors, eps)

    def _functions(self, prefix: str, weights: Mapping[str, Tensor]) -> LayerFunctions:
        """Return the functions of the layer whose weights have this prefix."""
        return self._halves

    def _keys_values(
        self, text_states: Tensor, tensors: LayerTensors, rotation: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return keys and values of the text's tokens, computed from the target's states."""
        heads, kv_heads, dim = self.target.sizes
        qkv, key_norm = tensors[1], tensors[4]  # order of `layer_tensors`
        assert qkv is not None and key_norm is not None
        joined = linear(text_states, qkv[heads * dim :]).view(len(text_states), 2 * kv_heads, dim)
        keys = rms_norm(joined[:, :kv_heads], key_norm, self.target.config.norm.eps)
        return rotate(keys, *rotation), joined[:, kv_heads:].contiguous()

    def weights(self) -> dict[str, nn.Parameter]:
        named = {**by_file_name(self.matrices, self.norms), "lm_head": self.lm_head}
        return {f"{name}.weight": value for name, value in named.items()}

    def files(self, checkpoint: Checkpoint, draft_tokens: int) -> LearnedFiles:
        layer = layer_config(checkpoint.config, self._intermediate, self._recipe.layers, self._recipe.window)
        config = speculators_config(self._recipe.method, checkpoint, draft_tokens) | {
            "architectures": ["DFlashSpeculator"],
            "block_size": self._recipe.draft_tokens + 1,
            "mask_token_id": int(self.mask_token),
            "aux_hidden_state_layer_ids": list(self.taps),
            "draft_vocab_size": len(self.vocabulary.token_ids),
            "sample_from_anchor": False,
            "is_causal": self._recipe.causal,
            "transformer_layer_config": layer
            | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]},
        }
        return LearnedFiles(config, self.file_tensors() | vocabulary_tensors(self.vocabulary))
