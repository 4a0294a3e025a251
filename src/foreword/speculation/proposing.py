"""Ask the drafters, for no more than there is room for."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import perf_counter

from foreword.backends.batch import MAX_DRAFT_NODES
from foreword.kv.paged_cache import PagedCache
from foreword.speculation.draft import Draft
from foreword.speculation.protocols import Ask, Planned

NO_DRAFT = Draft()


@dataclass(frozen=True)
class DraftingCall:
    """One call of a drafter."""

    method: str
    guesses: int  # that were asked for, of all requests
    seconds: float


@dataclass(frozen=True)
class Proposal:
    """The drafts of a step, one for every planned request, and what they cost."""

    drafts: Sequence[Draft] = ()
    calls: Sequence[DraftingCall] = ()

    @property
    def seconds(self) -> float:
        """Of all drafters together."""
        return sum(call.seconds for call in self.calls)


def fit_to_room(plan: Sequence[Planned], cache: PagedCache, max_rows: int | None) -> list[Planned]:
    """The plan with drafts cut to the pass's row budget and to pages that nobody wants for anything else.

    The committed tokens of the pass have their pages already. Nothing is evicted or preempted for a guess.
    """
    wanted = [_wanted(planned) for planned in plan]
    if not any(wanted):
        return [replace(planned, drafter=None) if planned.drafter else planned for planned in plan]
    if max_rows is not None:
        wanted = fair_shares(wanted, max_rows - sum(planned.scheduled.run for planned in plan))
    free_pages, fitted = cache.free_pages, []
    for planned, wish in zip(plan, wanted, strict=True):
        kv = planned.scheduled.request.kv
        reserved = kv.computed + planned.scheduled.run
        nodes = min(wish, (len(kv.pages) + free_pages) * cache.page_size - reserved)
        if nodes < 1:
            fitted.append(replace(planned, drafter=None))
            continue
        free_pages -= max(0, cache.pages_for(reserved + nodes) - len(kv.pages))
        fitted.append(replace(planned, max_nodes=nodes))
    return fitted


def fair_shares(wanted: Sequence[int], total: int) -> list[int]:
    """As much of what each wants as the total allows, the small wishes first and the rest evenly."""
    shares, left = [0] * len(wanted), max(total, 0)
    by_size = sorted(range(len(wanted)), key=wanted.__getitem__)
    for place, index in enumerate(by_size):
        shares[index] = min(wanted[index], left // (len(by_size) - place))
        left -= shares[index]
    return shares


def _wanted(planned: Planned) -> int:
    """Guesses that make sense for this request now."""
    if planned.drafter is None or not planned.scheduled.reaches_end or _depth(planned) < 1:
        return 0
    return min(planned.max_nodes, MAX_DRAFT_NODES)


def _depth(planned: Planned) -> int:
    # The target adds a token of its own behind the deepest accepted node.
    return min(planned.max_depth, planned.scheduled.request.room - 1)


def propose(plan: Sequence[Planned]) -> Proposal:
    """One draft for every planned request. Each drafter is asked once, for all of its requests."""
    drafts = [NO_DRAFT] * len(plan)
    by_drafter: dict[int, list[int]] = {}
    for index, planned in enumerate(plan):
        if planned.drafter is not None and _wanted(planned):
            by_drafter.setdefault(id(planned.drafter), []).append(index)
    calls = []
    for indexes in by_drafter.values():
        first = plan[indexes[0]]
        assert first.drafter is not None
        asks = [Ask(plan[i].scheduled.request, _wanted(plan[i]), _depth(plan[i])) for i in indexes]
        began = perf_counter()
        for index, ask, draft in zip(indexes, asks, first.drafter.propose(asks), strict=True):
            drafts[index] = draft if fits(draft, ask) else NO_DRAFT
        guesses = sum(ask.max_nodes for ask in asks)
        calls.append(DraftingCall(first.method, guesses, perf_counter() - began))
    return Proposal(drafts, calls)


def fits(draft: Draft, ask: Ask) -> bool:
    """Whether a draft was made for the request as it is now, of known tokens, within what was asked."""
    request = ask.request
    fresh = draft.committed_len == len(request.tokens) and draft.epoch == request.epoch
    known = all(0 <= token < request.sampler.vocab_size for token in draft.tokens)
    return fresh and known and len(draft) <= ask.max_nodes and max(draft.depths(), default=0) <= ask.max_depth
