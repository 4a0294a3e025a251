"""Peak rates of a GPU, times of passes, and the weights that a pass reads."""

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
    """Return the median device seconds of `body`, after one warm-up."""
    body()
    times = []
    for _ in range(repeats):
        begin, end = (timing_event() for _ in range(2))
        begin.record()
        body()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1000)
    return float(median(times))


def copy_bandwidth(device: torch.device, gigabytes: float = 4.0) -> float:
    """Return the bytes per second that a copy reads and writes."""
    source = torch.zeros(int(gigabytes * 1e9) // 2, dtype=torch.bfloat16, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / device_seconds(lambda: target.copy_(source))


def read_bandwidth(device: torch.device, gigabytes: float = 4.0) -> float:
    """Return the bytes per second that a sum reads."""
    source = torch.zeros(int(gigabytes * 1e9) // 4, dtype=torch.float32, device=device)
    return source.nbytes / device_seconds(source.sum)


def matrix_rate(device: torch.device, size: int = 8192) -> float:
    """Return the FLOP/s of a large bf16 matrix product on random numbers."""
    a, b = (torch.randn((size, size), device=device).bfloat16() for _ in range(2))
    return 2 * size**3 / device_seconds(lambda: a @ b)


PASSES = 20  # passes launched before waiting for the device


@dataclass(frozen=True)
class PassTime:
    """Times of a pass over `requests` texts with `rows` new rows each."""

    requests: int
    rows: int
    device_ms: float  # device time of a pass, with many in flight
    host_ms: float  # host time of a launch


def pass_times(decoder: Decoder, context: int, rows: Sequence[int], repeats: int = 5) -> Iterator[PassTime]:
    """Yield the times of passes over a text's newest token and a chain after it, with all logits, for these rows."""
    if decoder.config.recurrent is not None:  # a draft must end within its chunk
        context += (CHUNK // 2 if max(rows) <= CHUNK // 2 else 1) - context % CHUNK
    cached = CachedRequests(decoder, [random_tokens(context, decoder.config.vocab_size)], max(rows))
    (request,) = cached.requests
    for count in rows:
        device, host = [], []
        with cached.batch([Draft.chain(request.tokens[: count - 1], len(request.tokens))]) as batch:
            for _ in range(3):
                cached.runner.forward(batch)
            for _ in range(repeats):
                torch.cuda.synchronize()
                begin, end = (timing_event() for _ in range(2))
                began = perf_counter()
                begin.record()
                for _ in range(PASSES):
                    cached.runner.forward(batch)
                end.record()
                host.append((perf_counter() - began) / PASSES)
                end.synchronize()
                device.append(begin.elapsed_time(end) / PASSES)
        yield PassTime(1, count, median(device), median(host) * 1e3)


def prompt_seconds(decoder: Decoder, tokens: int, repeats: int = 5) -> float:
    """Return the seconds of a prompt in one pass, with the last token's logits."""
    times = []
    with prompt_pass(decoder, random_tokens(tokens, decoder.config.vocab_size)) as (runner, batch):
        for _ in range(repeats + 2):
            torch.cuda.synchronize()
            began = perf_counter()
            runner.forward(batch)
            torch.cuda.synchronize()
            times.append(perf_counter() - began)
    return median(times[2:])


def matrix_operations(decoder: Decoder, rows: int) -> float:
    """Return the operations of the layers' matrix products over `rows` rows; of a mixture, of the active experts."""
    shapes = expected_shapes(decoder.config).items()
    every = sum(prod(shape) for name, shape in shapes if name.startswith("model.layers."))
    return 2.0 * rows * (every - idle_expert_parameters(decoder))


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
    width = 3 * decoder.config.hidden_size
    return sum((spec.count - spec.per_token) * spec.size * width for spec in layers)


def step_bytes(decoder: Decoder, experts: float | None) -> float:
    """Return the bytes of weights that a step reads if it uses `experts` experts per layer.

    A separate embedding does not count, since a step reads few of its rows.
    """
    assert isinstance(decoder, DescribedDecoder)
    weights = decoder.weights
    unread = 0.0 if weights.head is weights.embedding else float(weights.embedding.nbytes)
    for spec, layer in zip(decoder.config.layers, weights.layers, strict=True):
        if spec.mlp.experts is not None and layer.experts is not None and experts is not None:
            held = layer.experts.gate_up.nbytes + layer.experts.down.nbytes
            unread += (1 - experts / spec.mlp.experts.count) * held
    return decoder.weight_bytes - unread
