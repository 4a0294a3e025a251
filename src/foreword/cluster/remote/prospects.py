"""What may come soon, for all requests of a pass."""

from collections.abc import Sequence

from foreword.cluster.remote.pairing import Pairing
from foreword.cluster.remote.peer import Peer
from foreword.cluster.remote.waiting import UNKNOWN_SECONDS, Prospect
from foreword.speculation.drafting import Ask

FIRST_ANSWER = 0.05
"""Seconds after which a node is late of which nobody knows what it usually takes."""

_OVERDUE = 0.25
"""Of the usual time, what is expected to be left for what should be there already."""


Group = tuple[str, int, int, bool]
"""Node, levels at hand, levels wanted, and whether a chain goes on that has begun."""


def prospects_of(pairs: Sequence[tuple[Ask, Pairing | None]], now: float) -> dict[Group, Prospect]:
    """What is on its way, for requests that are alike together."""
    counts: dict[Group, int] = {}
    first: dict[Group, Pairing] = {}
    for ask, pairing in pairs:  # at every level that comes, so whoever waits for nothing is left out first
        if pairing is None or pairing.is_all or not may_come(pairing) or _is_late(pairing, now):
            continue
        at_hand, wanted = pairing.behind(ask.request).depth, min(ask.max_depth, ask.max_nodes)
        if at_hand < wanted:
            key = (pairing.peer.name, at_hand, wanted, pairing.asked_at is None)
            counts[key] = counts.get(key, 0) + 1
            first.setdefault(key, pairing)
    return {key: _prospect(first[key], key[1], key[2], count, now) for key, count in counts.items()}


def _is_late(pairing: Pairing, now: float) -> bool:
    """Whether a first level should have come long ago: nobody waits for it, and others are waited for without it."""
    late_after = pairing.peer.estimates.late_after or FIRST_ANSWER
    return pairing.asked_at is not None and now - pairing.asked_at >= late_after


def may_come(pairing: Pairing) -> bool:
    """Whether more is on its way: from a node that speaks, for a text that it has read."""
    peer: Peer = pairing.peer
    return pairing.is_warm and not pairing.is_all and not peer.breaker.is_open and not peer.waited_in_vain


def _prospect(pairing: Pairing, at_hand: int, wanted: int, requests: int, now: float) -> Prospect:
    estimates = pairing.peer.estimates
    survival = estimates.survival(wanted)
    level, first = _known(estimates.level_seconds), _known(estimates.first_seconds)
    late_after = estimates.late_after or FIRST_ANSWER
    if pairing.asked_at is None:  # the chain goes on
        return Prospect(
            requests,
            at_hand,
            wanted,
            survival,
            _left(level, now - pairing.level_at),
            level,
            late_after,
        )
    since = now - pairing.asked_at
    return Prospect(
        requests,
        at_hand,
        wanted,
        survival,
        _left(first, since),
        level,
        max(late_after - since, 0.0),
    )


def _known(seconds: float | None) -> float:
    return (
        UNKNOWN_SECONDS if seconds is None else seconds
    )  # levels of a lookup take no time: they come at once


def _left(usual: float, since: float) -> float:
    return max(usual - since, _OVERDUE * usual)
