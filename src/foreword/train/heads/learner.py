"""Defines the interface of trainable drafters for the training loop, and draft vocabularies."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from foreword.errors import RequestError
from foreword.models.config import ModelConfig
from foreword.models.formats.checkpoint import Checkpoint
from foreword.models.heads.files import expanded
from foreword.models.heads.writing import GROUP, rounded_levels
from foreword.train.passes.packing import PackedBatch, sample_batch
from foreword.train.passes.target import Features, FrozenTarget
from foreword.train.texts.documents import Document


@dataclass(frozen=True)
class HeadVocabulary:
    """A draft vocabulary: the target's tokens that a head has outputs for."""

    token_ids: Tensor  # int64 [draft vocabulary], the target's token ids, ascending
    draft_ids: Tensor  # int64 [target vocabulary], each token's index in `token_ids`; -1: it has none
    coverage: float  # fraction of the tokens of all answers that are in the draft vocabulary

    @staticmethod
    def of(token_ids: Tensor, vocab_size: int, coverage: float) -> "HeadVocabulary":
        """Return a draft vocabulary of these tokens of a target with `vocab_size` tokens."""
        draft_ids = torch.full((vocab_size,), -1, dtype=torch.int64, device=token_ids.device)
        draft_ids[token_ids] = torch.arange(len(token_ids), device=token_ids.device)
        return HeadVocabulary(token_ids, draft_ids, coverage)

    def to(self, device: torch.device) -> "HeadVocabulary":
        return HeadVocabulary(self.token_ids.to(device), self.draft_ids.to(device), self.coverage)


def full_vocabulary(vocab_size: int) -> HeadVocabulary:
    """Return a draft vocabulary of all the target's tokens."""
    return HeadVocabulary.of(torch.arange(vocab_size), vocab_size, 1.0)


def vocabulary_tensors(vocabulary: HeadVocabulary) -> dict[str, Tensor]:
    """Return the tensors `d2t` and `t2d` for a head file; none if the draft vocabulary is the whole vocabulary."""
    token_ids = vocabulary.token_ids.cpu()
    if len(token_ids) == len(vocabulary.draft_ids):
        return {}
    return {"d2t": token_ids - torch.arange(len(token_ids)), "t2d": (vocabulary.draft_ids >= 0).cpu()}


def stored_vocabulary(tensors: Mapping[str, Tensor], vocab_size: int) -> HeadVocabulary:
    """Return the draft vocabulary stored in a head file, whose coverage is unknown and set to 1."""
    if "token_map" in tensors:
        return HeadVocabulary.of(tensors["token_map"].long(), vocab_size, 1.0)
    if "d2t" in tensors:
        offsets = tensors["d2t"].long()
        return HeadVocabulary.of(offsets + torch.arange(len(offsets)), vocab_size, 1.0)
    return full_vocabulary(vocab_size)


def choose_vocabulary(documents: Sequence[Document], size: int, vocab_size: int) -> HeadVocabulary:
    """Return a vocabulary of the `size` most frequent tokens of all answers; ties prefer lower ids."""
    counts = np.zeros(vocab_size, np.int64)
    for document in documents:
        np.add.at(counts, document.tokens[document.is_answer], 1)
    order = np.argsort(-counts, kind="stable")[: min(size, vocab_size)]
    coverage = float(counts[order].sum() / max(counts.sum(), 1))
    return HeadVocabulary.of(torch.from_numpy(np.sort(order)), vocab_size, coverage)


