"""Requests drafts within the available room, and keeps their usable part."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor

from foreword.acceptance.transfer import HostCopy
from foreword.backends.batch import MAX_DRAFT_NODES
from foreword.kv.paged_cache import PagedCache
from foreword.speculation.draft import NO_DRAFT, ROOT, Draft
from foreword.speculation.drafting import DraftRequest, DraftTask, KvMemory
from foreword.speculation.report import DrafterCall
from foreword.speculation.requests import DraftPlan, PassEntry, ShadowDraft, draft_request_of
from foreword.speculation.transaction import Transaction

Plans = Sequence[DraftPlan | None]

Divide = Callable[[Sequence[PassEntry], Sequence[int], int], list[int]]
"""Divides a budget of draft tokens between entries, given what each entry wants."""


class CallShare(NamedTuple):
    """The drafter called for one request, and the request's share of the call time."""

    method: str = ""  # empty: no drafter
    seconds: float = 0.0
    call: int = -1  # index into the step's calls; two calls may have the same method


NO_CALL = CallShare()


@dataclass(frozen=True)
class Proposal:
    """The drafts of a step, one per entry, and the calls that made them."""

    drafts: Sequence[Draft] = ()
    calls: Sequence[DrafterCall] = ()
    shares: Sequence[CallShare] = ()
    sources: Sequence[HostCopy | None] = ()  # per call: tokens that the device had not drawn yet

    @property
    def pending(self) -> Tensor | None:
        """int64, the device's draft tokens for this pass; None: all are on the host."""
        if not any(self.sources):
            return None
        found = (draft.device for draft in self.drafts if draft.device is not None)
        return next((tokens.source.on_device for tokens in found), None)

    def arrived(self) -> "Proposal":
        """Return the proposal with final call times: the longer of host time and device time."""
        if not any(self.sources):
            return self
        took = [0.0 if source is None else source.device_seconds for source in self.sources]
        calls = [
            replace(call, seconds=max(call.seconds, seconds))
            for call, seconds in zip(self.calls, took, strict=True)
        ]
        extra = [
            (now.seconds - call.seconds) / call.requests for call, now in zip(self.calls, calls, strict=True)
        ]
        updated = {
            share: share if share.call < 0 else share._replace(seconds=share.seconds + extra[share.call])
            for share in set(self.shares)
        }
        shares = [updated[share] for share in self.shares]
        return replace(self, calls=calls, shares=shares)

    @property
    def is_cold(self) -> bool:
        """Whether a drafter compiled or captured a graph."""
        return any(call.is_cold for call in self.calls)

    @property
    def seconds(self) -> float:
        return sum(call.seconds for call in self.calls)


def fair_shares(wanted: Sequence[int], total: int, weights: Sequence[float] | None = None) -> list[int]:
    """Divide `total` fairly: small requests are met in full, the others share the rest by weight, or evenly."""
    each_weight = [1.0] * len(wanted) if weights is None else list(weights)
    shares, left, weight_left = [0] * len(wanted), max(total, 0), sum(each_weight)
    for index in sorted(range(len(wanted)), key=lambda place: wanted[place] / each_weight[place]):
        shares[index] = min(wanted[index], int(left * each_weight[index] / weight_left + 1e-9))
        left -= shares[index]
        weight_left -= each_weight[index]
    return shares


def divide_evenly(entries: Sequence[PassEntry], wanted: Sequence[int], total: int) -> list[int]:
    """Divide evenly, whatever the requests are."""
    return fair_shares(wanted, total)


