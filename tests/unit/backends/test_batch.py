"""All that is derived from the declaration of a batch's arrays agrees with it."""

from dataclasses import fields

import numpy as np
import pytest
import torch

from foreword.backends.batch import BATCH_ARRAYS, BatchArrays, BatchSizes, ForwardBatch
from helpers.cpu import needs_cpu_kernels

SIZES = BatchSizes(rows=5, requests=3, pages=4, logit_rows=2, kv_copies=6, hidden_rows=1)


def test_the_declaration_names_every_array_once_and_in_order():
    names = [array.name for array in BATCH_ARRAYS]
    assert names == list(BatchArrays._fields)
    assert {field.name for field in fields(ForwardBatch)} == {*names, "taps", "adapters", "drawn_before"}


@needs_cpu_kernels
def test_the_kernels_read_the_same_arrays_in_the_same_order():
    from foreword.kernels import _native

    assert list(BatchArrays._fields) == _native.BATCH_ARRAYS


@pytest.mark.parametrize("sizes", [SIZES, BatchSizes(0, 0, 0, 0, 0), BatchSizes(1, 1, 1, 1, 0)])
def test_arrays_lie_one_behind_the_other_and_know_their_sizes(sizes: BatchSizes):
    memory = np.arange(sizes.entries + 3, dtype=np.int32)
    arrays = BatchArrays.carved(memory, sizes)
    words = [array.view(np.int32).reshape(-1) for array in arrays]
    assert np.concatenate(words).tolist() == list(range(sizes.entries))
    assert arrays.sizes == sizes
    assert arrays.ancestor_masks.dtype == np.int64
    batch = ForwardBatch.of(arrays)
    assert batch.row_starts.shape == (sizes.requests + 1,)
    assert batch.token_ids.dtype == torch.int32
    for ours, theirs in zip(batch.arrays, arrays, strict=True):
        assert np.shares_memory(ours, theirs) or not theirs.size
