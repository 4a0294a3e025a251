"""Which part of a mixture's weights a pass reads and multiplies with."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from math import prod
from statistics import mean
from typing import Protocol, runtime_checkable

from torch import Tensor

from foreword.backends.interface import Decoder
from foreword.backends.torch.decoder import DescribedDecoder
from foreword.models.layer_shapes import expected_shapes
from foreword.proofs.passes import CachedRequests
from foreword.speculation.draft import Draft


@runtime_checkable
class ObservedDecoder(Protocol):
    """A decoder that reports the experts of its rows."""

    def observing_experts(self, observe: Callable[[Tensor], None]) -> AbstractContextManager[None]:
        """Call `observe` with the experts of every mixture in the passes within."""
        ...


def experts_read(decoder: Decoder, texts: Sequence[Sequence[int]]) -> float | None:
    """Mean number of distinct experts of a layer in a pass over the newest token of each text; None: no mixture."""
    if not isinstance(decoder, ObservedDecoder) or not any(
        layer.mlp.experts for layer in decoder.config.layers
    ):
        return None
    cached, counts = CachedRequests(decoder, texts, 1), list[int]()

    def observe(chosen: Tensor) -> None:
        counts.append(len(set(chosen[: len(texts)].flatten().tolist())))

    with cached.batch([Draft()] * len(texts)) as batch, decoder.observing_experts(observe):
        cached.runner.forward(batch)
    return mean(counts)


def idle_expert_parameters(decoder: Decoder) -> float:
    """Return the number of parameters of experts that one token does not use."""
    layers = [layer.mlp.experts for layer in decoder.config.layers if layer.mlp.experts is not None]
    width = 3 * decoder.config.hidden_size
    return sum((spec.count - spec.per_token) * spec.size * width for spec in layers)


def layer_parameters(decoder: Decoder) -> float:
    """Return the number of parameters of all layers that one token uses, however they are stored."""
    shapes = expected_shapes(decoder.config).items()
    every = sum(prod(shape) for name, shape in shapes if name.startswith("model.layers."))
    return every - idle_expert_parameters(decoder)


def step_bytes(decoder: Decoder, experts: float | None) -> float:
    """Return the bytes of weights that a step reads if it uses this many experts per layer.

    A separate embedding does not count: a step reads few of its rows.
    """
    assert isinstance(decoder, DescribedDecoder)
    weights = decoder.weights
    unread = 0.0 if weights.head is weights.embedding else float(weights.embedding.nbytes)
    for spec, layer in zip(decoder.config.layers, weights.layers, strict=True):
        if spec.mlp.experts is not None and layer.experts is not None and experts is not None:
            held = layer.experts.gate_up.nbytes + layer.experts.down.nbytes
            unread += (1 - experts / spec.mlp.experts.count) * held
    return decoder.weight_bytes - unread
