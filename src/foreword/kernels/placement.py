"""Devices on which rows can be sampled, as declared by backends."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # avoids importing torch
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class Placement:
    """Properties of a kind of device."""

    is_host: bool = False  # readable without waiting
    # Sampling kernel, called like `triton_draw.draw_rows`; None: torch.
    draw_rows: "Callable[..., Tensor] | None" = None


HOST = Placement(is_host=True)

_OFFERED: dict[str, Placement] = {}


def offer_placement(kind: str, placement: Placement) -> None:
    _OFFERED[kind] = placement


def placement_of(device: "torch.device") -> Placement:
    """Return the declared placement of a device; the host's by default."""
    return _OFFERED.get(device.type, HOST)
