"""Drafts whose tokens are still to come, as a device hands them in."""

from collections.abc import Sequence

import torch

from foreword.acceptance.transfer import HostCopy
from foreword.speculation.draft import DeviceTokens, Draft


def left_pending(drafts: Sequence[Draft]) -> list[Draft]:
    """The same drafts, of one source, in which other numbers lie between theirs; a token of -1 was not to be had."""
    tokens = torch.tensor(
        [-7, *(number for draft in drafts for token in draft.tokens for number in (token, -7))]
    )
    source, place, pending = HostCopy(tokens, tokens), 1, []
    for draft in drafts:
        tokens_there = DeviceTokens(source, tuple(range(place, place + 2 * len(draft), 2)))
        place += 2 * len(draft)
        pending.append(Draft.on_device(tokens_there, draft.committed_len, draft.epoch, draft.parents))
    return pending
