"""Hidden states [rows, numbers], kept where they were computed.

On the host that is an array: taking rows out of a tensor takes longer than all that is done with a few of them.
"""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

States: TypeAlias = Tensor | NDArray[np.float32]


def as_tensor(states: States) -> Tensor:
    """The same memory."""
    return torch.from_numpy(states) if isinstance(states, np.ndarray) else states


def as_array(states: States) -> NDArray[np.float32]:
    """In one piece, on the host; the same memory if it is that already."""
    return np.ascontiguousarray(states) if isinstance(states, np.ndarray) else states.contiguous().numpy()


def stacked(parts: Sequence[States]) -> States:
    """Return the rows of all parts, concatenated."""
    if len(parts) == 1:
        return parts[0]
    arrays = [part for part in parts if isinstance(part, np.ndarray)]
    return (
        np.concatenate(arrays)
        if len(arrays) == len(parts)
        else torch.cat([as_tensor(part) for part in parts])
    )


def copied(states: States) -> States:
    """They no longer keep what they were a part of."""
    return states.copy() if isinstance(states, np.ndarray) else states.clone()
