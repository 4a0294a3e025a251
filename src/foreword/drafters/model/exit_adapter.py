"""A trained exit: layers and a norm that follow some of the target's own."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from foreword.errors import RequestError
from foreword.models.config import ModelConfig
from foreword.models.formats.checkpoint import Checkpoint, QuantizedTensor
from foreword.models.formats.fields import ConfigFields
from foreword.models.formats.hf.checkpoint import HfCheckpoint, read_json_object
from foreword.models.sources.resolve import resolve_model
from foreword.models.tokenization.tokenizer import Tokenizer

_ENDS = frozenset({"model.embed_tokens.weight", "lm_head.weight"})


@dataclass(frozen=True)
class AdapterCheckpoint:
    """The files of an exit; embedding and output matrix are the target's."""

    own: HfCheckpoint
    target: Checkpoint
    exit_layer: int  # layers of the target that run before it

    @property
    def path(self) -> Path:
        return self.own.path

    @property
    def config(self) -> ModelConfig:
        return self.own.config

    def tensor_names(self) -> frozenset[str]:
        return self.own.tensor_names() | (self.target.tensor_names() & _ENDS)

    def load(self, name: str, dtype: torch.dtype) -> Tensor:
        return self._holder(name).load(name, dtype)

    def pieces(self, name: str, dtype: torch.dtype, rows: int) -> Iterator[Tensor]:
        return self._holder(name).pieces(name, dtype, rows)

    def quantized(self, name: str) -> QuantizedTensor | None:
        return self._holder(name).quantized(name)

    def _holder(self, name: str) -> Checkpoint:
        return self.own if name in self.own.tensor_names() else self.target

    def release(self) -> None:
        self.target.release()

    def sampling_defaults(self) -> dict[str, float]:
        return {}

    def tokenizer(self) -> Tokenizer:
        return self.target.tokenizer()


def open_adapter(model: str, target: Checkpoint) -> AdapterCheckpoint:
    """The exit in a directory; one that was trained for a target of another shape is refused."""
    path = resolve_model(model)
    described = read_json_object(path / "config.json", "an exit adapter (`foreword train exit`)")
    fields = ConfigFields(described, str(path / "config.json"))
    layer = fields.count("exit_layer")
    own, config = HfCheckpoint(path), target.config
    same = ("architecture", "vocab_size", "hidden_size", "norm", "tied_embeddings")
    fits = all(getattr(own.config, name) == getattr(config, name) for name in same)
    if not fits or own.config.layer != config.layer or not 1 <= layer < config.num_layers:
        raise RequestError(f"{path} is no exit for this model; train one with `foreword train exit`")
    return AdapterCheckpoint(own, target, layer)
