"""What the device can do at most, measured: nothing of ours runs here."""

from collections.abc import Callable
from statistics import median

import torch


def timing_event() -> torch.cuda.Event:
    """A mark in the stream of work whose time can be read."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def device_seconds(body: Callable[[], object], repeats: int = 10) -> float:
    """Median seconds that the device works on what `body` hands over, after one round that warms up."""
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
    """Bytes a second that a copy reads and writes."""
    source = torch.zeros(int(gigabytes * 1e9) // 2, dtype=torch.bfloat16, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / device_seconds(lambda: target.copy_(source))


def read_bandwidth(device: torch.device, gigabytes: float = 4.0) -> float:
    """Bytes a second that a sum reads."""
    source = torch.zeros(int(gigabytes * 1e9) // 4, dtype=torch.float32, device=device)
    return source.nbytes / device_seconds(source.sum)


def matrix_rate(device: torch.device, size: int = 8192) -> float:
    """Operations a second of a large bf16 matrix product on random numbers."""
    a, b = (torch.randn((size, size), device=device).bfloat16() for _ in range(2))
    return 2 * size**3 / device_seconds(lambda: a @ b)
