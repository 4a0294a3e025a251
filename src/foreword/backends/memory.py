"""Memory of the device that a model runs on, and how many passes it takes at once."""

from collections.abc import Callable

import torch


def device_memory(device: torch.device) -> tuple[int, int] | None:
    """Return the free and all bytes of a GPU; None on a CPU, whose memory nothing reserves."""
    if device.type != "cuda":
        return None
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return free, total


def free_memory(device: torch.device) -> int:
    """Return the free bytes of a GPU; 0 for a CPU, whose memory no captured pass fills."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0


def release_cached_memory() -> None:
    """Return the memory that is cached for other shapes to the devices, after a pass has run out of it."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def peak_bytes(device: torch.device, work: Callable[[], object]) -> int:
    """Run `work` on a GPU and return the most bytes that it held beside what was there before."""
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    work()
    torch.cuda.synchronize(device)
    return max(0, torch.cuda.max_memory_allocated(device) - before)


def passes_in_flight(device: torch.device) -> int:
    """Return how many passes to launch at once so that the device need not wait for the host."""
    return 1 if device.type == "cpu" else 2
