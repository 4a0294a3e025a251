"""From a checkpoint to a decoder on the chosen backend."""

from dataclasses import dataclass

import torch

from foreword.backends.choice import BackendChoice
from foreword.backends.cpu.decoder import load_cpu_decoder
from foreword.backends.interface import Decoder
from foreword.backends.torch.decoder import load_torch_decoder
from foreword.backends.torch.weights import load_weights
from foreword.models.formats.checkpoint import Checkpoint
from foreword.progress import Progress


def is_shape_invariant(choice: BackendChoice) -> bool:
    """Whether the decoder that would be loaded is; see `Decoder.is_shape_invariant`."""
    return choice.name != "torch"


@dataclass(frozen=True)
class DecoderLoader:
    """Loads decoders on one backend; a target and its drafters share it."""

    choice: BackendChoice
    device: torch.device

    def load(self, checkpoint: Checkpoint, progress: Progress | None = None) -> Decoder:
        """A decoder with the checkpoint's weights, in the target's numbers."""
        if self.choice.form is not None:
            return load_cpu_decoder(checkpoint, self.choice.form, progress=progress)
        if self.choice.name == "torch":
            return load_torch_decoder(checkpoint, self.choice.torch_dtype, self.device, progress=progress)
        from foreword.backends.cuda.decoder import CudaDecoder  # Triton is there only where it is used

        weights = load_weights(checkpoint, self.choice.torch_dtype, self.device, progress)
        return CudaDecoder(checkpoint.config, weights)
