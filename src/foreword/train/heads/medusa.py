"""Trains Medusa heads: one per draft token, all reading the same state of the target."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu

from foreword.models.config import ModelConfig
from foreword.models.formats.checkpoint import Checkpoint
from foreword.train.heads.learner import HeadVocabulary, LearnedFiles, Learner, parameters_by_name
from foreword.train.passes.layers import compiled_for_training
from foreword.train.passes.packing import PackedBatch
from foreword.train.passes.target import Features, FrozenTarget
from foreword.train.texts.documents import Document


@dataclass(frozen=True)
class MedusaRecipe:
    """Number and shape of the heads."""

    heads: int = 4
    blocks: int = 1  # residual blocks per head
    draft_vocab: int = 16384

    method: ClassVar[str] = "medusa"

    def check(self, target: ModelConfig) -> None:
        """Accept any target."""

    def build(self, target: FrozenTarget, vocabulary: HeadVocabulary, compiled: bool = False) -> Learner:
        return MedusaHeads(target, vocabulary, self, compiled=compiled).to(target.device)


class MedusaHeads(Learner):
    """Heads that read the target's state of a token. Head i drafts the token i + 2 positions after that token."""

    def __init__(
        self, target: FrozenTarget, vocabulary: HeadVocabulary, recipe: MedusaRecipe, compiled: bool = False
    ) -> None:
        super().__init__(target, vocabulary)
        self._recipe = recipe
        hidden = target.config.hidden_size
        names = [f"{head}/{block}" for head in range(recipe.heads) for block in range(recipe.blocks)]
        self.matrices = parameters_by_name({name: torch.zeros(hidden, hidden) for name in names})
        self.biases = parameters_by_name({name: torch.zeros(hidden) for name in names})
        tokens = len(vocabulary.token_ids)
        self.lm_heads = nn.ParameterList(
            [nn.Parameter(torch.empty(tokens, hidden)) for _ in range(recipe.heads)]
        )
        self._block = compiled_for_training(_block, compiled)

    @torch.no_grad()
    def begin(self, documents: Sequence[Document], seed: int) -> None:
        """Initialise blocks as identity and output matrices as the target's, as in the Medusa paper."""
        for matrix in self.lm_heads:
            matrix.copy_(self.target.weights.head[self.vocabulary.token_ids])

    def loss_steps(self, depth: int) -> int:
        return min(depth, self._recipe.heads)

    def steps(self, batch: PackedBatch, features: Features, count: int) -> Iterator[Tensor]:
        state, dtype = features.last[batch.tail_rows], self.target.dtype
        for head in range(min(count, self._recipe.heads)):
            output = state
            for block in range(self._recipe.blocks):
                name = f"{head}/{block}"
                output = self._block(output, self.matrices[name].to(dtype), self.biases[name].to(dtype))
            yield output

    def output(self, step: int) -> Tensor:
        matrix: Tensor = self.lm_heads[step]
        return matrix

    def weights(self) -> dict[str, nn.Parameter]:
        named: dict[str, nn.Parameter] = {}
        for name, matrix in self.matrices.items():
            head, block = name.split("/")
            named[f"blocks.{head}.layers.{block}.weight"] = matrix
            named[f"blocks.{head}.layers.{block}.bias"] = self.biases[name]
        return named | {f"lm_heads.{head}.weight": matrix for head, matrix in enumerate(self.lm_heads)}

    def files(self, checkpoint: Checkpoint, draft_tokens: int) -> LearnedFiles:
        """Return the files in vLLM's layout, which supports a draft vocabulary."""
        tensors = self.file_tensors()
        tokens = self.vocabulary.token_ids.cpu()
        if len(tokens) < checkpoint.config.vocab_size:
            tensors["token_map"] = tokens
        config = {
            "model_type": "medusa",
            "architectures": ["MedusaModel"],
            "hidden_size": checkpoint.config.hidden_size,
            "vocab_size": checkpoint.config.vocab_size,
            "truncated_vocab_size": len(tokens),
            "num_heads": self._recipe.heads,
            "num_hidden_layers": self._recipe.blocks,
            "medusa_num_heads": self._recipe.heads,
            "medusa_num_layers": self._recipe.blocks,
            "medusa_fc_bias": True,
            "original_lm_head": False,
            "base_model_name_or_path": checkpoint.path.name,
            "torch_dtype": "bfloat16",
        }
        return LearnedFiles(config, tensors)


def _block(state: Tensor, matrix: Tensor, bias: Tensor) -> Tensor:
    return state + silu(linear(state, matrix, bias))
