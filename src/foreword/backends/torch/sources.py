"""Where the tensors of layers come from."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor
from typing_extensions import TypeVar

M_co = TypeVar("M_co", covariant=True, default=Tensor)
"""A matrix: a tensor, or a backend's own format."""


class LayerSource(Protocol[M_co]):
    """Source of the tensors of layers."""

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        ...

    def tensor(self, name: str) -> Tensor:
        """Return a tensor in the decoder's dtype."""
        ...

    def matrix(self, names: Sequence[str]) -> M_co:
        """Return projections of the same input as one matrix."""
        ...

    def floats(self, name: str) -> Tensor:
        """A tensor in float32."""
        ...

    def nothing(self, *shape: int) -> Tensor:
        """Return an empty tensor for a missing weight."""
        ...


@runtime_checkable
class ExpertSource(Protocol):
    """Source of tensors that may have the matrices of all experts in a backend's own format."""

    def experts(self, names: Sequence[Sequence[str]]) -> object | None:
        """Return the experts' projections of the same input, by expert, as one; None: they are read one by one."""
        ...
