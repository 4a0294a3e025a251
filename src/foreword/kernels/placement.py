"""What a backend says of the devices that it computes on: how rows of numbers are worked on where they are."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # programs that only look around import no torch
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class Placement:
    """A kind of device."""

    is_host: bool = False  # its numbers can be read without waiting
    # Its kernel for draws, called as `triton_draw.draw_rows`; None: torch draws.
    draw_rows: "Callable[..., Tensor] | None" = None


HOST = Placement(is_host=True)

_OFFERED: dict[str, Placement] = {}


def offer_placement(kind: str, placement: Placement) -> None:
    """Declare a kind of device, by torch's name of it; numbers elsewhere are in the host's memory."""
    _OFFERED[kind] = placement


def placement_of(device: "torch.device") -> Placement:
    """Return the placement that a backend has declared for a device."""
    return _OFFERED.get(device.type, HOST)
