"""First half of the sampling pipeline: bias, bad words, penalties, minimum length and allowed tokens.

Each row is corrected with its own history: the committed tokens, then the draft tokens up to the row. Grammar masks
have been applied before. Only affected (row, token) pairs are computed; a batch without corrections is not copied.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from foreword.acceptance.batch import NEVER, Judgement
from foreword.acceptance.request import RequestSampler
from foreword.acceptance.rules.trees import NO_TOKEN, Bools, Floats, Ints
from foreword.acceptance.transfer import uploaded


@dataclass(frozen=True)
class Touched:
    """The distinct (row, token) pairs that a bias or a penalty may change, with what the change depends on."""

    rows: Ints  # [pairs]
    ids: Ints  # [pairs], the token
    bias: Floats  # [pairs]
    seen: Bools  # [pairs], whether the token is in the row's history, prompt included
    generated: Floats  # [pairs], the token's count in the generated part of the history


def corrected_logits(judged: Judgement) -> Tensor:
    """Return the logits after all corrections: the same tensor if there are none, otherwise a copy."""
    if not any(judged.records["corrects"].tolist()):
        return judged.logits
    touched = touched_pairs(judged)
    banned_rows, banned_ids = banned_pairs(judged)
    allowed_rows, allowed_ids = pairs_per_row(judged, lambda sampler: sampler.allowed_ids)
    logits = judged.logits.clone(memory_format=torch.contiguous_format)
    if len(touched.rows):
        where = index(logits, touched.rows, touched.ids)
        logits[where] = adjusted(logits[where].double(), touched, judged).float()
    never = torch.full((), NEVER, device=logits.device)  # on the device: a Python number would synchronise
    if len(banned_rows):
        logits[index(logits, banned_rows, banned_ids)] = never
    if len(allowed_rows):
        where = index(logits, allowed_rows, allowed_ids)
        allowed_logits = logits[where]
        logits[index(logits, np.unique(allowed_rows))] = never
        logits[where] = allowed_logits
    return logits


def adjusted(values: Tensor, touched: Touched, judged: Judgement) -> Tensor:
    """Return the logits of the pairs after bias, repetition, frequency and presence penalties, in this order."""

    def column(array: Floats) -> Tensor:
        return uploaded(torch.from_numpy(array), values.device)

    values = values + column(touched.bias)
    repetition = column(np.where(touched.seen, judged.per_row("repetition")[touched.rows], 1.0))
    values = torch.where(values > 0, values / repetition, values * repetition)
    values = values - column(judged.per_row("frequency")[touched.rows] * touched.generated)
    return values - column(judged.per_row("presence")[touched.rows] * (touched.generated > 0))


def touched_pairs(judged: Judgement) -> Touched:
    """Return all pairs that a bias or a penalty may change, from the request's lists and the row's draft path."""
    vocab = judged.logits.shape[1]
    bias_rows, bias_ids, bias = entries_per_row(
        judged, lambda sampler: sampler.bias_ids, lambda sampler: sampler.bias_values
    )
    seen_rows, seen_ids, generated = entries_per_row(
        judged, lambda sampler: sampler.seen.ids, lambda sampler: sampler.seen.generated.astype(np.float64)
    )
    path_rows, path_ids = draft_pairs(judged)
    # A pair as one number: row * vocab + id. `pair_of` has the index in `pairs` of each entry of the three lists.
    pairs, pair_of = np.unique(
        np.concatenate([bias_rows, seen_rows, path_rows]) * vocab
        + np.concatenate([bias_ids, seen_ids, path_ids]),
        return_inverse=True,
    )
    of_bias, of_history = pair_of[: len(bias_rows)], pair_of[len(bias_rows) :]
    # Occurrences in the generated text of each entry of the history; a draft token on the path counts once.
    times = np.concatenate([generated, np.ones(len(path_rows))])
    return Touched(
        rows=pairs // vocab,
        ids=pairs % vocab,
        bias=np.bincount(of_bias, bias, len(pairs)).astype(np.float64),
        seen=np.bincount(of_history, minlength=len(pairs)) > 0,
        generated=np.bincount(of_history, times, len(pairs)).astype(np.float64),
    )


def draft_pairs(judged: Judgement) -> tuple[Ints, Ints]:
    """Return (row, token) for every draft token on the row's path, in requests with penalties."""
    penalised = (judged.records["repetition"] != 1) | (judged.records["frequency"] != 0)
    penalised |= judged.records["presence"] != 0
    trees, vocab = judged.trees, judged.logits.shape[1]
    if not penalised.any():
        return np.empty(0, np.int64), np.empty(0, np.int64)
    path = trees.path_tokens
    # Ids outside the vocabulary have no logit: NO_TOKEN, and invalid ids of a drafter.
    is_penalised = (path >= 0) & (path < vocab) & penalised[trees.request_of_row][:, None]
    rows, levels = np.nonzero(is_penalised)
    return rows, path[rows, levels]


