"""Trains a DFlash2 head: a DFlash head with convolutions over the rows of a block and a selector of candidates.

The selector scores the best tokens of the output matrix given the token before them. In training this is the text's
token, since a draft token counts only if all draft tokens before it equal the text.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear

from foreword.backends.torch.block_parts import candidate_logits, convolution_weights, convolve
from foreword.backends.torch.norms import rms_norm
from foreword.models.formats.checkpoint import Checkpoint
from foreword.models.heads.spec import CONVOLUTIONS, SELECTOR, PathSelector
from foreword.train.heads.dflash import DFlashLearner, DFlashRecipe
from foreword.train.heads.learner import (
    HeadVocabulary,
    LearnedFiles,
    Learner,
    by_file_name,
    parameters_by_name,
)
from foreword.train.passes.layers import (
    LayerFunctions,
    LayerTensors,
    Sizes,
    attention_output,
    compiled_for_training,
    mlp_output,
    project_heads,
)
from foreword.train.passes.target import FrozenTarget
from foreword.train.texts.documents import Document

TAPS = 2  # rows that a convolution reads: a row's own and the one before it

GROUP = 16  # adjacent channels with the same computed weights, fewer if the hidden size is not divisible

_PREDECESSOR, _SUCCESSOR, _PROJECTION = SELECTOR
_CHUNK = 1024  # number of rows whose candidates are scored at the same time


@dataclass(frozen=True)
class DFlash2Recipe(DFlashRecipe):
    """Shape of a head."""

    selector_rank: int = 64  # length of the selector's vectors
    candidates: int = 16  # best tokens of a position that the selector scores

    method: ClassVar[str] = "dflash2"

    def build(self, target: FrozenTarget, vocabulary: HeadVocabulary, compiled: bool = False) -> Learner:
        return DFlash2Learner(target, vocabulary, self, compiled=compiled).to(target.device)


class DFlash2Learner(DFlashLearner):
    """A DFlash2 head in training."""

    def __init__(
        self, target: FrozenTarget, vocabulary: HeadVocabulary, recipe: DFlash2Recipe, compiled: bool = False
    ) -> None:
        super().__init__(target, vocabulary, recipe, compiled=compiled)
        hidden, rank = target.config.hidden_size, recipe.selector_rank
        self._group, self._selector = gcd(GROUP, hidden), PathSelector(recipe.candidates)
        width = 2 * TAPS * hidden // self._group
        modules = [f"layers.{layer}.{name}" for layer in range(recipe.layers) for name in CONVOLUTIONS]
        projections = {f"{module}.kernel_projection": torch.zeros(width, hidden) for module in modules}
        projections[_PROJECTION.removesuffix(".weight")] = torch.zeros(rank, hidden)
        self.matrices.update(parameters_by_name(projections))
        kernels = {f"{module}.base_kernel": torch.zeros(2, TAPS, hidden) for module in modules}
        vectors = {
            _PREDECESSOR: (target.config.vocab_size, rank),
            _SUCCESSOR: (len(vocabulary.token_ids), rank),
        }
        self.vectors = parameters_by_name(
            kernels | {name: torch.zeros(shape) for name, shape in vectors.items()}
        )
        self._convolved_halves = ConvolvedHalves(compiled=compiled)

    @torch.no_grad()
    def begin(self, documents: Sequence[Document], seed: int) -> None:
        """Initialise a DFlash head: convolutions return their input, and the selector adds nothing."""
        super().begin(documents, seed)
        generator = torch.Generator().manual_seed(seed + 1)
        for name, matrix in by_file_name(self.matrices).items():
            if name.endswith(".kernel_projection"):
                matrix.zero_()
        for name, vector in by_file_name(self.vectors).items():
            vector.zero_()
            if name.endswith(".base_kernel"):
                vector[:, 0] = 1.0
            elif name == _PREDECESSOR:  # if both factors were zero, neither would have a gradient
                vector.copy_(torch.randn(vector.shape, generator=generator))

    def _functions(self, prefix: str, weights: Mapping[str, Tensor]) -> LayerFunctions:
        around_attention, around_mlp = (
            (weights[f"{prefix}{name}.base_kernel"], weights[f"{prefix}{name}.kernel_projection.weight"])
            for name in CONVOLUTIONS
        )
        return self._convolved_halves.of(around_attention, around_mlp, self._recipe.draft_tokens + 1)

    def draft_logits(self, logits: Tensor, states: Tensor, previous: Tensor) -> Tensor:
        weights = self.weights()
        successor = weights[_SUCCESSOR]
        return candidate_logits(
            self._selector,
            logits,
            weights[_PREDECESSOR][previous],
            linear(states.float(), weights[_PROJECTION]),
            lambda candidates: successor[candidates],
        )

    def selection_loss(
        self, step: int, states: Tensor, labels: Tensor, previous: Tensor, weights: Tensor
    ) -> Tensor | None:
        """Return the cross-entropy over the candidates. A right token that is no candidate replaces the weakest one.

        Scores of the output matrix are constants here, since that matrix is trained by its own loss.
        """
        total = states.new_zeros((), dtype=torch.float32)
        named, output = self.weights(), self.output(step).to(states.dtype)
        for begin in range(0, len(states), _CHUNK):
            part = slice(begin, begin + _CHUNK)
            label = labels[part].clamp(min=0)
            with torch.no_grad():
                logits = linear(states[part], output).float()
                best, candidates = logits.topk(min(self._selector.candidates, logits.shape[-1]), dim=-1)
                is_label = candidates == label.unsqueeze(-1)
                is_missing = ~is_label.any(-1)
                candidates[:, -1] = torch.where(is_missing, label, candidates[:, -1])
                best[:, -1] = torch.where(
                    is_missing, logits.gather(-1, label.unsqueeze(-1))[:, 0], best[:, -1]
                )
                place = torch.where(is_missing, candidates.shape[-1] - 1, is_label.int().argmax(-1))
            pair = named[_PREDECESSOR][previous[part]] * linear(states[part].float(), named[_PROJECTION])
            scores = best + torch.einsum("pr,pcr->pc", pair, named[_SUCCESSOR][candidates])
            total = total + (cross_entropy(scores, place, reduction="none") * weights[part]).sum()
        return total

    def weights(self) -> dict[str, nn.Parameter]:
        return super().weights() | by_file_name(self.vectors)

    def files(self, checkpoint: Checkpoint, draft_tokens: int) -> LearnedFiles:
        files, recipe = super().files(checkpoint, draft_tokens), self._recipe
        assert isinstance(recipe, DFlash2Recipe)
        settings = {
            "architectures": ["DFlash2Speculator"],
            "conv_kernel_size": TAPS,
            "conv_group_size": self._group,
            "selector_rank": recipe.selector_rank,
            "selector_top_k": recipe.candidates,
        }
        return replace(files, config=files.config | settings)


Convolution = tuple[Tensor, Tensor]
"""Base kernel and projection of the two convolutions around attention or an MLP."""


class ConvolvedHalves:
    """Creates the functions of layers with convolutions, which are compiled once for all layers."""

    def __init__(self, *, compiled: bool) -> None:
        self.before = compiled_for_training(convolved_before, compiled)
        self.after = compiled_for_training(convolved_after, compiled)

    def of(self, around_attention: Convolution, around_mlp: Convolution, slots: int) -> LayerFunctions:
        """Return the functions of a layer with these convolutions, in blocks of `slots` rows."""
        return _ConvolvedLayer(self, around_attention, around_mlp, slots)


@dataclass(frozen=True)
class _ConvolvedLayer:
    """The functions of one layer."""

    halves: ConvolvedHalves
    around_attention: Convolution
    around_mlp: Convolution
    slots: int  # rows of a block

    def before(
        self, stream: Tensor, cos: Tensor, sin: Tensor, tensors: LayerTensors, sizes: Sizes, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        return self.halves.before(stream, cos, sin, tensors, sizes, eps, self.around_attention, self.slots)

    def after(self, stream: Tensor, attended: Tensor, tensors: LayerTensors, eps: float) -> Tensor:
        return self.halves.after(
            stream, attended, tensors, eps, self.around_attention, self.around_mlp, self.slots
        )


def convolved_before(
    stream: Tensor,
    cos: Tensor,
    sin: Tensor,
    tensors: LayerTensors,
    sizes: Sizes,
    eps: float,
    convolution: Convolution,
    slots: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the result of `before_attention` for a convolved input. Rows are ordered by slot, then by block."""
    normed, weights = _normed_and_weights(stream, tensors[0], eps, convolution)
    return project_heads(_convolved(normed, weights, 0, slots), cos, sin, tensors, sizes, eps)


