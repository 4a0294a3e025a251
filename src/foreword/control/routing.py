"""Of several drafters, those with which the batch makes the most tokens per second."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from foreword.control.value import Pass, longer

FEW_DRAFTERS, BETTER = 3, 1.01
"""Drafters of which all combinations are compared, and the ratio at which another one replaces that in use."""

MethodSeconds = Callable[[str, float, int], float]
"""Expected time of a drafter's call for so many levels and requests."""


@dataclass(frozen=True)
class Bid:
    """What a drafter would do for one request."""

    method: str
    tokens: float  # draft tokens that are expected to be accepted
    rows: float  # that are expected to be verified
    answers: float  # chance that there is a draft
    depth: float  # levels that it is expected to work for


@dataclass(frozen=True)
class Seats:
    """Requests of the same cohort, and the drafters that bid for each."""

    count: int
    bids: Sequence[Bid]


def best_together(
    here: Pass, seats: Sequence[Seats], in_use: frozenset[str], draft_seconds: MethodSeconds
) -> frozenset[str]:
    """Return the drafters with the most tokens per second, each request having one of them.

    One with a gain alone may have none beside another: its call costs the same for the few requests that are left.
    """
    methods = sorted({bid.method for seat in seats for bid in seat.bids})
    if len(methods) < 2:
        return frozenset(methods)
    rates = {some: _rate(here, seats, some, draft_seconds) for some in _combined(methods)}
    best = max(rates, key=lambda some: rates[some])
    kept = in_use & frozenset(methods)
    return kept if kept in rates and BETTER * rates[kept] >= rates[best] else best


def _combined(methods: Sequence[str]) -> Iterator[frozenset[str]]:
    sizes = range(1, len(methods) + 1) if len(methods) <= FEW_DRAFTERS else (1, len(methods))
    return (frozenset(some) for size in sizes for some in combinations(methods, size))


def _rate(here: Pass, seats: Sequence[Seats], methods: frozenset[str], draft_seconds: MethodSeconds) -> float:
    """Return the tokens per second if every request gets the drafter of these that does most for it."""
    drawn = max(here.drawn, 1)
    row = (here.after(drawn) - here.plain) / drawn
    tokens, rows, answers = here.drawn, 0.0, 0.0
    asked: dict[str, tuple[int, float]] = {}  # requests and levels
    for seat in seats:
        bids = [bid for bid in seat.bids if bid.method in methods]
        if not bids:
            continue
        bid = max(bids, key=lambda one: one.tokens * here.per_token - one.rows * row)
        count, depth = asked.get(bid.method, (0, 0))
        asked[bid.method] = (count + seat.count, max(depth, bid.depth))
        tokens += seat.count * bid.tokens
        rows += seat.count * bid.rows
        answers += seat.count * bid.answers
    drafting = sum(draft_seconds(method, depth, count) for method, (count, depth) in asked.items())
    asks = sum(count for count, _ in asked.values())
    return tokens / (here.plain + longer(here, asks, answers, rows) + drafting)
