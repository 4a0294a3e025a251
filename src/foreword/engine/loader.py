"""From a model's name to a decoder and its tokenizer."""

import warnings
from dataclasses import dataclass

import torch

from foreword.drafters.workshop import Workshop
from foreword.errors import RequestError
from foreword.models.checkpoint import Checkpoint, open_checkpoint
from foreword.models.decoder import TorchDecoder
from foreword.models.interface import Decoder
from foreword.models.sources import resolve_model
from foreword.models.tokenizer import Tokenizer
from foreword.models.weights import Progress, load_weights

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Backend:
    """Where and in which numbers decoders run; a target and its drafters share one."""

    device: torch.device
    dtype: torch.dtype

    def load(self, checkpoint: Checkpoint, progress: Progress | None = None) -> Decoder:
        """A decoder with the checkpoint's weights."""
        return TorchDecoder(checkpoint.config, load_weights(checkpoint, self.dtype, self.device, progress))


@dataclass(frozen=True)
class LoadedModel:
    """A decoder, the tokenizer that belongs to it, and what they were made from."""

    decoder: Decoder
    tokenizer: Tokenizer
    checkpoint: Checkpoint
    backend: Backend

    def workshop(self) -> Workshop:
        """What drafters for this model may be made from."""

        def encode(text: str) -> list[int]:
            return self.tokenizer.encode(text, add_special_tokens=False)

        return Workshop(self.decoder, self.checkpoint, encode, self.backend.load)


def load_model(
    model: str, *, dtype: str = "auto", device: str = "auto", progress: Progress | None = None
) -> LoadedModel:
    """Load a model by built-in name, local path or hub id."""
    place = pick_device(device)
    number_type = pick_dtype(dtype, place)
    # Torch tells of a slower path on CPUs without bfloat16 by a page of stack frames.
    warnings.filterwarnings("ignore", message="mkldnn_matmul failed")
    checkpoint = open_checkpoint(resolve_model(model))
    tokenizer = checkpoint.tokenizer()
    backend = Backend(place, number_type)
    return LoadedModel(backend.load(checkpoint, progress), tokenizer, checkpoint, backend)


def pick_device(device: str) -> torch.device:
    """`auto` is the first CUDA device if there is one, else the CPU."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise RequestError(f"unknown device {device!r}; use auto, cpu or cuda") from error
    if place.type not in ("cpu", "cuda"):
        raise RequestError(f"device {device!r} is not supported; use auto, cpu or cuda")
    if place.type == "cuda" and not torch.cuda.is_available():
        raise RequestError(f"device {device!r} was asked for, but torch sees no CUDA GPU; use cpu")
    return place


def pick_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """`auto` is float32 on the CPU and bfloat16 on a GPU."""
    if dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if dtype not in DTYPES:
        raise RequestError(f"unknown dtype {dtype!r}; use auto, {', '.join(DTYPES)}")
    return DTYPES[dtype]
