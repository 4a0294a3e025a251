"""Loads a decoder and its tokenizer by model name."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypedDict

from foreword.acceptance.params import SamplingDefaults, check_generation_config
from foreword.backends.choice import choose_backend, parallel_backend, pick_device
from foreword.backends.interface import Decoder
from foreword.backends.loading import DecoderLoader, load_on_ranks
from foreword.backends.parallel.decoder import TensorParallelDecoder
from foreword.backends.torch.decoder import silence_bfloat16_warning
from foreword.drafters.config import SpeculationConfig
from foreword.drafters.registry import DrafterResources
from foreword.engine.drafting.default_speculation import (
    SpeculationChoice,
    SpeculationOption,
    choose_speculation,
)
from foreword.engine.text import Vocabulary
from foreword.errors import CheckpointError, RequestError
from foreword.kv.spare_rows import SpareRows
from foreword.models.formats.checkpoint import Checkpoint, open_checkpoint
from foreword.models.heads.shipped import find_head
from foreword.models.sources.builtin import card_sampling
from foreword.models.sources.resolve import resolve_model
from foreword.models.tokenization.tokenizer import Tokenizer
from foreword.progress import Progress
from foreword.speculation.drafting import Drafter


def sampling_defaults(checkpoint: Checkpoint, generation_config: str = "auto") -> SamplingDefaults:
    """Return the model's recommended sampling parameters, from its files or, for a built-in model, its model card."""
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
    """A decoder, its tokenizer, and their sources."""

    decoder: Decoder
    tokenizer: Tokenizer
    checkpoint: Checkpoint
    loader: DecoderLoader
    # Parameters of requests that give none
    sampling: SamplingDefaults = field(default_factory=SamplingDefaults)

    @property
    def vocab_size(self) -> int:
        """Number of ids that can be sampled; the embedding may have more rows, as padding."""
        return min(self.tokenizer.vocab_size, self.decoder.config.vocab_size)

    def vocabulary(self) -> Vocabulary:
        """Return the token ids and their texts, for an engine."""
        return Vocabulary(self.vocab_size, frozenset(self.tokenizer.eos_ids), self.tokenizer)

    def when_lost(self, callback: Callable[[str], None]) -> None:
        """Call `callback`, in any thread, with the reason when a rank of the model dies."""
        if isinstance(self.decoder, TensorParallelDecoder):
            self.decoder.when_lost(callback)

    def close(self) -> None:
        """End the processes of other ranks."""
        if isinstance(self.decoder, TensorParallelDecoder):
            self.decoder.close()

    def build_drafter(self, config: SpeculationConfig) -> Drafter:
        """Return a new drafter with its own connections to draft nodes."""
        return config.build(self.resources())

    def drafter_builder(self, spare_rows: SpareRows | None = None) -> Callable[[SpeculationConfig], Drafter]:
        """Return a factory whose drafters share their connections to draft nodes, and an engine's spare KV rows."""
        resources = replace(self.resources(), spare_rows=spare_rows or SpareRows())
        return lambda config: config.build(resources)

    def choose_speculation(
        self, setting: SpeculationOption, acceptance_rule: str = "coupled"
    ) -> SpeculationChoice:
        """Resolve a `speculation` setting for this model and backend."""
        head = find_head(self.checkpoint, self.tokenizer)
        return choose_speculation(setting, self.decoder.is_shape_invariant, acceptance_rule, head)

    def resources(self) -> DrafterResources:
        """Return the decoder, files and loader that drafters are created from."""

        def encode(text: str) -> list[int]:
            return self.tokenizer.encode(text, add_special_tokens=False)

        return DrafterResources(self.decoder, self.checkpoint, encode, self.loader.load, self.vocab_size)


class LoadOptions(TypedDict, total=False):
    """Keyword arguments of `load_model` that `LLM` and `Engine.load` pass on."""

    dtype: str
    device: str
    backend: str
    quantization: str
    kv_cache_dtype: str
    generation_config: str
    tensor_parallel_size: int
    progress: Progress | None


def load_model(  # noqa: PLR0913 - vLLM's names
    model: str,
    *,
    dtype: str = "auto",
    device: str = "auto",
    backend: str = "auto",
    quantization: str = "auto",
    kv_cache_dtype: str = "auto",
    generation_config: str = "auto",
    tensor_parallel_size: int = 1,
    enforce_eager: bool = False,
    progress: Progress | None = None,
) -> LoadedModel:
    """Load a model by built-in name, local path or hub id."""
    check_generation_config(generation_config)
    torch_device = pick_device(device)
    backend = parallel_backend(backend, tensor_parallel_size)
    choice = choose_backend(backend, dtype, torch_device, quantization, kv_cache_dtype)
    silence_bfloat16_warning()
    checkpoint = open_checkpoint(resolve_model(model))
    tokenizer, sampling = checkpoint.tokenizer(), sampling_defaults(checkpoint, generation_config)
    loader = DecoderLoader(choice, torch_device, enforce_eager)
    if tensor_parallel_size == 1:
        decoder: Decoder = loader.load(checkpoint, progress)
    else:
        decoder = load_on_ranks(loader, checkpoint, tensor_parallel_size, progress)
    checkpoint.release()  # the weights are copied; release the file mapping
    return LoadedModel(decoder, tokenizer, checkpoint, loader, sampling)
