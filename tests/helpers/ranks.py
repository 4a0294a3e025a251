"""Models on ranks in processes of their own, which take seconds to start: a file of tests shares them."""

from pathlib import Path
from typing import Any

import torch

from foreword.backends.parallel.decoder import TensorParallelDecoder, load_parallel
from foreword.backends.parallel.workers import Workers
from foreword.models.formats.checkpoint import open_checkpoint


class PlantedError(Exception):
    """What tests let fail."""


def start_ranks(size: int = 2) -> Workers:
    return Workers(size, torch.device("cpu"))


def on_ranks(path: Path, workers: Workers) -> TensorParallelDecoder:
    """A model on all of them."""
    return load_parallel(open_checkpoint(path), workers, torch.float32)


def fail_once(decoder: TensorParallelDecoder, layer: int) -> None:
    """The first rank fails in this layer of the next pass."""
    layers: Any = decoder._first_rank._stack.layers
    real = layers.run

    def run(index: int, *rest: Any) -> torch.Tensor:
        if index == layer:
            layers.run = real
            raise PlantedError
        return real(index, *rest)

    layers.run = run
