"""Which of a model's layers to keep."""

import re
from collections.abc import Sequence
from itertools import pairwise

from foreword.errors import RequestError
from foreword.models.config import ModelConfig

_RANGE = re.compile(r"\s*(\d{1,6})\s*(?:-\s*(\d{1,6})\s*)?", re.ASCII)


def parse_layers(text: str) -> list[int]:
    """Layer numbers and ranges separated by commas, both ends included: `0-9,20,25-29`."""
    layers: list[int] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        first = int(match[1]) if match else 0
        last = int(match[2] or match[1]) if match else -1
        if last < first:
            raise RequestError(f"layers are numbers and ranges such as 0-9,20-29, not {part.strip()!r}")
        layers.extend(range(first, last + 1))
    return layers


def spread_layers(config: ModelConfig, count: int) -> list[int]:
    """So many layers at even distances; the first is one of them, and if there are several the last too."""
    if not 1 <= count <= config.num_layers:
        raise RequestError(f"from 1 to {config.num_layers} layers of this model can be kept, not {count}")
    steps = max(1, count - 1)
    return [(2 * place * (config.num_layers - 1) + steps) // (2 * steps) for place in range(count)]


def check_layers_of(config: ModelConfig, layers: Sequence[int]) -> None:
    """Refuse layers that the model does not have, or that are not named once and in order."""
    if not layers:
        raise RequestError("at least one layer must be kept")
    outside = [layer for layer in layers if not 0 <= layer < config.num_layers]
    if outside:
        raise RequestError(
            f"there is no layer {outside[0]}: the model has {config.num_layers}, 0 to {config.num_layers - 1}"
        )
    if any(later <= earlier for earlier, later in pairwise(layers)):
        raise RequestError("layers must be named once each, in ascending order")
