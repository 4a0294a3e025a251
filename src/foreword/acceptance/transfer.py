"""Asynchronous copies between host and device."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from foreword.kernels.placement import placement_of

Integers = Tensor | npt.NDArray[np.int64]
"""Integers on a device or on the host."""


class HostCopy:
    """Integers computed on a device, and their copy on the host, which may still be in flight."""

    __slots__ = ("_numbers", "_parts", "copy", "done_event", "is_cold", "source", "start_event")

    def __init__(
        self,
        source: Integers,
        copy: Integers,
        done_event: "torch.cuda.Event | None" = None,  # after the copy; None: the copy is complete
        start_event: "torch.cuda.Event | None" = None,  # before the computation; None: not timed
    ) -> None:
        self.source, self.copy, self.done_event, self.start_event = source, copy, done_event, start_event
        self._numbers: list[int] | None = None  # the copy as a list, once read
        self._parts: Sequence[HostCopy] = ()  # the copies that `joined` concatenated into this one
        self.is_cold = False  # whether the computation compiled or captured a graph

    @staticmethod
    def begin(source: Integers, start_event: "torch.cuda.Event | None" = None) -> "HostCopy":
        """Start copying integers to the host; integers on the host are not copied."""
        if not isinstance(source, Tensor) or placement_of(source.device).is_host:
            return HostCopy(source, source)
        copy = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        copy.copy_(source, non_blocking=True)
        return HostCopy(source, copy, event(timed=start_event is not None), start_event)

    @staticmethod
    def joined(parts: "Sequence[HostCopy]") -> "HostCopy":
        """Concatenate the integers of several sources on the device, and start copying them; do not wait."""
        joined = HostCopy.begin(torch.cat([part.on_device.flatten() for part in parts]))
        joined._parts = parts
        joined.is_cold = any(part.is_cold for part in parts)
        return joined

    @property
    def on_device(self) -> Tensor:
        return torch.as_tensor(self.source)

    @property
    def was_read(self) -> bool:
        """Whether the numbers have been read on the host."""
        return self._numbers is not None

    def on_host(self) -> Integers:
        """Return the copy on the host; wait until it is complete, but not for later work of the device."""
        if self.done_event is not None:
            self.done_event.synchronize()
        return self.copy

    @property
    def numbers(self) -> list[int]:
        """The integers as a flat list; the first access waits for the copy."""
        if self._numbers is None:
            self._numbers = self.on_host().flatten().tolist()
        return self._numbers

    @property
    def device_seconds(self) -> float:
        """Seconds on the device for computation and copy; 0 if not timed. Waits for the copy."""
        if self._parts:
            return sum(part.device_seconds for part in self._parts)
        if self.start_event is None or self.done_event is None:
            return 0.0
        self.done_event.synchronize()
        return float(self.start_event.elapsed_time(self.done_event)) / 1e3


def event(*, timed: bool) -> "torch.cuda.Event":
    """Record an event after all work submitted to the device so far."""
    recorded = torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]
    recorded.record()
    return recorded


def started(device: torch.device) -> "torch.cuda.Event | None":
    """Record a timed event as the start of a measurement; None on a CPU."""
    return None if placement_of(device).is_host else event(timed=True)


def uploaded(column: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to the device asynchronously; return a tensor that is there already unchanged."""
    if placement_of(column.device) is placement_of(device):
        return column
    return column.contiguous().pin_memory().to(device, non_blocking=True)
