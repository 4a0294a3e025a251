"""What a decoder needs of the ranks that compute it together; one that is computed alone needs nothing."""

from typing import Protocol

from torch import Tensor


class Exchange(Protocol):
    """Brings the numbers of all ranks together; every rank gets the same bits."""

    def total(self, part: Tensor) -> Tensor:
        """The sum of what every rank has, added in the order of the ranks."""
        ...

    def mean(self, part: Tensor) -> Tensor:
        """float32 [rows, 1], the mean over the columns of all ranks, which have equally many."""
        ...


class _Alone:
    def total(self, part: Tensor) -> Tensor:
        return part

    def mean(self, part: Tensor) -> Tensor:
        return part.mean(-1, keepdim=True)


ALONE: Exchange = _Alone()
"""Of a decoder that has no other ranks."""
