"""From a checkpoint to a decoder on the chosen backend."""

from dataclasses import dataclass

import torch

from foreword.backends.choice import BackendChoice
from foreword.backends.cpu.decoder import CpuDecoder, load_cpu_decoder
from foreword.backends.interface import Decoder
from foreword.backends.torch.decoder import TorchDecoder, load_torch_decoder
from foreword.models.formats.checkpoint import Checkpoint
from foreword.progress import Progress


def is_shape_invariant(choice: BackendChoice) -> bool:
    """Whether the decoder that would be loaded is; see `Decoder.is_shape_invariant`."""
    return (TorchDecoder if choice.form is None else CpuDecoder).is_shape_invariant


@dataclass(frozen=True)
class DecoderLoader:
    """Loads decoders on one backend; a target and its drafters share it."""

    choice: BackendChoice
    device: torch.device

    def load(self, checkpoint: Checkpoint, progress: Progress | None = None) -> Decoder:
        """A decoder with the checkpoint's weights, in the target's numbers."""
        if self.choice.form is not None:
            return load_cpu_decoder(checkpoint, self.choice.form, progress=progress)
        return load_torch_decoder(checkpoint, self.choice.torch_dtype, self.device, progress=progress)
