"""From a model's name to a decoder and its tokenizer."""

from collections.abc import Callable
from dataclasses import dataclass, field

from foreword.acceptance.params import SamplingDefaults, check_generation_config
from foreword.backends.choice import choose_backend, fitted, parallel_backend, pick_device
from foreword.backends.interface import Decoder
from foreword.backends.loading import DecoderLoader, load_on_ranks
from foreword.backends.parallel.decoder import TensorParallelDecoder
from foreword.backends.torch.quiet import hush_bfloat16
from foreword.drafters.config import SpeculationConfig
from foreword.drafters.registry import DrafterResources
from foreword.engine.drafting.default_speculation import (
    SpeculationChoice,
    SpeculationOption,
    choose_speculation,
)
from foreword.engine.text import Vocabulary
from foreword.errors import CheckpointError, RequestError
from foreword.models.formats.checkpoint import Checkpoint, open_checkpoint
from foreword.models.heads.shipped import find_head
from foreword.models.sources.builtin import card_sampling
from foreword.models.sources.resolve import resolve_model
from foreword.models.tokenization.tokenizer import Tokenizer
from foreword.progress import Progress
from foreword.speculation.drafting import Drafter


def sampling_defaults(checkpoint: Checkpoint, generation_config: str = "auto") -> SamplingDefaults:
    """The model's own, from its files or, for a built-in model, from its makers' card."""
    check_generation_config(generation_config)
    if generation_config == "none":
        return SamplingDefaults()
    defaults = SamplingDefaults(checkpoint.sampling_defaults() or card_sampling(checkpoint.path))
    try:
        defaults.params()
    except RequestError as error:
        raise CheckpointError(
            f"{checkpoint.path}: the model's own sampling parameters cannot be used: {error}; "
            "leave them out with --generation-config none"
        ) from None
    return defaults


@dataclass(frozen=True)
class LoadedModel:
    """A decoder, the tokenizer that belongs to it, and what they were made from."""

    decoder: Decoder
    tokenizer: Tokenizer
    checkpoint: Checkpoint
    loader: DecoderLoader
    sampling: SamplingDefaults = field(default_factory=SamplingDefaults)  # of requests that don't say

    @property
    def vocab_size(self) -> int:
        """Ids that can be drawn: the tokenizer's. The embedding may have more rows, which stand for nothing."""
        return min(self.tokenizer.vocab_size, self.decoder.config.vocab_size)

    def vocabulary(self) -> Vocabulary:
        """What an engine has to know about its tokens."""
        return Vocabulary(self.vocab_size, frozenset(self.tokenizer.eos_ids), self.tokenizer)

    def when_lost(self, tell: Callable[[str], None]) -> None:
        """Call `tell`, in any thread, with the reason when a rank of the model has died."""
        if isinstance(self.decoder, TensorParallelDecoder):
            self.decoder.when_lost(tell)

    def close(self) -> None:
        """End the processes that the model runs in beside this one."""
        if isinstance(self.decoder, TensorParallelDecoder):
            self.decoder.close()

    def build_drafter(self, wanted: SpeculationConfig) -> Drafter:
        """A drafter for this model."""
        return wanted.build(self.resources())

    def drafter_builder(self) -> Callable[[SpeculationConfig], Drafter]:
        """Makes the drafters of one engine, which share their connections to draft nodes."""
        resources = self.resources()
        return lambda wanted: wanted.build(resources)

    def choose_speculation(
        self, setting: SpeculationOption, acceptance_rule: str = "coupled"
    ) -> SpeculationChoice:
        """Return what a setting means for this model on its backend."""
        head = find_head(self.checkpoint, self.tokenizer)
        return choose_speculation(setting, self.decoder.is_shape_invariant, acceptance_rule, head)

    def resources(self) -> DrafterResources:
        """What drafters for this model may be made from."""

        def encode(text: str) -> list[int]:
            return self.tokenizer.encode(text, add_special_tokens=False)

        return DrafterResources(
            self.decoder,
            self.checkpoint,
            encode,
            self.loader.load,
            self.vocab_size,
        )


def load_model(
    model: str,
    *,
    dtype: str = "auto",
    device: str = "auto",
    backend: str = "auto",
    generation_config: str = "auto",
    tensor_parallel_size: int = 1,
    enforce_eager: bool = False,
    progress: Progress | None = None,
) -> LoadedModel:
    """Load a model by built-in name, local path or hub id."""
    check_generation_config(generation_config)
    place = pick_device(device)
    backend = parallel_backend(backend, tensor_parallel_size)
    choice = choose_backend(backend, dtype, place)
    hush_bfloat16()
    checkpoint = open_checkpoint(resolve_model(model))
    tokenizer, sampling = checkpoint.tokenizer(), sampling_defaults(checkpoint, generation_config)
    fitting = fitted(choice, checkpoint.config, backend=backend, dtype=dtype, device=place)
    loader = DecoderLoader(fitting, place, enforce_eager)
    if tensor_parallel_size == 1:
        decoder: Decoder = loader.load(checkpoint, progress)
    else:
        decoder = load_on_ranks(loader, checkpoint, tensor_parallel_size, progress)
    checkpoint.release()  # the weights are copied; the file's pages need not stay
    return LoadedModel(decoder, tokenizer, checkpoint, loader, sampling)