@dataclass(frozen=True)
class LearnedFiles:
    """Contents of the output directory; config.json is written last."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    texts: dict[str, str] = field(default_factory=dict)  # other files by name
    borrowed: frozenset[str] = frozenset()  # tensors of the target, which exported pieces omit


class Learner(nn.Module, ABC):
    """Trainable weights that draft for a frozen target.

    Draft token s of a tail row is trained to equal `batch.predicted(s)`. `steps` returns states, from which the output
    matrix computes logits. Weights are float32. A pass casts them to the target's dtype once.
    """

    matrices: nn.ParameterDict  # optimised by Muon; all other parameters by AdamW
    round_bits: int | None = None  # a pass uses matrices rounded to these bits; None: not rounded

    def __init__(self, target: FrozenTarget, vocabulary: HeadVocabulary, taps: Sequence[int] = ()) -> None:
        super().__init__()
        self.target = target
        self.vocabulary = vocabulary.to(target.device)
        self.taps = tuple(taps)

    @abstractmethod
    def begin(self, documents: Sequence[Document], seed: int) -> None:
        """Initialise the weights; `documents` are the training texts, for statistics of tokens and states."""

    @abstractmethod
    def steps(self, batch: PackedBatch, features: Features, count: int) -> Iterator[Tensor]:
        """Yield, for each of the first `count` draft tokens, the states [tails, hidden] for the output matrix."""

    @abstractmethod
    def output(self, step: int) -> Tensor:
        """Return the output matrix [vocabulary, hidden] of a draft token."""

    def draft_logits(self, logits: Tensor, states: Tensor, previous: Tensor) -> Tensor:
        """Return the logits that draft tokens are chosen by, given those of the output matrix.

        `previous` [rows] are the target's ids of the tokens before the draft tokens.
        """
        return logits

    def selection_loss(
        self, step: int, states: Tensor, labels: Tensor, previous: Tensor, weights: Tensor
    ) -> Tensor | None:
        """Return the loss of a choice among the best tokens, besides that of the output matrix; None: there is none.

        `labels` [rows] are the right draft tokens, -1 where the draft vocabulary lacks them, which `weights` ignore.
        """
        return None

    def loss_steps(self, depth: int) -> int:
        """Return how many of `depth` draft tokens have a loss of their own."""
        return depth

    @abstractmethod
    def weights(self) -> dict[str, nn.Parameter]:
        """Return all trainable weights by file name."""

    @torch.no_grad()
    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Set the weights from the tensors of a file, by file name."""
        for name, parameter in self.weights().items():
            tensor = tensors.get(name)
            if tensor is None or tensor.shape != parameter.shape:
                raise RequestError(
                    f"the initial weights have no {name} of shape {tuple(parameter.shape)}; "
                    "give weights of this shape"
                )
            parameter.copy_(tensor)
            if (scale := self.file_scale(name)) is not None:
                parameter.div_(scale)

    def file_tensors(self) -> dict[str, Tensor]:
        """Return the weights as files store them, by file name."""
        scaled = ((name, tensor, self.file_scale(name)) for name, tensor in self.weights().items())
        return {name: stored(tensor if scale is None else tensor * scale) for name, tensor, scale in scaled}

    def file_scale(self, name: str) -> Tensor | None:
        """Return the factor by which a weight is multiplied in files; None: 1."""
        return None

    @abstractmethod
    def files(self, checkpoint: Checkpoint, draft_tokens: int) -> LearnedFiles:
        """Return the files of the trained drafter; `draft_tokens` is the recommended number per draft."""

    def other_parameters(self) -> list[nn.Parameter]:
        """Return the trained parameters that are not in `matrices`."""
        matrices = {id(matrix) for matrix in self.matrices.values()}
        trained = (parameter for parameter in self.parameters() if parameter.requires_grad)
        return [parameter for parameter in trained if id(parameter) not in matrices]


def parameters_by_name(tensors: Mapping[str, Tensor]) -> nn.ParameterDict:
    """Return trainable parameters; dots in names become slashes, since torch does not allow dots."""
    return nn.ParameterDict({name.replace(".", "/"): nn.Parameter(value) for name, value in tensors.items()})


def by_file_name(*groups: nn.ParameterDict) -> dict[str, nn.Parameter]:
    """Return the parameters of these groups with dots in their names."""
    return {key.replace("/", "."): value for group in groups for key, value in group.items()}


