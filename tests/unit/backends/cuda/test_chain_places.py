"""Where texts end and where guesses go, worked out on the device: as on the host."""

import numpy as np
import pytest
import torch
from torch import Tensor

from foreword.acceptance.noise import extend_keys, key_tensor
from helpers.cuda import KERNEL_DEVICE, has_gpu, needs_triton

pytestmark = needs_triton
SIZE, SPARE = 4, 999


def ints(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=KERNEL_DEVICE)


def test_a_run_ends_with_the_first_guess_that_is_not_drawn():
    from foreword.backends.cuda.kernels.chains import count_accepted

    drawn = torch.tensor([9, 1, 2, 3, 4, 5, 6, 7, 0, 8, -1], device=KERNEL_DEVICE)
    guesses = torch.tensor([-7, 3, 2, 1, 4, 9, 6, 7, -1, -1], device=KERNEL_DEVICE)
    cases = {
        0: (0, []),
        3: (1, [3, 2, 1]),  # 1 2 3
        1: (4, [4, 5, 6]),  # 4, not 5, 6
        2: (6, [6, 7, 3]),  # 6 7, not 0
        # What could not be drawn was read as token 0; what the target could not draw is nobody's guess.
        4: (7, [7, 8, -1]),
    }
    first = [row for row, _ in cases.values()]
    places = [[*its, -1, -1, -1][:3] for _, its in cases.values()]
    found = ints([77] * 5)
    count_accepted(drawn, ints(first), guesses, ints(places), found)
    assert found.tolist() == [0, 3, 1, 2, 2]
    none = ints([77])
    count_accepted(drawn, ints([10]), guesses, ints([[9]]), none)
    assert none.tolist() == [0]


@pytest.mark.parametrize("seed", range(20 if has_gpu else 3))
def test_places_of_guesses(seed: int):
    from foreword.backends.cuda.kernels.chains import ChainLevels, ChainStarts, compute_chain_levels

    rng = np.random.default_rng(seed)
    requests, room, levels = 5, 8, 4
    lengths, behind = rng.integers(1, 30, requests), rng.integers(0, 5, requests)
    steps = rng.integers(1, levels + 1, requests)
    ends = lengths + behind + rng.integers(0, 6, requests)
    stems = rng.integers(0, 1 << 63, requests, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
    tables, wanted = rng.permutation(100)[: 8 * 10].reshape(8, 10), rng.integers(0, 9, requests)

    def padded(values: np.ndarray) -> Tensor:
        return ints([*values.tolist(), *[0] * (room - requests)])

    stem = torch.zeros(room, dtype=torch.int64, device=KERNEL_DEVICE)
    stem[:requests] = key_tensor(stems)
    of = ChainStarts(*map(padded, (wanted, behind, lengths, steps, ends)), stem)
    found = ChainLevels.empty(levels, room, KERNEL_DEVICE)
    compute_chain_levels(of, ints(tables.tolist()), SIZE, SPARE, found)
    assert found.last[:requests].tolist() == (wanted + behind).tolist()
    for request in range(room):
        for level in range(levels):
            slot = int(found.slots[level, request])
            if request >= requests or level + 1 >= steps[request]:
                assert slot == SPARE
                continue
            position = int(lengths[request] + behind[request] + level)
            assert int(found.positions[level, request]) == position
            own = tables[request, min(position // SIZE, 9)] * SIZE + position % SIZE
            assert slot == (own if position < ends[request] else SPARE)
    at = (lengths + behind)[None, :] + np.arange(levels)[:, None]
    keys = key_tensor(extend_keys(stems, at), KERNEL_DEVICE)
    assert torch.equal(found.keys[:, :requests], keys)


def test_levels_are_taken_one_after_the_other():
    from foreword.backends.cuda.kernels.chains import ChainLevels, Level, take_level

    most, room, half = 3, 2, 5
    numbers = torch.arange(most * room, dtype=torch.int32, device=KERNEL_DEVICE).view(most, room)
    places = ChainLevels(ints([0, 0]), numbers.long() + 100, numbers + 200, numbers + 300)
    cosines = torch.rand((most, room, half), device=KERNEL_DEVICE)
    sines, chain = cosines + 1, torch.full((most, room), 77, device=KERNEL_DEVICE)
    levels, into = ints([0] * room), Level.empty(room, half, KERNEL_DEVICE)
    drawn = [[5, -1], [6, 7], [-1, 8]]
    for level, tokens in enumerate(drawn):
        ids = torch.tensor(tokens, device=KERNEL_DEVICE)
        take_level(levels, ids, places, (cosines, sines), chain, into)
        assert levels.tolist() == [level + 1] * room
        assert chain[: level + 1].tolist() == drawn[: level + 1]
        assert into.tokens.tolist() == [max(token, 0) for token in tokens], (
            "one that is not there is read as 0"
        )
        assert torch.equal(into.position, places.positions[level]) and torch.equal(
            into.slot, places.slots[level]
        )
        assert torch.equal(into.prefix_len, places.positions[level] + 1)
        assert torch.equal(into.cosine, cosines[level]) and torch.equal(into.sine, sines[level])
        assert level + 1 == most or torch.equal(into.key, places.keys[level + 1])
