"""Selects the draft tokens that a batch verifies."""

from collections.abc import Mapping, Sequence
from itertools import chain, count, repeat
from math import inf
from operator import neg
from typing import NamedTuple, cast

from foreword.control.requests import RequestState
from foreword.control.service import ServedRequest
from foreword.control.value import Pass
from foreword.speculation.draft import Draft
from foreword.speculation.requests import PassEntry


class Offer(NamedTuple):
    """A request's draft with the acceptance probability of each node."""

    order: int  # independent of the batch order
    draft: Draft
    survival: Sequence[float]  # [nodes], never above the parent's


def trimmed(
    entries: Sequence[PassEntry],
    drafts: Sequence[Draft],
    states: Mapping[int, RequestState],
    here: Pass | None,
) -> list[Draft]:
    """Return the nodes that maximise the batch's tokens per second; none of shadow drafts.

    Under *token* and *block* sampled nodes are never cut: their depth was fixed before sampling.
    """
    found, limit = list(drafts), tightest_limit(entries)
    offers: dict[int, Offer] = {}  # by place
    spent: dict[str, float] = {}  # seconds by drafter
    rows, tokens = 0, 0.0  # of whole drafts
    for place, (entry, draft) in enumerate(zip(entries, drafts, strict=True)):
        size = len(draft.parents)
        if not size:
            continue
        number = entry.request.request_id
        state = states.get(number)
        flight = None if state is None else state.flight
        if state is None or flight is None:
            rows += size
            continue
        arm, benefit, is_whole = flight.arm, flight.benefit, bool(draft.drawn) and not state.is_coupled
        chances = arm.option.estimate.rates.survivals(draft, arm.fit.shift)
        flight.draft, flight.useful = draft, draft.depth
        if not draft.confidence:
            arm.is_stopping = False  # no confidences for this request
        elif not is_whole:
            flight.useful = arm.useful_levels(draft, chances, benefit)
            if not flight.stops:  # deeper levels count by confidence alone, as in drafts that end there
                flight.depth = arm.own_end(chances, benefit)
                flight.useful = min(flight.useful, flight.depth)
        if flight.is_shadow:
            found[place] = draft.within(0, 0)
            continue
        if flight.verified and draft.is_chain and limit is None and not is_whole:
            levels = min(flight.verified, flight.useful)
            found[place], is_whole = draft.within(levels, levels), True
        if is_whole:
            rows, tokens = rows + len(found[place]), tokens + sum(chances[: len(found[place])])
        elif len(entries) > 1 or limit is not None or draft.confidence or size > benefit.useful:
            offers[place] = Offer(number, draft, chances)
            spent[arm.plan.method] = benefit.draft_seconds
    if offers and here is not None:
        beside = Pass(here.drawn + tokens, here.rows + rows, here.seconds, here.prompts)
        chosen = choose(list(offers.values()), beside, sum(spent.values()), limit)
        for place, draft in zip(offers, chosen, strict=True):
            found[place] = draft
    return found


def tightest_limit(entries: Sequence[PassEntry]) -> float | None:
    """Return the tightest step limit of these requests in seconds; None: no limit."""
    requests = cast(list[ServedRequest], [entry.request for entry in entries])
    return min([one.step_limit for one in requests if one.step_limit is not None], default=None)


def choose(
    offers: Sequence[Offer], here: Pass, spent: float, most_seconds: float | None = None
) -> list[Draft]:
    """Return for every offer the nodes that maximise the batch's tokens per second.

    Nodes are taken in order of probability. A child is never likelier than its parent, so that the result is a tree.
    `spent` is the drafting time, which raises the required gain. The step stays within `most_seconds`.
    """
    nodes: list[tuple[float, int, int, int]] = []  # (-probability, order of the request, node, place)
    for place, offer in enumerate(offers):
        nodes += zip(map(neg, offer.survival), repeat(offer.order), count(), repeat(place))
    nodes.sort()
    seconds, rows, spent = here.seconds, here.rows, spent - here.prompts
    longer = chain(seconds[rows + 1 : rows + 1 + len(nodes)], repeat(seconds[-1], len(nodes)))
    tokens, best, limit = here.drawn, 0, inf if most_seconds is None else most_seconds
    best_rate = tokens / (seconds[min(rows, len(seconds) - 1)] + spent)
    for rank, (node, step) in enumerate(zip(nodes, longer, strict=False), start=1):
        tokens -= node[0]
        takes = step + spent
        if takes > limit:
            break
        if tokens > best_rate * takes:
            best, best_rate = rank, tokens / takes
    if best == len(nodes):
        return [offer.draft for offer in offers]
    chosen: list[list[int]] = [[] for _ in offers]
    for _, _, number, place in nodes[:best]:
        chosen[place].append(number)
    kept = []
    for offer, some in zip(offers, chosen, strict=True):
        draft, size = offer.draft, len(some)
        if size < len(draft.parents):
            draft = draft.within(size, size) if draft.is_chain else draft.keep(some.__contains__)
        kept.append(draft)
    return kept