def fit_to_room(
    entries: Sequence[PassEntry],
    plans: Plans,
    cache: PagedCache,
    max_rows: int | None,
    divide: Divide = divide_evenly,
) -> list[DraftPlan | None]:
    """Cut the plans to the pass's row budget and to free KV pages.

    Pages for the committed tokens are already reserved. Nothing is evicted or preempted for draft tokens.
    """
    if not any(plans):
        return [None] * len(entries)
    fitted = [_within_limits(entry, plan, cache) for entry, plan in zip(entries, plans, strict=True)]
    requested = wanted = [0 if plan is None else plan.max_nodes for plan in fitted]
    if not any(wanted):
        return fitted
    if max_rows is not None:
        left = max_rows - sum([entry.run for entry in entries])
        if sum(wanted) > left:
            wanted = divide(entries, wanted, left)
    free_pages = cache.free_pages
    if wanted == requested and sum(wanted) // cache.page_size + len(wanted) <= free_pages:
        return fitted  # enough pages even if every draft starts a new one
    for place, (entry, plan, most) in enumerate(zip(entries, fitted, wanted, strict=True)):
        if plan is None:
            continue
        reserved, held = entry.computed + entry.run, len(entry.kv.pages)
        nodes = min(most, (held + free_pages) * cache.page_size - reserved)
        free_pages -= max(0, cache.pages_for(reserved + max(nodes, 0)) - held)
        if nodes != plan.max_nodes:
            fitted[place] = replace(plan, max_nodes=nodes) if nodes > 0 else None
    return fitted


def _within_limits(entry: PassEntry, plan: DraftPlan | None, cache: PagedCache) -> DraftPlan | None:
    """Cut the plan to draft tokens that can be committed, with room for the target's token after them."""
    if plan is None or not entry.draws or not entry.request.sampler.can_draft:
        return None
    room = min(entry.request.room - 1, cache.most_depth(entry.computed + entry.run - 1))
    nodes, depth = min(plan.max_nodes, MAX_DRAFT_NODES), min(plan.max_depth, room)
    if 0 < nodes == plan.max_nodes and 0 < depth == plan.max_depth:
        return plan
    return replace(plan, max_nodes=nodes, max_depth=depth) if nodes > 0 and depth > 0 else None


def plain_plans(entries: Sequence[PassEntry]) -> Plans:
    return [None] * len(entries)


def propose(
    transaction: Transaction,
    plans: Plans,
    max_rows: int | None,
    divide: Divide,
    clock: Callable[[], float],
    memory: KvMemory | None = None,
) -> Proposal:
    """Return one draft per entry, within row budget and free pages.

    `memory` serves drafters that keep KV rows in the target's pages.
    """
    entries = transaction.entries
    fitted = fit_to_room(entries, plans, transaction.cache, max_rows, divide)
    if memory is not None and any(fitted):
        transaction.reserve_drafter_rows(fitted, memory.store)
    return call_drafters(entries, fitted, clock, memory)


def call_drafters(
    entries: Sequence[PassEntry], plans: Plans, clock: Callable[[], float], memory: KvMemory | None = None
) -> Proposal:
    """Call each planned drafter once for all its requests, and keep the usable part of its drafts."""
    drafts, shares = [NO_DRAFT] * len(entries), [NO_CALL] * len(entries)
    if not any(plans):
        return Proposal(drafts, shares=shares)
    taken: set[int] = set()  # entries whose shadow draft is verified
    calls: list[DrafterCall] = []
    sources: list[HostCopy | None] = []
    pending: HostCopy | None = None  # the device tokens that this pass reads
    for planned in _calls_of(plans):
        group = [one for one in planned if one[2] is not None or one[0] not in taken]
        if not group:
            continue
        first = group[0][1]
        row_memory = memory if first.drafter.traits.needs.rows else None
        tasks = [_draft_task(entries[index], plan, row_memory) for index, plan, _ in group]
        for index, _, _ in group:
            entries[index].request.drafter_view.notified[id(first.drafter)] = first.drafter
        began = clock()
        answers = first.drafter.propose(tasks)
        seconds = clock() - began
        per_request, empty, share = seconds / len(group), 0, NO_CALL
        for (index, plan, shadow), task, answer in zip(group, tasks, answers, strict=True):
            draft = usable_part(answer, task)
            empty += not draft.parents
            if shadow is not None:
                main = plans[index]
                if main is None or not shadow.keep(draft):
                    continue
                taken.add(index)
                draft = draft.within(main.max_nodes, main.max_depth)
            if draft.device is not None:
                # Tokens may stay on the device if sampling does not need them on the host. A pass reads one source.
                source = draft.device.source
                if pending in (None, source) and entries[index].request.sampler.can_pipeline:
                    pending = source
                else:
                    draft = draft.on_host()
            drafts[index] = draft
            if share.method != plan.method:  # most requests share one
                share = CallShare(plan.method, per_request, len(calls))
            shares[index] = share
        calls.append(
            DrafterCall(
                first.method,
                requests=len(group),
                guesses=sum([task.max_nodes for task in tasks]),
                levels=max(map(_levels, tasks, answers)),
                empty=empty,
                seconds=seconds,
                lag=sum([plan.lag for _, plan, _ in group]),
                is_cold=True in [answer.is_cold for answer in answers],
            )
        )
        devices = [answer.device for answer in answers if answer.device is not None]
        sources.append(devices[0].source if devices else None)
    return Proposal(drafts, calls, shares, sources)


