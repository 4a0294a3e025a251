"""The hidden states that a pass has kept, as its requests' drafters are told of them."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from foreword.backends.batch import Tap


class KeptStates(Mapping[Tap, Tensor]):
    """One request's rows of what a pass has kept; they are taken out when somebody asks for them."""

    __slots__ = ("_path", "first", "of_pass", "stop")

    def __init__(self, of_pass: Mapping[Tap, Tensor], first: int, run: int, path: Sequence[int]) -> None:
        """Its rows begin at `first` with its run; those of the accepted nodes are behind it."""
        self.of_pass = of_pass
        self.first = first
        # Of a chain, nothing lies between them: node numbers rise along a path.
        self._path = None if not path or path[-1] == len(path) - 1 else path
        self.stop = first + run + (len(path) if self._path is None else 0)

    @property
    def are_together(self) -> bool:
        """Whether they are all the rows from `first` to `stop`."""
        return self._path is None

    def __getitem__(self, tap: Tap) -> Tensor:
        states = self.of_pass[tap]
        if self._path is None:
            is_all = self.stop - self.first == states.shape[0]
            return states if is_all else states[self.first : self.stop]
        kept = torch.tensor([*range(self.first, self.stop), *(self.stop + node for node in self._path)])
        return states[kept.to(states.device)]

    def __iter__(self) -> Iterator[Tap]:
        return iter(self.of_pass)

    def __len__(self) -> int:
        return len(self.of_pass)
