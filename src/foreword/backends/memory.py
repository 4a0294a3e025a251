"""Device memory, and the number of passes in flight."""

from collections.abc import Callable

import torch


def device_memory(device: torch.device) -> tuple[int, int] | None:
    """Return free and total bytes of a GPU; None on a CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return free, total


def free_memory(device: torch.device) -> int:
    """Return the free bytes of a GPU; 0 on a CPU."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0


def release_cached_memory() -> None:
    """Release memory cached by torch, after a pass ran out of memory."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def peak_bytes(device: torch.device, work: Callable[[], object]) -> int:
    """Run `work` on a GPU and return its peak additional memory."""
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    work()
    torch.cuda.synchronize(device)
    return max(0, torch.cuda.max_memory_allocated(device) - before)


def passes_in_flight(device: torch.device) -> int:
    """Return how many passes to keep in flight so that the device does not wait for the host."""
    return 1 if device.type == "cpu" else 2
