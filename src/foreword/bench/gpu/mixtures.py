"""Which part of a mixture's weights a pass reads and multiplies with."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from statistics import mean
from typing import Protocol, runtime_checkable

from torch import Tensor

from foreword.backends.interface import Decoder
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


def idle_numbers(decoder: Decoder, experts: float | None = None) -> float:
    """Weights of experts that are not among the `experts` of a layer; None: among those that one token takes."""
    layers = [layer.mlp.experts for layer in decoder.config.layers if layer.mlp.experts is not None]
    width = 3 * decoder.config.hidden_size
    return sum(
        (spec.count - (spec.per_token if experts is None else experts)) * spec.size * width for spec in layers
    )
