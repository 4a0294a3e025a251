"""Numbers that a device makes and that the host reads later."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


@dataclass(frozen=True)
class OnItsWay:
    """Numbers of a device whose copy to the host is under way."""

    found: Tensor
    copy: Tensor
    arrived: "torch.cuda.Event | None" = None  # None: it is there
    began: "torch.cuda.Event | None" = None  # before the device made them; None: nobody asks how long it took

    @staticmethod
    def begin(found: "Tensor | npt.NDArray[np.int64]", began: "torch.cuda.Event | None" = None) -> "OnItsWay":
        tensor = found if isinstance(found, Tensor) else torch.from_numpy(found)
        if tensor.device.type != "cuda":
            return OnItsWay(tensor, tensor)
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        copy.copy_(tensor, non_blocking=True)
        return OnItsWay(tensor, copy, event(timed=began is not None), began)

    def on_host(self) -> Tensor:
        """Waits for this copy and for nothing that was handed over after it."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.copy

    @property
    def device_seconds(self) -> float:
        """That the device took for them, once they are there; 0 where nobody asked."""
        if self.began is None or self.arrived is None:
            return 0.0
        self.arrived.synchronize()
        return float(self.began.elapsed_time(self.arrived)) / 1e3

    @cached_property
    def numbers(self) -> list[int]:
        """All of them, once they are there."""
        numbers: list[int] = self.on_host().flatten().tolist()
        return numbers


def event(*, timed: bool) -> "torch.cuda.Event":
    """A mark in what the device has been given so far."""
    mark = torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]
    mark.record()
    return mark
