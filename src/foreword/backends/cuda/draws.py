"""Samples draft tokens on the device, for heads in captured graphs."""

from collections.abc import Hashable

import numpy as np
import torch
from torch import Tensor

from foreword.acceptance.transfer import HostCopy
from foreword.backends.batch import Ints
from foreword.backends.interface import ChainPlan, PendingChains
from foreword.kernels.triton_draw import draw_rows


class DraftIds:
    """The target's ids of a head's tokens, on the device."""

    def __init__(self, draft_vocab_size: int, device: torch.device) -> None:
        self._size = draft_vocab_size
        self._device = device
        self._cached: tuple[Ints, Tensor] | None = None

    def of(self, plan: ChainPlan) -> Tensor | None:
        """Return the target's ids, int64 [draft vocabulary]; None: some of these tokens cannot be sampled."""
        ids = plan.token_ids
        if ids is None:
            ids = np.arange(min(self._size, plan.vocab_size), dtype=np.int32)
            if self._cached is not None and len(self._cached[0]) == len(ids):
                return self._cached[1]
        if self._cached is None or self._cached[0] is not ids:
            if int(ids.max()) >= plan.vocab_size:
                return None
            self._cached = ids, torch.from_numpy(ids.astype(np.int64)).to(self._device)
        return self._cached[1]


def vocabulary_key(plan: ChainPlan) -> Hashable:
    """Return what identifies the draft vocabulary in a capture's key."""
    return id(plan.token_ids)


def draw_ids(logits: Tensor, temperature: Tensor, keys: Tensor, target_ids: Tensor) -> Tensor:
    """Sample one of the target's token ids for each row, int64 [rows]; -1 where logits are not finite.

    A row of temperature 0 skips the noise in the kernel, so one capture serves greedy and sampled requests.
    """
    return draw_rows(logits[:, : len(target_ids)], temperature, keys, None, token_ids=target_ids)[0]


def words(array: np.ndarray) -> Ints:
    """View 64-bit numbers as pairs of 32-bit ones."""
    return np.ascontiguousarray(array).view(np.int32)


def as_chains(
    drawn: Tensor, steps: Ints, start_event: "torch.cuda.Event | None", is_cold: bool
) -> PendingChains:
    """Return the chains of tokens [levels, padded requests], without waiting for the device.

    The tokens are copied, because the next call may overwrite them before they are verified.
    """
    width = drawn.shape[1]  # flattened level by level: a request's tokens are this far apart
    token_indices = [
        range(request, request + width * count, width) for request, count in enumerate(steps.tolist())
    ]
    tokens = HostCopy.begin(drawn.flatten().clone(), start_event)
    tokens.is_cold = is_cold
    return PendingChains(tokens, token_indices)