class TapsHead(Learner):
    """A head on the target's tapped states, with its own output matrix over the draft vocabulary."""

    tap_scales: Tensor

    def __init__(
        self,
        target: FrozenTarget,
        vocabulary: HeadVocabulary,
        taps: Sequence[int],
        shapes: Mapping[str, tuple[int, int]],
        widths: Mapping[str, int],
        *,
        own_output: bool = True,
    ) -> None:
        """Create matrices of these shapes and norms of these widths; without `own_output`, use the target's matrix."""
        super().__init__(target, vocabulary, taps)
        self.matrices = parameters_by_name({name: torch.empty(shape) for name, shape in shapes.items()})
        self.norms = parameters_by_name({name: torch.ones(width) for name, width in widths.items()})
        rows = target.weights.head[self.vocabulary.token_ids]
        self.lm_head = nn.Parameter(rows.float() if own_output else rows, requires_grad=own_output)
        self.register_buffer("tap_scales", torch.ones(len(self.taps)))

    @torch.no_grad()
    def begin(self, documents: Sequence[Document], seed: int) -> None:
        """Draw small random matrices, still smaller ones for outputs into the residual stream; set the tap scales."""
        generator = torch.Generator().manual_seed(seed)
        for name, matrix in self.matrices.items():
            matrix.copy_(torch.randn(matrix.shape, generator=generator) * (0.5 / matrix.shape[1] ** 0.5))
            if name.endswith(("o_proj", "down_proj")):
                matrix.mul_(0.1)
        self.norms["norm"].copy_(self.target.weights.final_norm)
        taps = self.target.features(sample_batch(documents, self.target.device), self.taps).taps
        # Scale all taps to a similar size, so that the optimiser treats them alike. The median is used because a few
        # tokens (above all a text's first) have states a hundred times larger.
        sizes = [tap.float().pow(2).mean(-1).sqrt().median() for tap in taps]
        self.tap_scales.copy_(1 / torch.stack(sizes).clamp(min=1e-6))

    def file_scale(self, name: str) -> Tensor | None:
        """Return the tap scales for the matrix `fc`: in training they multiply its input, in files its columns."""
        return self._tap_columns() if name == "fc.weight" else None

    def _tap_columns(self) -> Tensor:
        """Return the tap scale of each input column of the projection."""
        return self.tap_scales.repeat_interleave(self.target.config.hidden_size)

    def scaled_taps(self, features: Features) -> Tensor:
        """Return the scaled taps, [rows, taps * hidden]."""
        taps = torch.cat(features.taps, dim=-1)
        return taps * self._tap_columns().to(taps.dtype)

    def output(self, step: int) -> Tensor:
        return self.lm_head


class Recipe(Protocol):
    """Shape of a learner: a frozen dataclass of plain values, which is saved with the training state."""

    method: ClassVar[str]

    @property
    def draft_vocab(self) -> int | None:
        """Size of the draft vocabulary, which has the most frequent tokens; None: all tokens."""

    def check(self, target: ModelConfig) -> None:
        """Raise `RequestError` for a shape that does not fit the target."""

    def build(self, target: FrozenTarget, vocabulary: HeadVocabulary, compiled: bool = False) -> Learner:
        """Create an uninitialised learner on the target's device."""


@dataclass(frozen=True)
class TapsRecipe:
    """Shape that all heads on tapped states have; sizes that are None are the target's."""

    draft_vocab: int = 16384
    taps: tuple[int, ...] | None = None  # None: the method's own choice
    intermediate: int | None = None  # width of the MLP
    window: int | None = None  # newest positions that a draft attends to; None: all

    def check(self, target: ModelConfig) -> None:
        if wrong := [tap for tap in self.taps or () if not 0 <= tap <= target.num_layers]:
            raise RequestError(f"--taps must be within 0 .. {target.num_layers}, not {wrong[0]}")


def rounded_through(matrix: Tensor, bits: int) -> Tensor:
    """Return the matrix with the values that a file of `bits` bits would store; gradients ignore the rounding."""
    rounded = expanded(*rounded_levels(matrix.detach(), bits), GROUP)
    return matrix + (rounded - matrix.detach())


def stored(tensor: Tensor) -> Tensor:
    """Return a tensor as files store it: bfloat16 on the CPU."""
    return tensor.detach().to(torch.bfloat16).cpu().contiguous()
