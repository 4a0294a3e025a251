"""Registry of kinds of devices and of how rows of logits are sampled on them; backends fill it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # avoids importing torch
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class Placement:
    """How rows on a kind of device are sampled."""

    is_host: bool = False  # the CPU can read the rows without waiting
    # Sampling kernel, called like `triton_draw.draw_rows`; None: torch.
    draw_rows: "Callable[..., Tensor] | None" = None


HOST = Placement(is_host=True)

_REGISTERED: dict[str, Placement] = {}


def register_placement(device_type: str, placement: Placement) -> None:
    """Register the placement of all devices of a type, such as `cuda`."""
    _REGISTERED[device_type] = placement


def placement_of(device: "torch.device") -> Placement:
    """Return the registered placement of a device, or `HOST`."""
    return _REGISTERED.get(device.type, HOST)
