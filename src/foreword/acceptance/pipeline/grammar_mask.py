"""What grammars allow after every row: with the request's own history, then the draft nodes up to the row."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from foreword.acceptance.pipeline.upload import uploaded
from foreword.acceptance.request import RequestSampler
from foreword.acceptance.rules.trees import DraftTrees
from foreword.structured.state import Bits, unpacked

NEVER = -float("inf")


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
        rows = logits.numpy()
        for first, bits in masks.items():
            for place, row in enumerate(bits):
                forbid(rows[first + place], row)
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


def forbid(row: npt.NDArray[np.float32], bits: Bits) -> None:
    """Take the chance of all tokens whose bit is not set.

    Most masks allow a few tokens or all but a few: only those are touched one by one.
    """
    if 2 * np.count_nonzero(bits) < len(bits):
        kept = _set_bits(bits)
        values = row[kept]
        row.fill(NEVER)
        row[kept] = values
    else:
        gone = _set_bits(~bits)
        row[gone[gone < len(row)]] = NEVER


def _set_bits(bits: Bits) -> npt.NDArray[np.int64]:
    """Ids whose bit is set, of few words that have any."""
    words = np.flatnonzero(bits)
    places, offsets = np.nonzero(np.unpackbits(bits[words].view(np.uint8), bitorder="little").reshape(-1, 32))
    return words[places] * 32 + offsets
