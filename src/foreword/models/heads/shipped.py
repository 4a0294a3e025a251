"""Heads that come with the package, and which models they were trained for.

Beside a head's own files stands target.json: the shape of its target, some of its tokens, and some of its norms. The
same model gets the head whatever file it comes in, and a model that only looks like it does not. A wrong match
could cost time, never change a text.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # names of heads are looked up before anything heavy is imported
    from torch import Tensor

    from foreword.models.config import ModelConfig
    from foreword.models.formats.checkpoint import Checkpoint
    from foreword.models.tokenization.tokenizer import Tokenizer

HEADS = Path(__file__).parents[2] / "heads"

NORM_TOLERANCE = 0.01
"""Of the largest weight of a norm; half precision rounds by less than half of it."""

NORMS = ("model.norm.weight", "model.layers.0.input_layernorm.weight")
_TOKENS = 64  # ids that are compared, spread over the vocabulary


@dataclass(frozen=True)
class ShippedHead:
    """A head of ours."""

    name: str  # as a configuration may name it
    path: Path
    method: str

    @property
    def target(self) -> Mapping[str, Any]:
        """What target.json says of the model that it was trained for."""
        return _read(self.path / "target.json")

    def fits(self, checkpoint: "Checkpoint", tokenizer: "Tokenizer") -> bool:
        """Whether this is the model that the head was trained for."""
        target = self.target
        if target["shape"] != _shape(checkpoint.config) or target["tokens"] != some_tokens(tokenizer):
            return False
        return all(_is_close(checkpoint, name, norm) for name, norm in target["norms"].items())


@cache
def shipped_heads() -> tuple[ShippedHead, ...]:
    """All that are in the package."""
    paths = sorted(path.parent for path in HEADS.glob("*/target.json"))
    return tuple(ShippedHead(path.name, path, _read(path / "target.json")["method"]) for path in paths)


def find_head(checkpoint: "Checkpoint", tokenizer: "Tokenizer") -> ShippedHead | None:
    """The head that was trained for this model; None if there is none."""
    return next((head for head in shipped_heads() if head.fits(checkpoint, tokenizer)), None)


def head_named(name: str) -> Path | None:
    """Where a shipped head's files are; None if none has the name."""
    return next((head.path for head in shipped_heads() if head.name == name), None)


def describe_target(checkpoint: "Checkpoint", method: str) -> dict[str, Any]:
    """What target.json holds for a head that was trained for this model."""
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
    """Some ids and their bytes in hexadecimal."""
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
