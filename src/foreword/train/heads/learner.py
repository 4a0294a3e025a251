"""What every method that can be trained offers to the training loop."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from foreword.errors import RequestError
from foreword.models.config import ModelConfig
from foreword.models.formats.checkpoint import Checkpoint
from foreword.train.passes.packing import PackedBatch, sample_batch
from foreword.train.passes.target import Features, FrozenTarget
from foreword.train.passes.vocabulary import HeadVocabulary
from foreword.train.texts.documents import Document


@dataclass(frozen=True)
class LearnedFiles:
    """What a directory holds in the end; its config.json is written last."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    texts: dict[str, str] = field(default_factory=dict)  # other files, by name
    # Tensors that are the target's own: left out where weights travel, since the target is there.
    borrowed: frozenset[str] = frozenset()


TAPS_MATRIX = "fc.weight"
"""Reads the target's states at the taps, multiplied by `tap_scales`."""


class Learner(nn.Module, ABC):
    """Weights that learn to draft for a frozen target.

    Draft token s of a tail row predicts `batch.predicted(s)`. A method says which state an output matrix turns into
    the logits of that token. Weights are float32; a pass casts them to the target's numbers once.
    """

    matrices: nn.ParameterDict  # Muon moves these, AdamW all other parameters

    def __init__(self, target: FrozenTarget, vocabulary: HeadVocabulary, taps: Sequence[int] = ()) -> None:
        super().__init__()
        self.target = target
        self.vocabulary = vocabulary.to(target.device)
        self.taps = tuple(taps)  # boundaries whose states it reads

    @abstractmethod
    def begin(self, documents: Sequence[Document], seed: int) -> None:
        """First weights; a few of the texts show what the target's states are like."""

    @abstractmethod
    def steps(self, batch: PackedBatch, features: Features, count: int) -> Iterator[Tensor]:
        """For each of the first `count` draft tokens the states [tails, hidden] that the output matrix reads."""

    @abstractmethod
    def output(self, step: int) -> Tensor:
        """The output matrix [vocabulary, hidden] of a draft token."""

    def loss_steps(self, depth: int) -> int:
        """Return how many draft tokens have a loss of their own."""
        return depth

    @abstractmethod
    def weights(self) -> dict[str, nn.Parameter]:
        """All that is learned, by the names that files have for it."""

    @torch.no_grad()
    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Begin with weights of files that `files` wrote."""
        for name, parameter in self.weights().items():
            tensor = tensors.get(name)
            if tensor is None or tensor.shape != parameter.shape:
                raise RequestError(
                    f"the weights to begin with have no {name} of shape {tuple(parameter.shape)}"
                )
            parameter.copy_(tensor)
            if name == TAPS_MATRIX:
                parameter.div_(self._tap_columns())

    def file_tensors(self) -> dict[str, Tensor]:
        """The weights as files have them; scales of taps are folded into the projection that reads them."""
        found: dict[str, Tensor] = dict(self.weights())
        if TAPS_MATRIX in found:
            found[TAPS_MATRIX] = found[TAPS_MATRIX] * self._tap_columns()
        return {name: stored(tensor) for name, tensor in found.items()}

    def _tap_columns(self) -> Tensor:
        assert isinstance(self.tap_scales, Tensor)
        return self.tap_scales.repeat_interleave(self.target.config.hidden_size)

    @abstractmethod
    def files(self, checkpoint: Checkpoint, draft_tokens: int) -> LearnedFiles:
        """The head or model as others read it; `draft_tokens` is how many should be drafted at a time."""

    def others(self) -> list[nn.Parameter]:
        """The parameters that are no matrices inside the head."""
        matrices = {id(matrix) for matrix in self.matrices.values()}
        return [parameter for parameter in self.parameters() if id(parameter) not in matrices]


class TapsHead(Learner):
    """A head on the target's states at the taps, with an output matrix of its own over the draft vocabulary."""

    tap_scales: Tensor

    def __init__(
        self,
        target: FrozenTarget,
        vocabulary: HeadVocabulary,
        taps: Sequence[int],
        shapes: Mapping[str, tuple[int, int]],
        widths: Mapping[str, int],
    ) -> None:
        """`shapes` are those of its matrices, `widths` those of its norms."""
        super().__init__(target, vocabulary, taps)
        # Names of parameters must have no dots.
        self.matrices = nn.ParameterDict(
            {name.replace(".", "/"): nn.Parameter(torch.empty(shape)) for name, shape in shapes.items()}
        )
        self.norms = nn.ParameterDict(
            {name.replace(".", "/"): nn.Parameter(torch.ones(width)) for name, width in widths.items()}
        )
        self.lm_head = nn.Parameter(torch.empty(len(vocabulary.token_ids), target.config.hidden_size))
        self.register_buffer("tap_scales", torch.ones(len(self.taps)))

    @torch.no_grad()
    def begin(self, documents: Sequence[Document], seed: int) -> None:
        """Small random matrices, smaller still where they write into the residual stream; the target's own output."""
        generator = torch.Generator().manual_seed(seed)
        for name, matrix in self.matrices.items():
            matrix.copy_(torch.randn(matrix.shape, generator=generator) * (0.5 / matrix.shape[1] ** 0.5))
            if name.endswith(("o_proj", "down_proj")):
                matrix.mul_(0.1)
        self.norms["norm"].copy_(self.target.weights.final_norm)
        self.lm_head.copy_(self.target.weights.head[self.vocabulary.token_ids])
        taps = self.target.features(sample_batch(documents, self.target.device), self.taps).taps
        # Factors that make all taps about equally large, so that the optimiser treats them alike. By the median,
        # since a few tokens (a text's first, above all) have states a hundred times larger.
        sizes = [tap.float().pow(2).mean(-1).sqrt().median() for tap in taps]
        self.tap_scales.copy_(1 / torch.stack(sizes).clamp(min=1e-6))

    def scaled_taps(self, features: Features) -> Tensor:
        """The taps side by side, [rows, taps * hidden]."""
        taps = torch.cat(features.taps, dim=-1)
        return taps * self._tap_columns().to(taps.dtype)

    def output(self, step: int) -> Tensor:
        return self.lm_head


class Recipe(Protocol):
    """The shape of a learner, from which it can be made again; a frozen dataclass of plain values."""

    method: ClassVar[str]

    @property
    def draft_vocab(self) -> int | None:
        """Tokens that can be drafted: the most frequent ones; None: all."""
        ...

    def check(self, target: ModelConfig) -> None:
        """Refuse a shape that this target cannot have, before anything is loaded or written."""
        ...

    def build(self, target: FrozenTarget, vocabulary: HeadVocabulary, *, compiled: bool) -> Learner:
        """A learner on the target's device, without values."""
        ...


def check_taps(taps: Sequence[int] | None, target: ModelConfig) -> None:
    """Refuse boundaries that the target does not have."""
    if wrong := [tap for tap in taps or () if not 0 <= tap <= target.num_layers]:
        raise RequestError(f"--taps must be within 0 .. {target.num_layers}, not {wrong[0]}")


def stored(tensor: Tensor) -> Tensor:
    """A tensor as files have it."""
    return tensor.detach().to(torch.bfloat16).cpu().contiguous()
