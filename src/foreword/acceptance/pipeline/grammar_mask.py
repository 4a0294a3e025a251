"""What grammars allow after every row: with the request's own history, then the draft nodes up to the row."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from foreword.acceptance.request import RequestSampler
from foreword.acceptance.rules.trees import DraftTrees
from foreword.acceptance.transfer import uploaded
from foreword.structured.compiled import Bits
from foreword.structured.state import unpacked

NEVER = -float("inf")

Logits = npt.NDArray[np.float32]

_BYTES = np.arange(256, dtype=np.uint8)[:, None]
_HIGHEST: Logits = np.where(
    np.unpackbits(_BYTES, axis=1, bitorder="little"), np.float32(np.inf), np.float32(NEVER)
)
"""[256, 8], the highest logits of eight tokens by the byte that has their bits: a look into a table of 8 KiB takes the
same time for every mask, and less than finding the bits that are set, or those that are not."""


def within_grammars(logits: Tensor, trees: DraftTrees, samplers: Sequence[RequestSampler]) -> Tensor:
    """The logits [rows, vocab] with no chance for tokens that a grammar rules out; the same where there is none.

    Masks are worked out on the host: where the logits are still being computed on a device, nobody waits for them.
    On a CPU they are written into the logits: of the rows of such requests nobody reads the raw ones.
    """
    if all(sampler.grammar is None for sampler in samplers):
        return logits
    masks = {
        trees.starts[request]: _masks_of(trees, request, sampler)
        for request, sampler in enumerate(samplers)
        if sampler.grammar is not None
    }
    if logits.device.type == "cpu":
        rows, room = logits.numpy(), None
        for first, bits in masks.items():
            room = np.empty((bits.shape[1] * 4, 8), np.float32) if room is None else room
            for place, row in enumerate(bits):
                forbid(rows[first + place], row, room)
        return logits
    allowed = torch.ones(logits.shape, dtype=torch.bool)
    for first, bits in masks.items():
        allowed[first : first + len(bits)] = torch.from_numpy(unpacked(bits, logits.shape[1]))
    return torch.where(uploaded(allowed, logits.device), logits, NEVER)


def _masks_of(trees: DraftTrees, request: int, sampler: RequestSampler) -> Bits:
    assert sampler.grammar is not None
    first, end = trees.starts[request], trees.starts[request + 1]
    parents = [parent - first - 1 for parent in trees.parent_list[first + 1 : end]]
    return sampler.grammar.masks(trees.token_list[first + 1 : end], parents)


def forbid(row: Logits, bits: Bits, room: Logits | None = None) -> None:
    """Take the chance of all tokens whose bit is not set; `room` is as long as the bits, and is written over."""
    highest = np.take(_HIGHEST, bits.view(np.uint8), axis=0, out=room, mode="clip").reshape(-1)
    np.fmin(row, highest[: len(row)], out=row)  # a number that is none is none of a token that cannot come
