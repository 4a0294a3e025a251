"""Heads shipped with the package, and the models for which they were trained.

A head's target.json contains sizes of its target, some tokens and the weights of some norms. They match the same model
in any file format, but not a similar model. A wrong match would only cost time, since no drafter changes a text.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # not at run time, since heads must be found by name without importing torch
    from torch import Tensor

    from foreword.models.config import ModelConfig
    from foreword.models.formats.checkpoint import Checkpoint
    from foreword.models.tokenization.tokenizer import Tokenizer

HEADS = Path(__file__).parents[2] / "heads"

NORM_TOLERANCE = 0.01
"""Maximum deviation, relative to the norm's largest weight. Rounding to half precision causes less than half of it."""

NORMS = ("model.norm.weight", "model.layers.0.input_layernorm.weight")
_TOKENS = 64  # number of compared token ids, evenly spaced in the vocabulary


@dataclass(frozen=True)
class ShippedHead:
    """A head that is shipped with the package."""

    name: str  # name in configurations
    path: Path  # its directory
    method: str  # drafting method

    @property
    def target(self) -> Mapping[str, Any]:
        """Contents of target.json."""
        return _read(self.path / "target.json")

    def fits(self, checkpoint: "Checkpoint", tokenizer: "Tokenizer") -> bool:
        """Return whether the head was trained for this model."""
        target = self.target
        if target["shape"] != _shape(checkpoint.config) or target["tokens"] != some_tokens(tokenizer):
            return False
        return all(_is_close(checkpoint, name, norm) for name, norm in target["norms"].items())


@cache
def shipped_heads() -> tuple[ShippedHead, ...]:
    paths = sorted(path.parent for path in HEADS.glob("*/target.json"))
    return tuple(ShippedHead(path.name, path, _read(path / "target.json")["method"]) for path in paths)


def find_head(checkpoint: "Checkpoint", tokenizer: "Tokenizer") -> ShippedHead | None:
    """Return the shipped head that was trained for this model, if any."""
    return next((head for head in shipped_heads() if head.fits(checkpoint, tokenizer)), None)


def head_named(name: str) -> Path | None:
    """Return the directory of the shipped head with this name, if any."""
    return next((head.path for head in shipped_heads() if head.name == name), None)


def describe_target(checkpoint: "Checkpoint", method: str) -> dict[str, Any]:
    """Return the contents of target.json for a head of this model."""
    norms = {name: _norm(checkpoint, name).tolist() for name in NORMS}
    return {
        "method": method,
        "shape": _shape(checkpoint.config),
        "tokens": some_tokens(checkpoint.tokenizer()),
        "norms": {name: [round(number, 5) for number in numbers] for name, numbers in norms.items()},
    }


def _shape(config: "ModelConfig") -> dict[str, int]:
    attention = config.layers[0].attention
    return {
        "hidden_size": config.hidden_size,
        "num_layers": config.num_layers,
        "num_heads": attention.num_heads,
        "num_kv_heads": attention.num_kv_heads,
        "vocab_size": config.vocab_size,
    }


def some_tokens(tokenizer: "Tokenizer") -> dict[str, str]:
    """Return some token ids, evenly spaced in the vocabulary, with their bytes in hexadecimal."""
    step = max(1, tokenizer.vocab_size // _TOKENS)
    ids = range(0, tokenizer.vocab_size, step)
    return {str(token): tokenizer.token_bytes(token, skip_special_tokens=False).hex() for token in ids}


def _is_close(checkpoint: "Checkpoint", name: str, expected: list[float]) -> bool:
    """Return whether the weights of a norm are the expected ones, within `NORM_TOLERANCE`."""
    weights = _norm(checkpoint, name)
    if len(weights) != len(expected):
        return False
    expected_weights = weights.new_tensor(expected)
    difference = (weights - expected_weights).abs().max()
    return bool(difference <= NORM_TOLERANCE * expected_weights.abs().max())


def _norm(checkpoint: "Checkpoint", name: str) -> "Tensor":
    import torch

    return checkpoint.load(name, torch.float32)


@cache
def _read(path: Path) -> Mapping[str, Any]:
    content: Mapping[str, Any] = json.loads(path.read_text())
    return content
