"""Bad words: the last token of one is forbidden after a row whose history ends in the rest of it."""

import numpy as np

from foreword.acceptance.batch import Judgement
from foreword.acceptance.rules.trees import NO_TOKEN, Ints


def completing_tokens(judged: Judgement) -> tuple[Ints, Ints]:
    """(row, token) pairs that would complete a bad word, with every row's own draft path in its history."""
    longest = max((sampler.bad_words.shape[1] for sampler in judged.samplers), default=0)
    if not longest:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    words = np.concatenate([_widen(sampler.bad_words, longest) for sampler in judged.samplers])
    rows, entry = judged.trees.spread(np.array([len(sampler.bad_words) for sampler in judged.samplers]))
    word = words[entry]  # [pairs, longest]
    history = recent_tokens(judged, longest - 1)[rows]  # [pairs, longest - 1]
    start = word[:, :-1]
    completes = np.all((start == NO_TOKEN) | (start == history), axis=1)
    return rows[completes], word[completes, -1]


def recent_tokens(judged: Judgement, width: int) -> Ints:
    """[rows, width], the newest tokens up to each row, newest last: committed ones, then its draft path."""
    tails = [_widen(sampler.tail[None, :], width) for sampler in judged.samplers]
    committed = np.concatenate(tails)[judged.trees.request_of_row]
    draft = judged.trees.path_tokens[:, ::-1]  # the row's own token last, padding first
    line = np.concatenate([committed, draft], axis=1)
    # A shallow row has padding between its committed tokens and its path: shift those tokens over it.
    depth = judged.trees.depths[:, None]
    place = np.arange(line.shape[1] - width, line.shape[1])[None, :]
    padding = draft.shape[1] - depth
    source = np.where(place >= line.shape[1] - depth, place, place - padding)
    return np.take_along_axis(line, source, axis=1)


def _widen(sequences: Ints, width: int) -> Ints:
    wide = np.full((len(sequences), width), NO_TOKEN, np.int64)
    wide[:, width - sequences.shape[1] :] = sequences
    return wide
