"""Heads shipped with the package, and the models they were trained for.

A head's target.json has the shape of its target, some tokens and some norms. The same model matches in any file
format, and a similar one does not. A wrong match would cost time, never change a text.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # names are looked up before heavy imports
    from torch import Tensor

    from foreword.models.config import ModelConfig
    from foreword.models.formats.checkpoint import Checkpoint
    from foreword.models.tokenization.tokenizer import Tokenizer

HEADS = Path(__file__).parents[2] / "heads"

NORM_TOLERANCE = 0.01
"""Tolerance relative to the largest weight of a norm; half precision rounds by less than half of it."""

NORMS = ("model.norm.weight", "model.layers.0.input_layernorm.weight")
_TOKENS = 64  # compared ids, spread over the vocabulary


@dataclass(frozen=True)
class ShippedHead:
    """A shipped head."""

    name: str  # name in configurations
    path: Path
    method: str

    @property
    def target(self) -> Mapping[str, Any]:
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
    return next((head for head in shipped_heads() if head.fits(checkpoint, tokenizer)), None)


def head_named(name: str) -> Path | None:
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
    """Return some ids with their bytes in hexadecimal."""
    step = max(1, tokenizer.vocab_size // _TOKENS)
    ids = range(0, tokenizer.vocab_size, step)
    return {str(token): tokenizer.token_bytes(token, skip_special_tokens=False).hex() for token in ids}


def _is_close(checkpoint: "Checkpoint", name: str, expected: list[float]) -> bool:
    found = _norm(checkpoint, name)
    if len(found) != len(expected):
        return False
    wanted = found.new_tensor(expected)
    return bool((found - wanted).abs().max() <= NORM_TOLERANCE * wanted.abs().max())


def _norm(checkpoint: "Checkpoint", name: str) -> "Tensor":
    import torch

    return checkpoint.load(name, torch.float32)


@cache
def _read(path: Path) -> Mapping[str, Any]:
    described: Mapping[str, Any] = json.loads(path.read_text())
    return described
