"""Slow, obviously right merging, to compare fast tokenizers with."""

from collections.abc import Mapping, Sequence
from itertools import pairwise


def merge_by_rank(symbols: Sequence[str], ranks: Mapping[tuple[str, str], int]) -> list[str]:
    """Byte-level BPE: merge the pair with the lowest rank, leftmost first, until no pair has one."""
    pieces = list(symbols)
    while True:
        ranked = [(ranks[pair], i) for i, pair in enumerate(pairwise(pieces)) if pair in ranks]
        if not ranked:
            return pieces
        _, place = min(ranked)
        pieces[place : place + 2] = [pieces[place] + pieces[place + 1]]


def merge_by_score(symbols: Sequence[str], scores: Mapping[str, float]) -> list[str]:
    """Sentencepiece BPE: form the entry with the highest score, leftmost first, until none can be formed."""
    pieces = list(symbols)
    while True:
        joined = [left + right for left, right in pairwise(pieces)]
        scored = [(-scores[text], i) for i, text in enumerate(joined) if text in scores]
        if not scored:
            return pieces
        _, place = min(scored)
        pieces[place : place + 2] = [pieces[place] + pieces[place + 1]]
