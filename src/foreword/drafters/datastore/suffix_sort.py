"""Suffixes in order of their first tokens, by prefix doubling in numpy.

Numbers are sorted together with the place that they came from, packed into 64 bits: numpy sorts those several times as
fast as it finds the order of an array.
"""

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]
Ints = npt.NDArray[np.int32]

MOST_TOKENS = 1 << 30
"""Starts that can be sorted at once: 64 bits have room for the token and the place of each."""


def sorted_suffixes(tokens: npt.NDArray[np.integer], count: int, depth: int) -> npt.NDArray[np.int64]:
    """The starts 0 .. count - 1 in order of the `depth` tokens from each on; equals in order of their starts.

    `tokens` go on for at least `depth` behind the last start, or end there. Sorting by 1, 2, 4, ... tokens takes
    the same few rounds for any text, however it repeats itself; starts that differ from all others take no part.
    """
    if len(tokens) > MOST_TOKENS:
        raise ValueError(f"at most {MOST_TOKENS} tokens are sorted at once, not {len(tokens)}")
    keys, length = _first_keys(tokens, depth)
    order, _ = _sorted_places(keys)
    ranks = np.empty(
        len(order), np.int32
    )  # of every start by `length` tokens: where those like it begin in `order`
    unsettled = _rank(order, keys, np.arange(len(order), dtype=np.int32), ranks)
    while length < depth and len(unsettled):
        starts = order[unsettled]
        behind = np.zeros(len(starts), np.uint64)  # 0: behind the end
        there = starts < len(ranks) - length
        behind[there] = ranks[starts[there] + length].astype(np.uint64) + 1
        # First by what stands behind, then, keeping that order, by what stands before.
        by_last = _sorted_places(behind.copy())[0]
        by_first, firsts = _sorted_places(ranks[starts[by_last]].astype(np.uint64))
        placed = by_last[by_first]
        order[unsettled] = starts[placed]
        firsts <<= np.uint64(32)
        firsts |= behind[placed]
        unsettled = _rank(order, firsts, unsettled, ranks)
        length *= 2
    return order[order < count].astype(np.int64)


def _first_keys(tokens: npt.NDArray[np.integer], depth: int) -> tuple[Words, int]:
    """Keys for every start, and how many tokens they stand for: two, if there is room."""
    keys = tokens.astype(np.uint64) + np.uint64(1)  # 0: behind the end
    bits = int(keys.max(initial=0)).bit_length()
    if depth < 2 or 2 * bits + len(keys).bit_length() > 64:
        return keys, 1
    return keys << np.uint64(bits) | np.append(keys[1:], np.uint64(0)), 2


def _sorted_places(keys: Words) -> tuple[Ints, Words]:
    """Where the keys stand in order, equals in the order of their places; and the keys in order, in their memory."""
    bits = np.uint64(len(keys).bit_length())
    keys <<= bits
    keys |= np.arange(len(keys), dtype=np.uint64)
    keys.sort()
    places = (keys & ((np.uint64(1) << bits) - np.uint64(1))).astype(np.int32)
    keys >>= bits
    return places, keys


def _rank(order: Ints, keys: Words, places: Ints, ranks: Ints) -> Ints:
    """Give the starts at these places of the order, whose keys stand in order, their ranks; returns the places of those
    that have a rank together with others."""
    if not len(places):
        return places
    begins = np.empty(len(keys), bool)
    begins[0] = True
    np.not_equal(keys[1:], keys[:-1], out=begins[1:])
    first_of_each = places[begins]
    group = np.cumsum(begins, dtype=np.int32) - 1
    ranks[order[places]] = first_of_each[group]
    ends = np.append(begins[1:], True)
    shared: Ints = places[~(begins & ends)]
    return shared
