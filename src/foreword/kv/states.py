"""Hidden states [rows, numbers], in the memory of the device that computed them.

On the host they are NumPy arrays, because slicing a tensor takes longer than all other work on a few rows.
"""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

States: TypeAlias = Tensor | NDArray[np.float32]


def as_tensor(states: States) -> Tensor:
    """Return the states as a tensor that shares their memory."""
    return torch.from_numpy(states) if isinstance(states, np.ndarray) else states


def as_array(states: States) -> NDArray[np.float32]:
    """Return host states as a contiguous array, which shares their memory if they are contiguous."""
    return np.ascontiguousarray(states) if isinstance(states, np.ndarray) else states.contiguous().numpy()


def stacked(parts: Sequence[States]) -> States:
    """Concatenate the rows of all parts; return a single part without copying it."""
    if len(parts) == 1:
        return parts[0]
    arrays = [part for part in parts if isinstance(part, np.ndarray)]
    if len(arrays) == len(parts):
        return np.concatenate(arrays)
    return torch.cat([as_tensor(part) for part in parts])


def copied(states: States) -> States:
    """Return a copy that does not keep a larger tensor alive."""
    return states.copy() if isinstance(states, np.ndarray) else states.clone()
