"""All that is derived from the declaration of a batch's arrays agrees with it."""

from dataclasses import fields

import numpy as np
import pytest
import torch

from foreword.backends.batch import (
    BATCH_ARRAYS,
    BatchArrays,
    BatchSizes,
    ConcatenatedStates,
    ForwardBatch,
    Tap,
    concatenated_states,
    num_states,
)
from foreword.kv.states import as_tensor
from helpers.cpu import needs_cpu_kernels

SIZES = BatchSizes(rows=5, requests=3, pages=4, logit_rows=2, kv_copies=6, hidden_rows=1)


def test_the_declaration_names_every_array_once_and_in_order():
    names = [array.name for array in BATCH_ARRAYS]
    assert names == list(BatchArrays._fields)
    assert {field.name for field in fields(ForwardBatch)} == {
        *names,
        *("taps", "adapters", "drawn_before", "chunks", "ring_copies", "has_gaps", "wants_shares"),
    }


@needs_cpu_kernels
def test_the_kernels_read_the_same_arrays_in_the_same_order():
    from foreword.kernels import _native

    assert list(BatchArrays._fields) == _native.BATCH_ARRAYS


@pytest.mark.parametrize("sizes", [SIZES, BatchSizes(0, 0, 0, 0, 0), BatchSizes(1, 1, 1, 1, 0)])
def test_arrays_lie_one_behind_the_other_and_know_their_sizes(sizes: BatchSizes):
    memory = np.arange(sizes.num_words + 3, dtype=np.int32)
    arrays = BatchArrays.views_of(memory, sizes)
    words = [array.view(np.int32).reshape(-1) for array in arrays]
    assert np.concatenate(words).tolist() == list(range(sizes.num_words))
    assert arrays.sizes == sizes
    assert arrays.ancestor_masks.dtype == np.int64
    batch = ForwardBatch.of(arrays)
    assert batch.row_starts.shape == (sizes.requests + 1,)
    assert batch.token_ids.dtype == torch.int32
    for ours, theirs in zip(batch.arrays, arrays, strict=True):
        assert np.shares_memory(ours, theirs) or not theirs.size


def test_states_that_lie_side_by_side_are_joined_without_a_copy():
    taps = (Tap(2), Tap(15), Tap(30, normed=True))
    memory = np.arange(24, dtype=np.float32).reshape(4, 6)
    side_by_side = ConcatenatedStates(taps, memory)
    apart = {tap: torch.tensor(memory[:, 2 * place : 2 * place + 2]) for place, tap in enumerate(taps)}
    assert list(side_by_side) == list(taps)
    assert num_states(side_by_side) == num_states(apart) == 4
    for tap in taps:
        assert torch.equal(side_by_side[tap], apart[tap])
    assert concatenated_states(side_by_side, taps) is memory
    for some in (taps, taps[::-1], taps[1:], taps[:1]):
        one, other = concatenated_states(side_by_side, some), concatenated_states(apart, some)
        assert torch.equal(as_tensor(one), as_tensor(other))
    with pytest.raises(KeyError):
        side_by_side[Tap(3)]
    assert num_states({}) == 0
