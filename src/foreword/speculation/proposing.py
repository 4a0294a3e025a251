"""Requests drafts for no more tokens than there is room for, and keeps what is usable of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor

from foreword.acceptance.transfer import HostCopy
from foreword.backends.batch import MAX_DRAFT_NODES
from foreword.kv.paged_cache import PagedCache
from foreword.speculation.draft import NO_DRAFT, ROOT, Draft
from foreword.speculation.drafting import DraftRequest, DraftTask, KvMemory
from foreword.speculation.report import DrafterCall
from foreword.speculation.requests import DraftPlan, PassEntry, ShadowDraft, as_drafter_sees
from foreword.speculation.transaction import Transaction

Plans = Sequence[DraftPlan | None]

Divide = Callable[[Sequence[PassEntry], Sequence[int], int], list[int]]
"""Divides a number of draft tokens between entries, given what each wants."""


class CallShare(NamedTuple):
    """The drafter that was called for a request, and the request's share of the call."""

    method: str = ""  # empty: none
    seconds: float = 0.0
    call: int = -1  # which of the step's; two may have the same method


NO_CALL = CallShare()


@dataclass(frozen=True)
class Proposal:
    """The drafts of a step, one for every entry, and what they cost."""

    drafts: Sequence[Draft] = ()
    calls: Sequence[DrafterCall] = ()
    asked: Sequence[CallShare] = ()
    sources: Sequence[
        HostCopy | None
    ] = ()  # of the calls: what a device was still drawing when they returned

    @property
    def pending(self) -> Tensor | None:
        """int64, the draft tokens of the pass that are on a device; None: there are none."""
        if not any(self.sources):
            return None
        found = (draft.device for draft in self.drafts if draft.device is not None)
        return next((tokens.source.on_device for tokens in found), None)

    def arrived(self) -> "Proposal":
        """The same once every draft is there: a call took as long as it kept the host or the device."""
        if not any(self.sources):
            return self
        took = [0.0 if source is None else source.device_seconds for source in self.sources]
        calls = [
            replace(call, seconds=max(call.seconds, seconds))
            for call, seconds in zip(self.calls, took, strict=True)
        ]
        more = [(now.seconds - call.seconds) / call.asks for call, now in zip(self.calls, calls, strict=True)]
        later = {
            who: who if who.call < 0 else who._replace(seconds=who.seconds + more[who.call])
            for who in set(self.asked)
        }
        asked = [later[who] for who in self.asked]
        return replace(self, calls=calls, asked=asked)

    @property
    def is_cold(self) -> bool:
        """Whether a drafter compiled or captured something."""
        return any(call.is_cold for call in self.calls)

    @property
    def seconds(self) -> float:
        return sum(call.seconds for call in self.calls)


def fair_shares(wanted: Sequence[int], total: int, weights: Sequence[float] | None = None) -> list[int]:
    """Return as much of what each wants as the total allows: small amounts first, the rest by weight, or evenly."""
    heavy = [1.0] * len(wanted) if weights is None else list(weights)
    shares, left, weight_left = [0] * len(wanted), max(total, 0), sum(heavy)
    for index in sorted(range(len(wanted)), key=lambda place: wanted[place] / heavy[place]):
        shares[index] = min(wanted[index], int(left * heavy[index] / weight_left + 1e-9))
        left -= shares[index]
        weight_left -= heavy[index]
    return shares


def divide_evenly(entries: Sequence[PassEntry], wanted: Sequence[int], total: int) -> list[int]:
    """Return every entry's fair share, whatever request it is."""
    return fair_shares(wanted, total)


