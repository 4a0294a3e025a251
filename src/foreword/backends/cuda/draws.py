"""Drawing of draft tokens on the device, shared by captured heads."""

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
        self._known: tuple[Ints, Tensor] | None = None

    def of(self, plan: ChainPlan) -> Tensor | None:
        """int64 [draft tokens]; None: some of them cannot be drawn."""
        ids = plan.token_ids
        if ids is None:
            ids = np.arange(min(self._size, plan.vocab_size), dtype=np.int32)
            if self._known is not None and len(self._known[0]) == len(ids):
                return self._known[1]
        if self._known is None or self._known[0] is not ids:
            if int(ids.max()) >= plan.vocab_size:
                return None
            self._known = ids, torch.from_numpy(ids.astype(np.int64)).to(self._device)
        return self._known[1]


def names_in(plan: ChainPlan) -> Hashable:
    """Return the part of a capture's key that concerns drawing."""
    return id(plan.token_ids)


def drawn_ids(logits: Tensor, temperature: Tensor, keys: Tensor, names: Tensor) -> Tensor:
    """Sample a target's token id for each row, int64 [rows]; -1 where logits are not finite.

    A row without temperature skips the noise in the kernel: one capture serves greedy and sampled requests.
    """
    return draw_rows(logits[:, : len(names)], temperature, keys, None, names=names)[0]


def words(array: np.ndarray) -> Ints:
    """View 64-bit numbers as pairs of 32-bit ones."""
    return np.ascontiguousarray(array).view(np.int32)


def as_chains(drawn: Tensor, steps: Ints, began: "torch.cuda.Event | None", is_cold: bool) -> PendingChains:
    """Return tokens [levels, requests, some of them padding] as a chain for each, without waiting for the device."""
    width = drawn.shape[1]
    places = [range(place, place + width * count, width) for place, count in enumerate(steps.tolist())]
    tokens = HostCopy.begin(drawn.reshape(-1), began)
    tokens.is_cold = is_cold
    return PendingChains(tokens, places)
