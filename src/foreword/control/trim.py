"""Which nodes of the drafts of a batch are verified."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from foreword.control.records import RequestRecord
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
    records: Mapping[int, RequestRecord],
    here: Pass | None,
) -> list[Draft]:
    """Return the nodes with which the batch makes the most tokens per second; shadow drafts are kept aside.

    Under *token* and *block* drawn nodes are never cut: their depth was decided before they were drawn.
    """
    kept = list(drafts)
    offers: list[Offer] = []
    places: list[int] = []
    rows, tokens, spent = 0, 0.0, {}
    limit = tightest_limit(entries)
    for place, (entry, draft) in enumerate(zip(entries, drafts, strict=True)):
        record = records.get(entry.request.request_id) if draft.parents else None
        if record is None or record.asked is None:
            rows += len(draft)
            continue
        arm = record.asked
        stays_whole = bool(draft.drawn) and not record.is_coupled
        record.offered_depth = draft.depth
        record.kept_depth = draft.depth if stays_whole else arm.levels_with_benefit(draft)
        if arm.is_stopping and not draft.confidence:
            arm.is_stopping = False  # it has no confidences for this request
        if record.is_coupled or record.is_probe:
            record.keep_aside(draft)
        if record.is_probe:
            kept[place] = draft.within(0, 0)
            continue
        is_alone = len(entries) == 1 and limit is None and not record.trial_depth
        if is_alone and len(draft) <= arm.control.worth.kept and not draft.confidence:
            continue  # alone, exactly the levels with a net benefit were requested
        is_trial = record.trial_depth > 0 and draft.is_chain and limit is None
        if is_trial:
            tried = min(record.trial_depth, record.kept_depth)
            kept[place] = draft.within(tried, tried)
        chances = arm.control.estimate.rates.survivals(kept[place], arm.fit.shift)
        spent[arm.plan.method] = arm.control.worth.draft_seconds
        if is_trial or stays_whole:
            rows, tokens = rows + len(kept[place]), tokens + sum(chances)
        else:
            offers.append(Offer(entry.request.request_id, draft, chances))
            places.append(place)
    if offers and here is not None:
        beside = replace(here, rows=here.rows + rows, drawn=here.drawn + tokens) if rows else here
        chosen = choose(offers, beside, sum(spent.values()), limit)
        for place, draft in zip(places, chosen, strict=True):
            kept[place] = draft
    return kept


def tightest_limit(entries: Sequence[PassEntry]) -> float | None:
    """Return the seconds that drafts may make a step for these requests; None: no bound."""
    return min(
        (one for entry in entries if (one := served(entry.request).step_limit) is not None), default=None
    )


def choose(
    offers: Sequence[Offer], here: Pass, spent: float, most_seconds: float | None = None
) -> list[Draft]:
    """Return, of every draft, the nodes with which the batch makes the most tokens per second; [offers].

    Nodes are taken in the order of their chance. A child is never likelier than its parent, so that the result is a
    tree. `spent` is the time of drafting: a step that was expensive should bring more. Draft tokens make the step no
    longer than `most_seconds`.
    """
    if len(offers) == 1 and offers[0].draft.is_chain:
        offer = offers[0]
        count = _best_count(offer.survival, here, spent, most_seconds)
        return [offer.draft.within(count, count)]
    nodes = [
        (-chance, offer.order, node, place)
        for place, offer in enumerate(offers)
        for node, chance in enumerate(offer.survival)
    ]
    nodes.sort()
    count = _best_count([-chance for chance, *_ in nodes], here, spent, most_seconds)
    kept: list[set[int]] = [set() for _ in offers]
    for _, _, node, place in nodes[:count]:
        kept[place].add(node)
    return [_only(offer.draft, some) for offer, some in zip(offers, kept, strict=True)]


def _only(draft: Draft, nodes: set[int]) -> Draft:
    if len(nodes) == len(draft):
        return draft
    return draft.within(len(nodes), len(nodes)) if draft.is_chain else draft.keep(nodes.__contains__)


def _best_count(chances: Sequence[float], here: Pass, spent: float, most_seconds: float | None) -> int:
    """Return how many nodes to take, the likeliest first."""
    seconds, rows, last, spent = here.seconds, here.rows, len(here.seconds) - 1, spent - here.prompts
    tokens = here.drawn
    best, best_rate = 0, tokens / (seconds[min(rows, last)] + spent)
    for count, chance in enumerate(chances, start=1):
        tokens += chance
        takes = seconds[min(rows + count, last)] + spent
        if most_seconds is not None and takes > most_seconds:
            break
        if tokens / takes > best_rate:
            best, best_rate = count, tokens / takes
    return best
