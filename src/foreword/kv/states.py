"""Hidden states [rows, numbers], stored where they were computed.

On the host they are NumPy arrays, because slicing tensors takes longer than the rest of the work on a few rows.
"""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

States: TypeAlias = Tensor | NDArray[np.float32]


def as_tensor(states: States) -> Tensor:
    """Return the same memory as tensor."""
    return torch.from_numpy(states) if isinstance(states, np.ndarray) else states


def as_array(states: States) -> NDArray[np.float32]:
    """Return a contiguous host array; the same memory if possible."""
    return np.ascontiguousarray(states) if isinstance(states, np.ndarray) else states.contiguous().numpy()


def stacked(parts: Sequence[States]) -> States:
    if len(parts) == 1:
        return parts[0]
    arrays = [part for part in parts if isinstance(part, np.ndarray)]
    return (
        np.concatenate(arrays)
        if len(arrays) == len(parts)
        else torch.cat([as_tensor(part) for part in parts])
    )


def copied(states: States) -> States:
    """Return a copy that does not keep a larger tensor alive."""
    return states.copy() if isinstance(states, np.ndarray) else states.clone()
