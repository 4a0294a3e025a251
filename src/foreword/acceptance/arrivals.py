"""Numbers that a device makes and that the host reads later."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Found = Tensor | npt.NDArray[np.int64]


class OnItsWay:
    """Numbers whose copy to the host is under way; those of the host itself are there."""

    __slots__ = ("_numbers", "_parts", "arrived", "began", "copy", "found", "is_cold")

    def __init__(
        self,
        found: Found,
        copy: Found,
        arrived: "torch.cuda.Event | None" = None,  # None: it is there
        began: "torch.cuda.Event | None" = None,  # before they were made; None: nobody asks how long it took
    ) -> None:
        self.found, self.copy, self.arrived, self.began = found, copy, arrived, began
        self._numbers: list[int] | None = None
        self._parts: Sequence[OnItsWay] = ()
        self.is_cold = False  # whether what was run for them was compiled or captured first

    @staticmethod
    def begin(found: Found, began: "torch.cuda.Event | None" = None) -> "OnItsWay":
        if not isinstance(found, Tensor) or found.device.type != "cuda":
            return OnItsWay(found, found)
        copy = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
        copy.copy_(found, non_blocking=True)
        return OnItsWay(found, copy, event(timed=began is not None), began)

    @staticmethod
    def joined(parts: "Sequence[OnItsWay]") -> "OnItsWay":
        """The numbers of several, one after the other; nobody waits for them."""
        whole = OnItsWay.begin(torch.cat([part.on_device.flatten() for part in parts]))
        whole._parts = parts
        whole.is_cold = any(part.is_cold for part in parts)
        return whole

    @property
    def on_device(self) -> Tensor:
        """Where they were made."""
        return torch.as_tensor(self.found)

    @property
    def was_read(self) -> bool:
        """Whether anybody has waited for all of them."""
        return self._numbers is not None

    def on_host(self) -> Found:
        """Waits for this copy and for nothing that was handed over after it."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.copy

    @property
    def numbers(self) -> list[int]:
        """All of them, once they are there."""
        if self._numbers is None:
            self._numbers = self.on_host().flatten().tolist()
        return self._numbers

    @property
    def device_seconds(self) -> float:
        """That the device took for them, once they are there; 0 where nobody asked."""
        if self._parts:
            return sum(part.device_seconds for part in self._parts)
        if self.began is None or self.arrived is None:
            return 0.0
        self.arrived.synchronize()
        return float(self.began.elapsed_time(self.arrived)) / 1e3


def event(*, timed: bool) -> "torch.cuda.Event":
    """A mark in what the device has been given so far."""
    mark = torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]
    mark.record()
    return mark