def convolved_after(
    stream: Tensor,
    attended: Tensor,
    tensors: LayerTensors,
    eps: float,
    around_attention: Convolution,
    around_mlp: Convolution,
    slots: int,
) -> Tensor:
    """Return the result of `after_attention`, with convolved inputs and outputs."""
    _, weights = _normed_and_weights(stream, tensors[0], eps, around_attention)
    stream = stream + _convolved(attention_output(attended, tensors), weights, 1, slots)
    mlp_norm = tensors[7]  # order of `layer_tensors`
    normed, weights = _normed_and_weights(stream, mlp_norm, eps, around_mlp)
    return stream + _convolved(mlp_output(_convolved(normed, weights, 0, slots), tensors), weights, 1, slots)


def _normed_and_weights(
    stream: Tensor, norm: Tensor | None, eps: float, convolution: Convolution
) -> tuple[Tensor, Tensor]:
    """Return the normed input of attention or MLP, and the weights of its convolutions."""
    assert norm is not None
    base, projection = convolution
    normed = rms_norm(stream, norm, eps)
    return normed, convolution_weights(base, linear(normed, projection))


def _convolved(x: Tensor, weights: Tensor, side: int, slots: int) -> Tensor:
    """Return the convolved rows; row r is at slot r // number of blocks."""
    blocks = len(x) // slots
    return convolve(x, weights, side, torch.arange(len(x), device=x.device) // blocks, stride=blocks)