def fit_to_room(
    entries: Sequence[PassEntry],
    plans: Plans,
    cache: PagedCache,
    max_rows: int | None,
    divide: Divide = divide_evenly,
) -> list[DraftPlan | None]:
    """Return the plans cut to the pass's row budget and to free pages.

    The committed tokens of the pass have their pages already. Nothing is evicted or preempted for a draft token.
    """
    if not any(plans):
        return [None] * len(entries)
    fitted = [_sensible(entry, plan) for entry, plan in zip(entries, plans, strict=True)]
    asked_for = wanted = [0 if plan is None else plan.max_nodes for plan in fitted]
    if not any(wanted):
        return fitted
    if max_rows is not None:
        left = max_rows - sum([entry.run for entry in entries])
        if sum(wanted) > left:
            wanted = divide(entries, wanted, left)
    free_pages = cache.free_pages
    if wanted == asked_for and sum(wanted) // cache.page_size + len(wanted) <= free_pages:
        return fitted  # whatever pages they begin in
    for place, (entry, plan, most) in enumerate(zip(entries, fitted, wanted, strict=True)):
        if plan is None:
            continue
        reserved, held = entry.computed + entry.run, len(entry.kv.pages)
        nodes = min(most, (held + free_pages) * cache.page_size - reserved)
        free_pages -= max(0, cache.pages_for(reserved + max(nodes, 0)) - held)
        if nodes != plan.max_nodes:
            fitted[place] = replace(plan, max_nodes=nodes) if nodes > 0 else None
    return fitted


def _sensible(entry: PassEntry, plan: DraftPlan | None) -> DraftPlan | None:
    """Return the plan as far as its draft tokens could be committed: the target adds a token after the deepest."""
    if plan is None or not entry.draws or not entry.request.sampler.can_draft:
        return None
    nodes, depth = min(plan.max_nodes, MAX_DRAFT_NODES), min(plan.max_depth, entry.request.room - 1)
    if 0 < nodes == plan.max_nodes and 0 < depth == plan.max_depth:
        return plan
    return replace(plan, max_nodes=nodes, max_depth=depth) if nodes > 0 and depth > 0 else None


def plain(entries: Sequence[PassEntry]) -> Plans:
    """Return the plans of plain decoding."""
    return [None] * len(entries)


def propose(
    transaction: Transaction,
    plans: Plans,
    max_rows: int | None,
    divide: Divide,
    clock: Callable[[], float],
    memory: KvMemory | None = None,
) -> Proposal:
    """Return one draft for every entry, for no more than there is room for.

    `memory` is for drafters that keep rows in the pages.
    """
    entries = transaction.entries
    fitted = fit_to_room(entries, plans, transaction.cache, max_rows, divide)
    if memory is not None and any(fitted):
        transaction.reserve_drafter_rows(fitted, memory.store)
    return call_drafters(entries, fitted, clock, memory)


def call_drafters(
    entries: Sequence[PassEntry], plans: Plans, clock: Callable[[], float], memory: KvMemory | None = None
) -> Proposal:
    """Call each planned drafter once, for all of its requests, and keep what is usable of its drafts."""
    drafts, asked = [NO_DRAFT] * len(entries), [NO_CALL] * len(entries)
    if not any(plans):
        return Proposal(drafts, asked=asked)
    by_drafter: dict[int, list[tuple[int, DraftPlan, ShadowDraft | None]]] = {}
    for index, plan in enumerate(plans):
        if plan is not None:
            by_drafter.setdefault(id(plan.drafter), []).append((index, plan, None))
            if plan.shadow is not None:
                other = plan.shadow.plan
                by_drafter.setdefault(id(other.drafter), []).append((index, other, plan.shadow))
    calls: list[DrafterCall] = []
    sources: list[HostCopy | None] = []
    pending: HostCopy | None = None  # where the pass reads its draft tokens
    for group in by_drafter.values():
        first = group[0][1]
        lent = memory if first.drafter.traits.needs.rows else None
        asks = [_ask(entries[index], plan, lent) for index, plan, _ in group]
        for index, _, _ in group:
            entries[index].request.drafter_view.notified[id(first.drafter)] = first.drafter
        began = clock()
        answers = first.drafter.propose(asks)
        seconds = clock() - began
        share, empty, who = seconds / len(group), 0, NO_CALL
        for (index, plan, shadow), ask, answer in zip(group, asks, answers, strict=True):
            draft = usable(answer, ask)
            empty += not draft.parents
            if shadow is not None:
                shadow.keep(draft)
                continue
            if draft.device is not None:
                # Tokens stay on the device if the target draws without them; a pass reads one source.
                source = draft.device.source
                if pending in (None, source) and entries[index].request.sampler.can_be_followed:
                    pending = source
                else:
                    draft = draft.on_host()
            drafts[index] = draft
            if who.method != plan.method:  # most have the same
                who = CallShare(plan.method, share, len(calls))
            asked[index] = who
        calls.append(
            DrafterCall(
                first.method,
                asks=len(group),
                guesses=sum([ask.max_nodes for ask in asks]),
                levels=max(map(_levels, asks, answers)),
                empty=empty,
                seconds=seconds,
                lag=sum([plan.lag for _, plan, _ in group]),
                is_cold=True in [answer.is_cold for answer in answers],
            )
        )
        devices = [answer.device for answer in answers if answer.device is not None]
        sources.append(devices[0].source if devices else None)
    return Proposal(drafts, calls, asked, sources)


