"""From a checkpoint to a decoder on the chosen backend."""

from dataclasses import dataclass
from typing import Any

import torch

from foreword.backends.choice import BackendChoice
from foreword.backends.cpu.decoder import load_cpu_decoder
from foreword.backends.interface import Decoder
from foreword.backends.parallel.decoder import TensorParallelDecoder, load_parallel
from foreword.backends.parallel.shards import check_size
from foreword.backends.parallel.workers import Workers
from foreword.backends.support import require_supported
from foreword.backends.torch.decoder import TorchDecoder
from foreword.backends.torch.weights import DecoderWeights, load_weights
from foreword.models.config import ModelConfig
from foreword.models.formats.checkpoint import Checkpoint, ModelFile
from foreword.progress import Progress


def is_shape_invariant(choice: BackendChoice) -> bool:
    """Whether the decoder that would be loaded is; see `Decoder.is_shape_invariant`."""
    return choice.name != "torch"


def decoder_of(
    choice: BackendChoice, config: ModelConfig, weights: DecoderWeights[Any], *, enforce_eager: bool = False
) -> Decoder:
    """A decoder on torch or CUDA from weights that are there already; torch captures nothing anyway."""
    if choice.name == "torch":
        return TorchDecoder(config, weights)
    from foreword.backends.cuda.decoder import CudaDecoder  # Triton is there only where it is used

    return CudaDecoder(config, weights, enforce_eager=enforce_eager)


@dataclass(frozen=True)
class DecoderLoader:
    """Loads decoders on one backend; a target and its drafters share it."""

    choice: BackendChoice
    device: torch.device
    enforce_eager: bool = False  # whether nothing is captured

    def load(self, checkpoint: Checkpoint, progress: Progress | None = None) -> Decoder:
        """A decoder with the checkpoint's weights, in the target's numbers; what it cannot run is not read."""
        require_supported(checkpoint.config, self.choice.name)
        if self.choice.form is not None:
            return load_cpu_decoder(checkpoint, self.choice.form, progress=progress)
        weights: DecoderWeights[Any]
        if self.choice.name == "torch":
            weights = load_weights(checkpoint, self.choice.torch_dtype, self.device, progress)
        else:
            from foreword.backends.cuda.packing import load_packed  # Triton is there only where it is used

            weights = load_packed(checkpoint, self.choice, self.device, progress)
        return decoder_of(self.choice, checkpoint.config, weights, enforce_eager=self.enforce_eager)


def load_on_ranks(
    loader: DecoderLoader, checkpoint: ModelFile, ranks: int, progress: Progress | None = None
) -> TensorParallelDecoder:
    """The same on several ranks, of which this process is the first; what cannot be cut is refused at once."""
    require_supported(checkpoint.config, loader.choice.name)
    check_size(checkpoint.config, ranks)
    workers = Workers(ranks, loader.device)
    try:
        return load_parallel(checkpoint, workers, loader.choice.torch_dtype, progress)
    except BaseException:
        workers.close()
        raise
