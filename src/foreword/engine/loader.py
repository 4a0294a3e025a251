"""From a model's name to a decoder and its tokenizer."""

import warnings
from dataclasses import dataclass, field

import torch

from foreword.backends.choice import BackendChoice, choose_backend
from foreword.backends.cpu.decoder import NativeDecoder, load_native_decoder
from foreword.backends.cpu.packing import FORMS
from foreword.backends.interface import Decoder
from foreword.backends.torch.decoder import TorchDecoder
from foreword.backends.torch.weights import load_weights
from foreword.drafters.config import SpeculationConfig
from foreword.drafters.resources import DrafterResources
from foreword.engine.sampling_defaults import SamplingDefaults, check_generation_config, sampling_defaults
from foreword.engine.vocabulary import Vocabulary
from foreword.errors import RequestError
from foreword.models.formats.checkpoint import Checkpoint, open_checkpoint
from foreword.models.sources.resolve import resolve_model
from foreword.models.tokenization.tokenizer import Tokenizer
from foreword.progress import Progress
from foreword.speculation.drafting import Drafter


@dataclass(frozen=True)
class DecoderLoader:
    """Loads decoders on one backend; a target and its drafters share it."""

    choice: BackendChoice
    device: torch.device

    def load(self, checkpoint: Checkpoint, progress: Progress | None = None) -> Decoder:
        """A decoder with the checkpoint's weights, in the target's numbers."""
        if self.choice.form is not None:
            return load_native_decoder(checkpoint, self.choice.form, progress=progress)
        weights = load_weights(checkpoint, self.choice.torch_dtype, self.device, progress)
        return TorchDecoder(checkpoint.config, weights)

    def load_beside(self, checkpoint: Checkpoint, target: Decoder) -> Decoder:
        """A decoder with layers of its own and the target's embedding, head and last norm.

        4-bit blocks stay as they are where the backend has kernels for them.
        """
        if isinstance(target, NativeDecoder):
            return load_native_decoder(checkpoint, FORMS["q4"], ends=target.weights)
        ends = target.weights if isinstance(target, TorchDecoder) else None
        weights = load_weights(checkpoint, self.choice.torch_dtype, self.device, ends=ends)
        return TorchDecoder(checkpoint.config, weights)


@dataclass(frozen=True)
class LoadedModel:
    """A decoder, the tokenizer that belongs to it, and what they were made from."""

    decoder: Decoder
    tokenizer: Tokenizer
    checkpoint: Checkpoint
    loader: DecoderLoader
    sampling: SamplingDefaults = field(default_factory=SamplingDefaults)  # of requests that don't say

    def vocabulary(self) -> Vocabulary:
        """What an engine has to know about its tokens."""
        return Vocabulary(self.decoder.config.vocab_size, frozenset(self.tokenizer.eos_ids), self.tokenizer)

    def build_drafter(self, wanted: SpeculationConfig) -> Drafter:
        """A drafter for this model."""
        return wanted.build(self.resources())

    def resources(self) -> DrafterResources:
        """What drafters for this model may be made from."""

        def encode(text: str) -> list[int]:
            return self.tokenizer.encode(text, add_special_tokens=False)

        return DrafterResources(
            self.decoder, self.checkpoint, encode, self.loader.load, self.loader.load_beside
        )


def load_model(
    model: str,
    *,
    dtype: str = "auto",
    device: str = "auto",
    backend: str = "auto",
    generation_config: str = "auto",
    progress: Progress | None = None,
) -> LoadedModel:
    """Load a model by built-in name, local path or hub id."""
    check_generation_config(generation_config)
    place = pick_device(device)
    choice = choose_backend(backend, dtype, place)
    # Torch tells of a slower path on CPUs without bfloat16 by a page of stack frames.
    warnings.filterwarnings("ignore", message="mkldnn_matmul failed")
    checkpoint = open_checkpoint(resolve_model(model))
    tokenizer, sampling = checkpoint.tokenizer(), sampling_defaults(checkpoint, generation_config)
    loader = DecoderLoader(choice, place)
    decoder = loader.load(checkpoint, progress)
    checkpoint.release()  # the weights are copied; the file's pages need not stay
    return LoadedModel(decoder, tokenizer, checkpoint, loader, sampling)


def is_shape_invariant(choice: BackendChoice) -> bool:
    """Whether the decoder that would be loaded is; see `Decoder.is_shape_invariant`."""
    return (TorchDecoder if choice.form is None else NativeDecoder).is_shape_invariant


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
