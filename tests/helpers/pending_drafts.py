"""Drafts whose tokens are still to come, as a device hands them in."""

from collections.abc import Sequence

import torch

from foreword.acceptance.arrivals import OnItsWay
from foreword.speculation.draft import Draft, PendingDraft


def left_pending(drafts: Sequence[Draft]) -> list[PendingDraft]:
    """The same drafts, of one source, in which other numbers lie between theirs; a token of -1 was not to be had."""
    tokens = torch.tensor(
        [-7, *(number for draft in drafts for token in draft.tokens for number in (token, -7))]
    )
    source, place, pending = OnItsWay(tokens, tokens), 1, []
    for draft in drafts:
        places = range(place, place + 2 * len(draft), 2)
        place += 2 * len(draft)
        pending.append(PendingDraft.of(source, places, draft.committed_len, draft.epoch, draft.parents))
    return pending
