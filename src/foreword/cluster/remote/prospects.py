"""What may come soon, for all requests of a pass."""

from collections.abc import Sequence

from foreword.cluster.remote.pairing import Pairing
from foreword.cluster.remote.waiting import UNKNOWN_SECONDS, Prospect
from foreword.speculation.drafting import Ask

FIRST_ANSWER = 0.05
"""Seconds after which a node is late of which nobody knows what it usually takes."""

_OVERDUE = 0.25
"""Of the usual time, what is expected to be left for what should be there already."""


Group = tuple[str, int, int, bool]
"""Node, levels at hand, levels wanted, and whether a chain goes on that has begun."""


def prospects_of(
    pairs: Sequence[tuple[Ask, Pairing | None]], now: float, shadow: int
) -> dict[Group, Prospect]:
    """What is on its way, for requests that are alike together; `shadow` as in `may_come`."""
    counts: dict[Group, int] = {}
    first: dict[Group, Pairing] = {}
    for ask, pairing in pairs:  # at every level that comes, so whoever waits for nothing is left out first
        if pairing is None or not may_come(pairing, shadow) or _late_in(pairing, now) <= 0:
            continue
        at_hand, wanted = pairing.behind(ask.request).depth, min(ask.max_depth, ask.max_nodes)
        if at_hand < wanted:
            key = (pairing.peer.name, at_hand, wanted, pairing.asked_at is None)
            counts[key] = counts.get(key, 0) + 1
            first.setdefault(key, pairing)
    return {key: _prospect(first[key], key[1], key[2], count, now) for key, count in counts.items()}


def may_come(pairing: Pairing, shadow: int) -> bool:
    """Whether more is on its way that would be verified: from a node that speaks, for a text that it has read.

    A node in the shadow, whose first so many drafts are only compared, is never waited for.
    """
    if pairing.is_all or not pairing.is_warm:
        return False
    peer = pairing.peer
    return not peer.breaker.is_open and not peer.waited_in_vain and peer.estimates.judged >= shadow


def is_overdue(pairing: Pairing, now: float) -> bool:
    """Whether it owes an answer that nobody waits for any longer: it would be late."""
    return pairing.asked_at is not None and _late_in(pairing, now) < _left(pairing, now)


def _left(pairing: Pairing, now: float) -> float:
    """Seconds until the next level is expected."""
    estimates = pairing.peer.estimates
    if pairing.asked_at is None:  # the chain goes on
        usual, since = _known(estimates.level_seconds), now - pairing.level_at
    else:
        usual, since = _known(estimates.first_seconds), now - pairing.asked_at
    return max(usual - since, _OVERDUE * usual)


def _late_in(pairing: Pairing, now: float) -> float:
    """Seconds until the next level is late: from the ask on for a first one, from now on where a chain goes on."""
    late_after = pairing.peer.estimates.late_after or FIRST_ANSWER
    return late_after if pairing.asked_at is None else late_after - (now - pairing.asked_at)


def _prospect(pairing: Pairing, at_hand: int, wanted: int, requests: int, now: float) -> Prospect:
    estimates = pairing.peer.estimates
    level, survival = _known(estimates.level_seconds), estimates.survival(wanted)
    left, late_in = _left(pairing, now), _late_in(pairing, now)
    return Prospect(requests, at_hand, wanted, survival, left, level, late_in)


def _known(seconds: float | None) -> float:
    """Levels of a lookup take no time: they come at once."""
    return UNKNOWN_SECONDS if seconds is None else seconds
