"""Sizes of a decoder's KV rows and recurrent states, memory of the device, and the number of passes in flight."""

from collections.abc import Callable

import torch

from foreword.errors import CheckpointError
from foreword.kv.spec import DECODER_ROWS, RowSpec, StateSpec
from foreword.models.config import ModelConfig, RecurrentSpec


def device_memory(device: torch.device) -> tuple[int, int] | None:
    """Release torch's cached memory; return free and total bytes of a GPU, or None on a CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return free, total


def free_memory(device: torch.device) -> int:
    """Return the free bytes of a GPU; 0 on a CPU."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0


def release_cached_memory() -> None:
    """Release GPU memory that torch has cached, after a pass ran out of memory."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def peak_bytes(device: torch.device, work: Callable[[], object]) -> int:
    """Run `work` on a GPU, wait for it, and return the peak of its additional memory in bytes."""
    torch.cuda.reset_peak_memory_stats(device)
    bytes_before = torch.cuda.memory_allocated(device)
    work()
    torch.cuda.synchronize(device)
    return max(0, torch.cuda.max_memory_allocated(device) - bytes_before)


def passes_in_flight(device: torch.device) -> int:
    """Return how many passes to keep in flight: 2 on a GPU, so that the device does not wait for the host."""
    return 1 if device.type == "cpu" else 2


def state_spec(config: ModelConfig, item_bytes: int) -> StateSpec | None:
    """Return the sizes of what recurrent layers store; None: there are none. `item_bytes` is per activation."""
    if config.recurrent is None:
        return None
    return spec_of_states(
        config.recurrent, sum(layer.recurrent is not None for layer in config.layers), item_bytes
    )


def spec_of_states(spec: RecurrentSpec, layers: int, item_bytes: int) -> StateSpec:
    """Return the sizes of what this many layers of a recurrence store."""
    return StateSpec(
        num_layers=layers,
        channels=spec.channels,
        kernel=spec.kernel,
        heads=spec.heads,
        value_dim=spec.value_dim,
        key_heads=spec.key_heads,
        key_dim=spec.key_dim,
        item_bytes=item_bytes,
    )


def kv_rows(config: ModelConfig, dtype: str) -> RowSpec:
    """Return the sizes of a token's KV row: keys and values of all layers with attention, or their latent rows."""
    attending = [layer.attention for layer in config.layers if layer.has_attention]
    shapes = {attention.kv_row_sizes for attention in attending}
    if not shapes:
        raise CheckpointError(
            f"no layer of this {config.architecture} model has attention; use another model"
        )
    if len(shapes) != 1:
        raise CheckpointError(f"the layers of this {config.architecture} model keep rows of different sizes")
    heads, dim, values = shapes.pop()
    return RowSpec(DECODER_ROWS, len(attending), heads, dim, values, config.widest_window, dtype)
