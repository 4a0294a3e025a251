"""Weights as the CUDA kernels read them: matrices of layers in 8 bits where the checkpoint or the user has them so."""

from collections.abc import Sequence

import torch

from foreword.backends.choice import BackendChoice
from foreword.backends.cuda.fp8_products import Matrix, rounded_weight
from foreword.backends.cuda.kernels.fp8 import BLOCK, Fp8Weight
from foreword.backends.support import require_supported
from foreword.backends.torch.weights import DecoderWeights, LayerSource, weights_from
from foreword.backends.weight_loader import WeightLoader
from foreword.models.formats.checkpoint import Checkpoint
from foreword.progress import Progress


class RoundedMatrices:
    """A source of tensors whose matrices are rounded to 8 bits one by one, so that no second copy is held."""

    def __init__(self, source: LayerSource) -> None:
        self._source = source
        self.hidden_size = source.hidden_size
        self.tensor, self.floats, self.nothing = source.tensor, source.floats, source.nothing

    def matrix(self, names: Sequence[str]) -> Matrix:
        return _joined([rounded_weight(self._source.tensor(name)) for name in names])


class KeptMatrices(RoundedMatrices):
    """The same for a checkpoint: what is stored in 8 bits stays as it is."""

    def __init__(self, source: WeightLoader, rounds: bool) -> None:
        """With `rounds`, other matrices are rounded."""
        super().__init__(source)
        self._stored, self._count, self._rounds = source.fp8, source.count, rounds

    def matrix(self, names: Sequence[str]) -> Matrix:
        stored = [self._stored(name) for name in names]
        kept = [Fp8Weight(part.values, part.scales, part.in_blocks) for part in stored if part is not None]
        if len(kept) == len(names) and _can_be_joined(kept):
            for _ in names:
                self._count()
            return _joined(kept)
        return super().matrix(names) if self._rounds else self._source.matrix(names)


def _can_be_joined(parts: Sequence[Fp8Weight]) -> bool:
    """Whether all have scales of one kind, and blocks end where matrices do."""
    ends = all(len(part) % BLOCK == 0 for part in parts[:-1])
    return len({part.in_blocks for part in parts}) == 1 and (ends or not parts[0].in_blocks)


def _joined(parts: Sequence[Fp8Weight]) -> Fp8Weight:
    if len(parts) == 1:
        return parts[0]
    # torch cannot join 8-bit floats on every device; bytes it can.
    values = torch.cat([part.values.view(torch.uint8) for part in parts]).view(parts[0].values.dtype)
    return Fp8Weight(values, torch.cat([part.scales for part in parts]), parts[0].in_blocks)


def load_packed(
    checkpoint: Checkpoint, choice: BackendChoice, device: torch.device, progress: Progress | None = None
) -> DecoderWeights[Matrix]:
    """Read a whole decoder; embedding, head and norms are in the choice's numbers."""
    require_supported(checkpoint.config, "cuda")
    loader = WeightLoader(checkpoint, choice.torch_dtype, device, progress)
    if choice.quantization != "fp8":
        return weights_from(loader, checkpoint.config)
    return weights_from(KeptMatrices(loader, rounds=True), checkpoint.config)
