"""Trains an early exit: one layer and a norm after the target's first layers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from foreword.errors import RequestError
from foreword.models.config import ModelConfig
from foreword.models.formats.checkpoint import Checkpoint
from foreword.train.heads.config_files import hf_settings
from foreword.train.heads.learner import LearnedFiles
from foreword.train.heads.stack import NORM, LayerStack, states_by_level, without_factors
from foreword.train.passes.packing import PackedBatch
from foreword.train.passes.target import Features, FrozenTarget
from foreword.train.passes.vocabulary import HeadVocabulary
from foreword.train.texts.documents import Document


@dataclass(frozen=True)
class ExitRecipe:
    """Position of the exit."""

    layer: int | None = None  # target layers before the exit; None: a quarter of them

    method: ClassVar[str] = "exit"
    draft_vocab: ClassVar[None] = None  # all tokens

    def check(self, target: ModelConfig) -> None:
        self._layer(target)

    def build(
        self, target: FrozenTarget, vocabulary: HeadVocabulary, *, compiled: bool = False
    ) -> "ExitAdapter":
        layer = self._layer(target.config)
        return ExitAdapter(target, vocabulary, layer, compiled=compiled).to(target.device)

    def _layer(self, target: ModelConfig) -> int:
        count = target.num_layers
        layer = self.layer if self.layer is not None else max(1, count // 4)
        if not 1 <= layer < count:
            raise RequestError(f"the exit must be after layer 1 .. {count - 1}, not {layer}")
        return layer


class ExitAdapter(LayerStack):
    """Reads the residual stream after `layer` layers; embedding and output matrix are the target's."""

    def __init__(
        self, target: FrozenTarget, vocabulary: HeadVocabulary, layer: int, *, compiled: bool = False
    ) -> None:
        super().__init__(
            target, vocabulary, target.config.with_layers([layer]), taps=(layer,), compiled=compiled
        )

    @torch.no_grad()
    def begin(self, documents: Sequence[Document], seed: int) -> None:
        """Initialise the weights from the target's last layer."""
        self.copy_layer(self.target.config.num_layers - 1, 0)
        self.weights()[NORM].copy_(self.target.weights.final_norm)

    def steps(self, batch: PackedBatch, features: Features, count: int) -> Iterator[Tensor]:
        yield from states_by_level(self.run(features.taps[0], batch, self.cast()), batch, count)

    def files(self, checkpoint: Checkpoint, draft_tokens: int) -> LearnedFiles:
        """Return the files of a one-layer model without embedding."""
        settings = hf_settings(without_factors(self.config), checkpoint.tokenizer())
        settings |= {"exit_layer": self.taps[0], "exit_of": checkpoint.path.name}
        return LearnedFiles(settings, self.file_tensors())
