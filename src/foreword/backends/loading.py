"""Loads a checkpoint into a decoder on the chosen backend."""

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
    """Return whether decoders on this backend are shape-invariant, see `Decoder.is_shape_invariant`."""
    return choice.name != "torch"


def decoder_of(
    choice: BackendChoice, config: ModelConfig, weights: DecoderWeights[Any], *, enforce_eager: bool = False
) -> Decoder:
    """Return a decoder of the torch or the CUDA backend with these weights."""
    if choice.name == "torch":
        return TorchDecoder(config, weights)
    from foreword.backends.cuda.decoder import CudaDecoder  # imports Triton

    return CudaDecoder(
        config,
        weights,
        enforce_eager=enforce_eager,
        packs_kv=choice.kv_cache_dtype == "fp8",
        quantization=choice.quantization,
    )


def start_compiling(choice: BackendChoice, device: torch.device) -> None:
    """Start the compiler of CUDA kernels if needed, so that it is ready when the weights are loaded."""
    from foreword.backends.cuda.compiling import kernels_of  # imports Triton

    kernels_of(device).start_early(choice.torch_dtype)


@dataclass(frozen=True)
class DecoderLoader:
    """Loads decoders of a target and its drafters on one backend."""

    choice: BackendChoice
    device: torch.device
    enforce_eager: bool = False  # no CUDA graphs

    def load(self, checkpoint: Checkpoint, progress: Progress | None = None) -> Decoder:
        """Load a checkpoint in the chosen number format. Refuse unsupported models before reading weights."""
        require_supported(checkpoint.config)
        if self.choice.form is not None:
            return load_cpu_decoder(checkpoint, self.choice.form, progress=progress)
        weights: DecoderWeights[Any]
        if self.choice.name == "torch":
            weights = load_weights(checkpoint, self.choice.torch_dtype, self.device, progress)
        else:
            from foreword.backends.cuda.packing import load_packed  # imports Triton

            start_compiling(self.choice, self.device)
            weights = load_packed(checkpoint, self.choice, self.device, progress)
        return decoder_of(self.choice, checkpoint.config, weights, enforce_eager=self.enforce_eager)


def load_on_ranks(
    loader: DecoderLoader, checkpoint: ModelFile, ranks: int, progress: Progress | None = None
) -> TensorParallelDecoder:
    """Start worker processes and load a decoder on several ranks, of which this process is the first."""
    require_supported(checkpoint.config)
    check_size(checkpoint.config, ranks)
    workers = Workers(ranks, loader.device)
    try:
        return load_parallel(checkpoint, workers, loader.choice.torch_dtype, progress)
    except BaseException:
        workers.close()
        raise
