"""Asynchronous copies between host and device."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from foreword.kernels.placement import placement_of

Found = Tensor | npt.NDArray[np.int64]


class HostCopy:
    """Numbers computed on a device, whose copy to the host may still be in flight."""

    __slots__ = ("_numbers", "_parts", "arrived", "began", "copy", "found", "is_cold")

    def __init__(
        self,
        found: Found,
        copy: Found,
        arrived: "torch.cuda.Event | None" = None,  # None: the copy is complete
        began: "torch.cuda.Event | None" = None,  # event before the computation; None: not timed
    ) -> None:
        self.found, self.copy, self.arrived, self.began = found, copy, arrived, began
        self._numbers: list[int] | None = None
        self._parts: Sequence[HostCopy] = ()
        self.is_cold = False  # whether the computation compiled or captured a graph

    @staticmethod
    def begin(found: Found, began: "torch.cuda.Event | None" = None) -> "HostCopy":
        if not isinstance(found, Tensor) or placement_of(found.device).is_host:
            return HostCopy(found, found)
        copy = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
        copy.copy_(found, non_blocking=True)
        return HostCopy(found, copy, event(timed=began is not None), began)

    @staticmethod
    def joined(parts: "Sequence[HostCopy]") -> "HostCopy":
        """Concatenate several on the device, without waiting."""
        whole = HostCopy.begin(torch.cat([part.on_device.flatten() for part in parts]))
        whole._parts = parts
        whole.is_cold = any(part.is_cold for part in parts)
        return whole

    @property
    def on_device(self) -> Tensor:
        return torch.as_tensor(self.found)

    @property
    def was_read(self) -> bool:
        return self._numbers is not None

    def on_host(self) -> Found:
        """Wait for this copy only, and return it."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.copy

    @property
    def numbers(self) -> list[int]:
        if self._numbers is None:
            self._numbers = self.on_host().flatten().tolist()
        return self._numbers

    @property
    def device_seconds(self) -> float:
        """Device time of the computation; waits for the copy. 0 if not timed."""
        if self._parts:
            return sum(part.device_seconds for part in self._parts)
        if self.began is None or self.arrived is None:
            return 0.0
        self.arrived.synchronize()
        return float(self.began.elapsed_time(self.arrived)) / 1e3


def event(*, timed: bool) -> "torch.cuda.Event":
    """Record an event after all work submitted to the device so far."""
    mark = torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]
    mark.record()
    return mark


def started(device: torch.device) -> "torch.cuda.Event | None":
    """Record a timed event as the start of a measurement; None on a CPU."""
    return None if placement_of(device).is_host else event(timed=True)


def uploaded(column: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to the device asynchronously; return it unchanged if it is there."""
    if placement_of(column.device) is placement_of(device):
        return column
    return column.contiguous().pin_memory().to(device, non_blocking=True)
