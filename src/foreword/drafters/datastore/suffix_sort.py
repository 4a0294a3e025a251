"""Suffixes in order of their first tokens, by prefix doubling in numpy."""

import numpy as np
import numpy.typing as npt


def sorted_suffixes(tokens: npt.NDArray[np.integer], count: int, depth: int) -> npt.NDArray[np.int64]:
    """The starts 0 .. count - 1 in order of the `depth` tokens from each on; equals in order of their starts.

    `tokens` go on for at least `depth` behind the last start, or end there. Sorting by 1, 2, 4, ... tokens takes
    the same few rounds for any text, however it repeats itself.
    """
    ranks = np.unique(tokens, return_inverse=True)[1].astype(np.int64)
    length, order = 1, np.argsort(ranks, kind="stable")
    while length < depth:
        # A start's key is its rank by `length` tokens, then that of the start as far behind it; 0 behind the end.
        keys = ranks * (int(ranks.max(initial=0)) + 2)
        keys[:-length] += ranks[length:] + 1
        order = np.argsort(keys, kind="stable")
        in_order = keys[order]
        ranks[order] = np.cumsum(np.concatenate([[False], in_order[1:] != in_order[:-1]]))
        length *= 2
    return order[order < count]
