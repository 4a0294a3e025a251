"""Sums and means over ranks; trivial for a decoder on one rank."""

from typing import Protocol

from torch import Tensor


class Exchange(Protocol):
    """Combines numbers of all ranks; every rank gets the same bits."""

    def total(self, part: Tensor) -> Tensor:
        """Return the sum over ranks, added in rank order."""
        ...

    def mean(self, part: Tensor) -> Tensor:
        """float32 [rows, 1], mean over the columns of all ranks, which have equally many."""
        ...


class _Alone:
    def total(self, part: Tensor) -> Tensor:
        return part

    def mean(self, part: Tensor) -> Tensor:
        return part.mean(-1, keepdim=True)


ALONE: Exchange = _Alone()
"""Exchange of a decoder without other ranks."""
