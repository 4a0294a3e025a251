"""Trains a small decoder to imitate the target."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import embedding

from foreword.errors import RequestError
from foreword.models.config import AttentionSpec, LayerSpec, ModelConfig
from foreword.models.formats.checkpoint import Checkpoint
from foreword.train.heads.config_files import hf_settings, tokenizer_files
from foreword.train.heads.learner import LearnedFiles, stored
from foreword.train.heads.stack import EMBEDDING, NORM, LayerStack, states_by_level, without_factors
from foreword.train.passes.packing import PackedBatch
from foreword.train.passes.target import Features, FrozenTarget
from foreword.train.passes.vocabulary import HeadVocabulary
from foreword.train.texts.documents import Document


@dataclass(frozen=True)
class DraftRecipe:
    """Shape of a decoder; defaults are the target's."""

    layers: int = 4
    copied: tuple[int, ...] | None = None  # initial layers of the target; None: evenly spaced
    random: bool = False  # random initial layers
    hidden: int | None = None
    intermediate: int | None = None
    heads: int | None = None
    kv_heads: int | None = None

    method: ClassVar[str] = "draft"
    draft_vocab: ClassVar[None] = None  # all tokens

    def check(self, target: ModelConfig) -> None:
        self._copied(target, self._config(target))

    def build(
        self, target: FrozenTarget, vocabulary: HeadVocabulary, *, compiled: bool = False
    ) -> "DraftModel":
        config = self._config(target.config)
        copied = self._copied(target.config, config)
        return DraftModel(target, vocabulary, config, copied, compiled=compiled).to(target.device)

    def _config(self, target: ModelConfig) -> ModelConfig:
        given, spec = target.layer.attention, target.layer
        heads = self.heads or given.num_heads
        kv_heads = self.kv_heads or (heads if self.heads else given.num_kv_heads)
        hidden = self.hidden or target.hidden_size
        head_dim = given.head_dim if not self.hidden and not self.heads else hidden // heads
        if heads % kv_heads or hidden < heads or head_dim % 2:
            raise RequestError(
                f"{heads} query heads, {kv_heads} key/value heads and a width of {hidden} do not fit together"
            )
        attention: AttentionSpec = replace(given, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim)
        mlp = replace(spec.mlp, intermediate_size=self.intermediate or spec.mlp.intermediate_size)
        layer = LayerSpec(attention, mlp)
        count = self.layers if self.copied is None else len(self.copied)
        shaped = replace(target, hidden_size=hidden, layers=(layer,) * count)
        return without_factors(
            shaped if hidden == target.hidden_size else replace(shaped, tied_embeddings=True)
        )

    def _copied(self, target: ModelConfig, config: ModelConfig) -> tuple[int, ...]:
        """Return the target's layers to start from; empty if the shapes differ."""
        fits = config.layer == target.layer and config.hidden_size == target.hidden_size
        if self.random or not fits:
            if self.copied is not None:
                raise RequestError("layers can be copied only into a draft of the target's own shape")
            return ()
        if self.copied is None:
            last, count = target.num_layers - 1, self.layers
            return tuple(round(i * last / max(count - 1, 1)) for i in range(count))
        if not all(0 <= layer < target.num_layers for layer in self.copied):
            raise RequestError(f"layers to copy must be within 0 .. {target.num_layers - 1}")
        return self.copied


class DraftModel(LayerStack):
    """A draft model; at the target's width, embedding and output matrix are the target's and frozen."""

    def __init__(
        self,
        target: FrozenTarget,
        vocabulary: HeadVocabulary,
        config: ModelConfig,
        copied: tuple[int, ...],
        *,
        compiled: bool = False,
    ) -> None:
        self._borrows = config.hidden_size == target.config.hidden_size
        self._copied = copied
        super().__init__(target, vocabulary, config, compiled=compiled)

    def _learns(self, name: str) -> bool:
        return super()._learns(name) or (name == EMBEDDING and not self._borrows)

    @torch.no_grad()
    def begin(self, documents: Sequence[Document], seed: int) -> None:
        self.begin_random(seed)
        for place, source in enumerate(self._copied):
            self.copy_layer(source, place)
        if self._borrows:
            self.weights()[NORM].copy_(self.target.weights.final_norm)

    def output(self, step: int) -> Tensor:
        return self.target.weights.head if self._borrows else self.weights()[EMBEDDING]

    def steps(self, batch: PackedBatch, features: Features, count: int) -> Iterator[Tensor]:
        weights = self.cast()
        table = self.target.weights.embedding if self._borrows else weights[EMBEDDING]
        yield from states_by_level(self.run(embedding(batch.token_ids, table), batch, weights), batch, count)

    def files(self, checkpoint: Checkpoint, draft_tokens: int) -> LearnedFiles:
        """Return the files of a complete model, with copies of the target's matrices."""
        tensors: dict[str, Tensor] = self.file_tensors()
        borrowed: dict[str, Tensor] = {}
        if self._borrows:
            borrowed[EMBEDDING] = stored(self.target.weights.embedding)
            if not self.config.tied_embeddings:
                borrowed["lm_head.weight"] = stored(self.target.weights.head)
        tokenizer = checkpoint.tokenizer()
        return LearnedFiles(
            hf_settings(self.config, tokenizer),
            tensors | borrowed,
            tokenizer_files(tokenizer),
            frozenset(borrowed),
        )
