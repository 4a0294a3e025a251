"""Hidden states as arrays and as tensors."""

import numpy as np
import pytest
import torch

from foreword.kv.states import States, as_array, as_tensor, copied, stacked

NUMBERS = np.arange(12, dtype=np.float32).reshape(4, 3)


@pytest.mark.parametrize("states", [NUMBERS.copy(), torch.tensor(NUMBERS)], ids=["array", "tensor"])
def test_they_are_seen_as_either_without_a_copy(states: States) -> None:
    assert np.array_equal(as_array(states), NUMBERS)
    assert torch.equal(as_tensor(states), torch.tensor(NUMBERS))
    states[0, 0] = 99
    assert as_array(states)[0, 0] == as_tensor(states)[0, 0] == 99
    own = copied(states)
    assert type(own) is type(states)
    own[0, 0] = 7
    assert states[0, 0] == 99


def test_an_array_in_pieces_is_put_together() -> None:
    """Kernels read rows one behind the other."""
    for states in (NUMBERS[:, 1:], torch.tensor(NUMBERS)[:, 1:]):
        found = as_array(states)
        assert found.flags.c_contiguous
        assert np.array_equal(found, NUMBERS[:, 1:])


def test_parts_are_stacked_whatever_they_are() -> None:
    first, second = NUMBERS[:1], NUMBERS[1:]
    assert stacked([first]) is first
    assert isinstance(stacked([first, second]), np.ndarray)
    mixed: list[list[States]] = [
        [first, second],
        [torch.tensor(first), second],
        [first, torch.tensor(second)],
        [torch.tensor(first), torch.tensor(second)],
    ]
    for parts in mixed:
        assert np.array_equal(as_array(stacked(parts)), NUMBERS)
