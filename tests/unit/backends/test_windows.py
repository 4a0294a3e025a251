"""What a row with a sliding window sees."""

import torch

from foreword.backends.torch.attention import GroupView, windowed

EMPTY = 99


def seen(visible: list[list[int]], window: int) -> tuple[list[list[int]], list[int]]:
    """KV rows that every row sees, and the slots that are read, of one request whose slots are its KV rows."""
    mask = torch.zeros(1, len(visible), 8, dtype=torch.bool)
    for row, positions in enumerate(visible):
        mask[0, row, positions] = True
    view = GroupView(torch.arange(len(visible)).unsqueeze(0), torch.arange(8).unsqueeze(0), mask)
    [narrow] = windowed([view], window, EMPTY)
    return [row.nonzero().flatten().tolist() for row in narrow.visible[0]], narrow.slots[0].tolist()


def test_a_row_sees_itself_and_the_positions_just_before_it():
    rows, slots = seen([[0, 1, 2, 3], [0, 1, 2, 3, 4]], window=3)
    assert rows == [[1, 2, 3], [2, 3, 4]]
    assert slots == [EMPTY, 1, 2, 3, 4, EMPTY, EMPTY, EMPTY]  # nothing is read that nobody sees


def test_a_node_sees_the_newest_positions_of_its_own_path():
    # Three committed rows; nodes 3 and 4 are siblings, 5 is below 3, and 7 below 5: row 7 stands at position 5.
    rows, _ = seen([[0, 1, 2, 3, 5, 7], [0, 1, 2, 4]], window=4)
    assert rows == [[2, 3, 5, 7], [0, 1, 2, 4]]


def test_without_a_window_nothing_changes():
    view = GroupView(torch.zeros(1, 1), torch.zeros(1, 8), torch.ones(1, 1, 8, dtype=torch.bool))
    assert windowed([view], None, EMPTY) == [view]
