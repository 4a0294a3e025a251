"""Peak rates of a GPU, times of passes, and the bytes of weights that a pass reads."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from math import prod
from statistics import mean, median
from time import perf_counter
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from foreword.backends.interface import Decoder
from foreword.backends.torch.decoder import DescribedDecoder
from foreword.bench.step_cost import random_tokens
from foreword.kv.chunks import CHUNK
from foreword.models.layer_shapes import expected_shapes
from foreword.proofs.passes import CachedRequests, prompt_pass
from foreword.speculation.draft import Draft


def timing_event() -> torch.cuda.Event:
    """Return a CUDA event with timing."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def device_seconds(body: Callable[[], object], repeats: int = 10) -> float:
    """Return the median device seconds of a call of `body`, after one warm-up call."""
    body()
    times = []
    for _ in range(repeats):
        begin, end = timing_event(), timing_event()
        begin.record()
        body()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1000)
    return float(median(times))


_COPIED_BYTES = 4_000_000_000  # far more than the caches hold
_MATRIX_SIZE = 8192  # rows and columns of the timed matrix product


def copy_bandwidth(device: torch.device) -> float:
    """Return the bytes per second that a large copy reads and writes."""
    source = torch.zeros(_COPIED_BYTES // 2, dtype=torch.bfloat16, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / device_seconds(lambda: target.copy_(source))


def read_bandwidth(device: torch.device) -> float:
    """Return the bytes per second that a sum over a large array reads."""
    source = torch.zeros(_COPIED_BYTES // 4, dtype=torch.float32, device=device)
    return source.nbytes / device_seconds(source.sum)


def matrix_rate(device: torch.device) -> float:
    """Return the FLOP/s of a large bf16 matrix product on random numbers."""
    a, b = (torch.randn((_MATRIX_SIZE, _MATRIX_SIZE), device=device).bfloat16() for _ in range(2))
    return 2 * _MATRIX_SIZE**3 / device_seconds(lambda: a @ b)


PASSES = 20  # passes launched before waiting for the device
_REPEATS = 5  # timed launches of all passes, or of a prompt; the median counts


@dataclass(frozen=True)
class PassTime:
    """Times of a pass over `requests` texts with `rows` new tokens each."""

    requests: int
    rows: int
    device_ms: float  # device time of a pass, with many in flight
    host_ms: float  # host time of a launch


def pass_times(decoder: Decoder, context: int, rows: Sequence[int]) -> Iterator[PassTime]:
    """Yield the times of passes over these numbers of tokens: a text's newest token and a chain, with all logits."""
    if (
        decoder.config.recurrent is not None
    ):  # begin early in a chunk, since a draft must end within its chunk
        context += (CHUNK // 2 if max(rows) <= CHUNK // 2 else 1) - context % CHUNK
    cached = CachedRequests(decoder, [random_tokens(context, decoder.config.vocab_size)], max(rows))
    (request,) = cached.requests
    for count in rows:
        device_ms, host_seconds = [], []
        with cached.batch([Draft.chain(request.tokens[: count - 1], len(request.tokens))]) as batch:
            for _ in range(3):  # warm-up
                cached.runner.forward(batch)
            for _ in range(_REPEATS):
                torch.cuda.synchronize()
                begin, end = timing_event(), timing_event()
                began = perf_counter()
                begin.record()
                for _ in range(PASSES):
                    cached.runner.forward(batch)
                end.record()
                host_seconds.append((perf_counter() - began) / PASSES)
                end.synchronize()
                device_ms.append(begin.elapsed_time(end) / PASSES)
        yield PassTime(1, count, median(device_ms), median(host_seconds) * 1e3)


def prompt_seconds(decoder: Decoder, tokens: int) -> float:
    """Return the seconds of a prompt in one pass, with the last token's logits."""
    times = []
    with prompt_pass(decoder, random_tokens(tokens, decoder.config.vocab_size)) as (runner, batch):
        for _ in range(2 + _REPEATS):  # the first two are warm-up
            torch.cuda.synchronize()
            began = perf_counter()
            runner.forward(batch)
            torch.cuda.synchronize()
            times.append(perf_counter() - began)
    return median(times[2:])


def matrix_operations(decoder: Decoder, rows: int) -> float:
    """Return the operations of the layers' matrix products over `rows` tokens; of a mixture, of the active experts."""
    shapes = expected_shapes(decoder.config).items()
    parameters = sum(prod(shape) for name, shape in shapes if name.startswith("model.layers."))
    return 2.0 * rows * (parameters - idle_expert_parameters(decoder))


@runtime_checkable
class ObservedDecoder(Protocol):
    """A decoder that reports the experts of its rows."""

    def observing_experts(self, observe: Callable[[Tensor], None]) -> AbstractContextManager[None]:
        """Call `observe` with the experts of every mixture, for all passes within the block."""


def experts_read(decoder: Decoder, texts: Sequence[Sequence[int]]) -> float | None:
    """Return the mean number of distinct experts per layer in a pass over one token of each text; None: no mixture."""
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
    per_row = 3 * decoder.config.hidden_size  # of an expert's three matrices
    return sum((spec.count - spec.per_token) * spec.size * per_row for spec in layers)


def step_bytes(decoder: Decoder, experts: float | None) -> float:
    """Return the bytes of weights that a step reads if it uses `experts` experts per layer (None: no mixture).

    An embedding that is not the output matrix, too, does not count, since a step reads few of its rows.
    """
    assert isinstance(decoder, DescribedDecoder)
    weights = decoder.weights
    unread = 0.0 if weights.head is weights.embedding else float(weights.embedding.nbytes)
    for spec, layer in zip(decoder.config.layers, weights.layers, strict=True):
        if spec.mlp.experts is not None and layer.experts is not None and experts is not None:
            expert_bytes = layer.experts.gate_up.nbytes + layer.experts.down.nbytes
            unread += (1 - experts / spec.mlp.experts.count) * expert_bytes
    return decoder.weight_bytes - unread
