"""Which of a pass's states a head keeps of the requests that it is told of."""

from types import SimpleNamespace

import numpy as np
import pytest

from foreword.backends.batch import ConcatenatedStates, Tap
from foreword.drafters.heads.in_pages import KEPT_ALONE, KEPT_TOGETHER, HeadInPages
from foreword.kv.states import States
from foreword.speculation.observing import KeptStates

TAPS = (Tap(1), Tap(4))


def kept_by_head(of_pass: ConcatenatedStates, places: list[tuple[int, int]]) -> list[tuple[States, int]]:
    """What it keeps of requests whose rows are at these places: first row and number."""
    head = object.__new__(HeadInPages)
    head._taps = TAPS
    commits = [SimpleNamespace(hidden=KeptStates(of_pass, first, count, ())) for first, count in places]
    return list(head._tapped_states(commits))


@pytest.mark.parametrize("rows", [3, KEPT_ALONE, KEPT_ALONE + 1, KEPT_TOGETHER, KEPT_TOGETHER + 1])
@pytest.mark.parametrize("places", [[(1, 2)], [(0, 1), (1, 2)]])
def test_the_states_of_a_long_pass_are_not_kept_for_few_rows(rows: int, places: list[tuple[int, int]]):
    memory = np.arange(rows * 6, dtype=np.float32).reshape(rows, 6)
    kept = kept_by_head(ConcatenatedStates(TAPS, memory), places)
    for (states, at), (first, count) in zip(kept, places, strict=True):
        assert np.array_equal(states[at : at + count], memory[first : first + count])
    is_shared = all(states is memory for states, _ in kept)
    assert is_shared == (rows <= (KEPT_ALONE if len(places) == 1 else KEPT_TOGETHER))
    if not is_shared:
        assert not any(np.shares_memory(states, memory) for states, _ in kept)
        assert [len(states) for states, _ in kept] == [count for _, count in places]