def _ask(entry: PassEntry, plan: DraftPlan, lent: KvMemory | None) -> DraftTask:
    pages = None if lent is None else lent.of(entry.kv)
    return DraftTask(as_drafter_sees(entry.request), plan.max_nodes, plan.max_depth, pages, plan.stop)


def _levels(ask: DraftTask, answer: Draft) -> int:
    """That a drafter has worked for: as many as it was asked for, or as deep as it went where it was to stop."""
    return min(ask.max_depth, ask.max_nodes) if ask.stop is None else max(answer.depth, 1)


def usable(draft: Draft, ask: DraftTask) -> Draft:
    """What of a draft the request can use as it is now: of its text, of tokens that exist, within the ask.

    A node is left out for its place, for its parent, or because q reaches outside the vocabulary: all fixed before
    its token was drawn. A chosen token has no q and may be left out for what it is.
    """
    request = ask.request
    if draft.epoch != request.epoch:
        return NO_DRAFT
    known = within_grammar(known_tokens(draft.rebase(request.tokens), request), request)
    if not known.is_chain and not request.sampling.rule.takes_trees:
        parents = known.parents
        known = known.keep(lambda node: parents[node] == node - 1)
    return known.within(ask.max_nodes, ask.max_depth)


def known_tokens(draft: Draft, request: DraftRequest) -> Draft:
    """The draft without nodes that are, or could have been, outside the vocabulary."""
    if draft.device is not None:
        return draft  # drawn from the vocabulary
    size, tokens = request.sampling.vocab_size, draft.tokens
    if not tokens or (not draft.drawn and min(tokens) >= 0 and max(tokens) < size):
        return draft

    def is_known(node: int) -> bool:
        q = draft.drawn[node] if draft.drawn else None
        return 0 <= tokens[node] < size if q is None else int(q.ids[-1]) < size

    return draft.keep(is_known)


def within_grammar(draft: Draft, request: DraftRequest) -> Draft:
    """The draft without what the form of the answer rules out: a row for it would be wasted.

    A chosen node goes if it is not allowed. One that was drawn stays, whatever its token is, and those after it go:
    that depends on nothing but the nodes above them.
    """
    grammar = request.sampling.grammar
    if grammar is None or not len(draft):
        return draft
    allowed = grammar.follows(draft.tokens, draft.parents)

    def is_wanted(node: int) -> bool:
        above = draft.parents[node]
        is_drawn = bool(draft.drawn) and draft.drawn[node] is not None
        return (above == ROOT or allowed[above]) and (is_drawn or allowed[node])

    return draft.keep(is_wanted)