def banned_pairs(judged: Judgement) -> tuple[Ints, Ints]:
    """Return (row, id) of forbidden tokens: those that complete a bad word, and end tokens before `min_tokens`."""
    word_rows, word_ids = completing_tokens(judged)
    end_rows, end_ids = pairs_per_row(
        judged, lambda sampler: sampler.end_ids if sampler.record["min_tokens"] > 0 else None
    )
    generated = judged.per_row("generated")[end_rows] + judged.trees.depths[end_rows]
    is_too_short = generated < judged.per_row("min_tokens")[end_rows]
    rows = np.concatenate([word_rows, end_rows[is_too_short]])
    ids = np.concatenate([word_ids, end_ids[is_too_short]])
    return rows, ids


def pairs_per_row(judged: Judgement, ids_of: Callable[[RequestSampler], Ints | None]) -> tuple[Ints, Ints]:
    """Return (row, id) for every row of a batch and every id in the list of its request; None: no ids."""
    no_ids = np.empty(0, np.int64)
    lists = []  # [requests]
    for sampler in judged.samplers:
        ids = ids_of(sampler)
        lists.append(no_ids if ids is None else ids)
    rows, entry = judged.trees.spread(np.array([len(ids) for ids in lists]))
    return rows, np.concatenate([*lists, no_ids])[entry]


def entries_per_row(
    judged: Judgement, ids_of: Callable[[RequestSampler], Ints], values_of: Callable[[RequestSampler], Floats]
) -> tuple[Ints, Ints, Floats]:
    """Return (row, id, value) for every row of a batch and every entry in the lists of its request."""
    ids = [ids_of(sampler) for sampler in judged.samplers]
    values = [values_of(sampler) for sampler in judged.samplers]
    rows, entry = judged.trees.spread(np.array(list(map(len, ids))))
    return rows, np.concatenate(ids)[entry], np.concatenate(values)[entry]


def index(logits: Tensor, *arrays: Ints) -> tuple[Tensor, ...]:
    """Return the arrays on the device of the logits, as an index into them."""
    return tuple(uploaded(torch.from_numpy(array), logits.device) for array in arrays)


def completing_tokens(judged: Judgement) -> tuple[Ints, Ints]:
    """Return (row, token) pairs that would complete a bad word, given each row's draft path."""
    longest = max((sampler.bad_words.shape[1] for sampler in judged.samplers), default=0)
    if not longest:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    words = np.concatenate([_widen(sampler.bad_words, longest) for sampler in judged.samplers])
    rows, entry = judged.trees.spread(np.array([len(sampler.bad_words) for sampler in judged.samplers]))
    word = words[entry]  # [pairs, longest], one pair for each row of a request and each of its bad words
    history = recent_tokens(judged, longest - 1)[rows]  # [pairs, longest - 1]
    start = word[:, :-1]  # NO_TOKEN is padding
    completes = np.all((start == NO_TOKEN) | (start == history), axis=1)
    return rows[completes], word[completes, -1]


def recent_tokens(judged: Judgement, width: int) -> Ints:
    """Return the newest tokens up to each row, [rows, width]: committed tokens, then its draft path; newest last."""
    tails = [_widen(sampler.tail[None, :], width) for sampler in judged.samplers]
    committed = np.concatenate(tails)[judged.trees.request_of_row]
    draft = judged.trees.path_tokens[:, ::-1]  # [rows, maximum depth], padding first, the row's token last
    tokens = np.concatenate([committed, draft], axis=1)  # [rows, width + maximum depth]
    depth = judged.trees.depths[:, None]
    # Of the last `width` columns, those of the path stay. The others have padding, whose length depends on the row:
    # they take the committed tokens before it.
    column = np.arange(tokens.shape[1] - width, tokens.shape[1])[None, :]
    padding = draft.shape[1] - depth
    source = np.where(column >= tokens.shape[1] - depth, column, column - padding)
    return np.take_along_axis(tokens, source, axis=1)


def _widen(sequences: Ints, width: int) -> Ints:
    """Pad token sequences [sequences, length] with NO_TOKEN on the left to [sequences, width]."""
    wide = np.full((len(sequences), width), NO_TOKEN, np.int64)
    wide[:, width - sequences.shape[1] :] = sequences
    return wide
