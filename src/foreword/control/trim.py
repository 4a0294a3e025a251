"""Which nodes of the drafts of a batch are verified."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from foreword.control.requests import RequestState
from foreword.control.service import served
from foreword.control.value import Pass
from foreword.speculation.draft import Draft
from foreword.speculation.requests import PassEntry


class Offer(NamedTuple):
    """A request's draft, and how likely each of its nodes is to be accepted."""

    order: int  # the same however the batch is ordered
    draft: Draft
    survival: Sequence[float]  # [nodes], never more than the parent's


def trimmed(
    entries: Sequence[PassEntry],
    drafts: Sequence[Draft],
    states: Mapping[int, RequestState],
    here: Pass | None,
) -> list[Draft]:
    """Return the nodes with which the batch makes the most tokens per second; of shadow drafts none.

    Under *token* and *block* drawn nodes are never cut: their depth was decided before they were drawn.
    """
    found = list(drafts)
    offers: list[Offer] = []
    places: list[int] = []
    rows, tokens, spent = 0, 0.0, {}
    limit = tightest_limit(entries)
    for place, (entry, draft) in enumerate(zip(entries, drafts, strict=True)):
        state = states.get(entry.request.request_id) if draft.parents else None
        flight = None if state is None else state.flight
        if state is None or flight is None:
            rows += len(draft)
            continue
        arm, benefit, is_whole = flight.arm, flight.benefit, bool(draft.drawn) and not state.is_coupled
        chances = arm.option.estimate.rates.survivals(draft, arm.fit.shift)
        flight.draft = draft
        flight.kept = draft.depth if is_whole else arm.levels_with_benefit(draft, chances, benefit)
        if arm.is_stopping and not draft.confidence:
            arm.is_stopping = False  # it has no confidences for this request
        if flight.is_shadow:
            found[place] = draft.within(0, 0)
            continue
        if flight.verified and draft.is_chain and limit is None and not is_whole:
            tried = min(flight.verified, flight.kept)
            found[place], is_whole = draft.within(tried, tried), True
        if is_whole:
            rows, tokens = rows + len(found[place]), tokens + sum(chances[: len(found[place])])
        elif len(entries) > 1 or limit is not None or draft.confidence or len(draft) > benefit.kept:
            offers.append(Offer(entry.request.request_id, draft, chances))
            places.append(place)
            spent[arm.plan.method] = benefit.draft_seconds
    if offers and here is not None:
        beside = replace(here, rows=here.rows + rows, drawn=here.drawn + tokens) if rows else here
        for place, draft in zip(places, choose(offers, beside, sum(spent.values()), limit), strict=True):
            found[place] = draft
    return found


def tightest_limit(entries: Sequence[PassEntry]) -> float | None:
    """Return the seconds that drafts may make a step for these requests; None: no bound."""
    limits = [one for entry in entries if (one := served(entry.request).step_limit) is not None]
    return min(limits, default=None)


def choose(
    offers: Sequence[Offer], here: Pass, spent: float, most_seconds: float | None = None
) -> list[Draft]:
    """Return, of every draft, the nodes with which the batch makes the most tokens per second; [offers].

    Nodes are taken in the order of their chance. A child is never likelier than its parent, so that the result is a
    tree. `spent` is the time of drafting: a step that was expensive should bring more. Draft tokens make the step no
    longer than `most_seconds`.
    """
    nodes = [
        (-chance, offer.order, node, place)
        for place, offer in enumerate(offers)
        for node, chance in enumerate(offer.survival)
    ]
    nodes.sort()
    seconds, rows, last, spent = here.seconds, here.rows, len(here.seconds) - 1, spent - here.prompts
    tokens, best = here.drawn, 0
    best_rate = tokens / (seconds[min(rows, last)] + spent)
    for count, (chance, *_) in enumerate(nodes, start=1):
        tokens -= chance
        takes = seconds[min(rows + count, last)] + spent
        if most_seconds is not None and takes > most_seconds:
            break
        if tokens / takes > best_rate:
            best, best_rate = count, tokens / takes
    counts = [0] * len(offers)
    for *_, place in nodes[:best]:
        counts[place] += 1
    kept = []
    for place, (offer, count) in enumerate(zip(offers, counts, strict=True)):
        draft = offer.draft
        if count < len(draft) and not draft.is_chain:
            draft = draft.keep({node for *_, node, of in nodes[:best] if of == place}.__contains__)
        kept.append(draft.within(count, count) if count < len(draft) else draft)
    return kept