def _calls_of(plans: Plans) -> Iterable[list[tuple[int, DraftPlan, ShadowDraft | None]]]:
    """Return the (entry, plan, shadow) of each call. Calls with shadow drafts come first."""
    by_drafter: dict[int, list[tuple[int, DraftPlan, ShadowDraft | None]]] = {}
    for index, plan in enumerate(plans):
        if plan is not None and plan.shadow is not None:
            other = plan.shadow.plan
            by_drafter.setdefault(id(other.drafter), []).append((index, other, plan.shadow))
    for index, plan in enumerate(plans):
        if plan is not None:
            by_drafter.setdefault(id(plan.drafter), []).append((index, plan, None))
    return by_drafter.values()


def _draft_task(entry: PassEntry, plan: DraftPlan, row_memory: KvMemory | None) -> DraftTask:
    pages = None if row_memory is None else row_memory.of(entry.kv)
    return DraftTask(draft_request_of(entry.request), plan.max_nodes, plan.max_depth, pages, plan.stop)


def _levels(task: DraftTask, answer: Draft) -> int:
    """Return the levels that the drafter computed: all, or those of its draft if it may stop early."""
    return min(task.max_depth, task.max_nodes) if task.stop is None else max(answer.depth, 1)


def usable_part(draft: Draft, task: DraftTask) -> Draft:
    """Return the part of a draft that the request can verify: current text, valid tokens, within the limits.

    A sampled node is dropped only for properties fixed before its token was drawn: its place, its parent, or a q that
    covers tokens outside the vocabulary. A chosen token has no q and may be dropped for its value.
    """
    request = task.request
    if draft.epoch != request.epoch:
        return NO_DRAFT
    checked = within_grammar(without_unknown_tokens(draft.rebase(request.tokens), request), request)
    if not checked.is_chain and not request.sampling.rule.takes_trees:
        parents = checked.parents
        checked = checked.keep(lambda node: parents[node] == node - 1)
    return checked.within(task.max_nodes, task.max_depth)


def without_unknown_tokens(draft: Draft, request: DraftRequest) -> Draft:
    """Drop nodes whose token or whose q is outside the vocabulary."""
    if draft.device is not None:
        return draft  # the device draws from the vocabulary only
    size, tokens = request.sampling.vocab_size, draft.tokens
    if not tokens or (not draft.drawn and min(tokens) >= 0 and max(tokens) < size):
        return draft

    def is_known(node: int) -> bool:
        q = draft.drawn[node] if draft.drawn else None
        return 0 <= tokens[node] < size if q is None else int(q.ids[-1]) < size

    return draft.keep(is_known)


def within_grammar(draft: Draft, request: DraftRequest) -> Draft:
    """Drop nodes that the request's grammar forbids, since they could not be accepted.

    A chosen node is dropped if its token is forbidden. Of a sampled node only the descendants are dropped, because
    dropping the node for its token would bias the text.
    """
    grammar = request.sampling.grammar
    if grammar is None or not len(draft):
        return draft
    allowed = grammar.follows(draft.tokens, draft.parents)

    def is_allowed(node: int) -> bool:
        above = draft.parents[node]
        is_drawn = bool(draft.drawn) and draft.drawn[node] is not None
        return (above == ROOT or allowed[above]) and (is_drawn or allowed[node])

    return draft.keep(is_allowed)
