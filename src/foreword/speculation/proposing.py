"""Requests drafts within row budget and free KV pages, and returns their usable parts."""

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
"""Divides a budget of draft tokens: (entries, wanted draft tokens [entries], budget) to draft tokens [entries]."""


class CallShare(NamedTuple):
    """The drafter that was called for one request, and the request's share of the call's time."""

    method: str = ""  # empty: no drafter
    seconds: float = 0.0
    call: int = -1  # index into the step's calls; two calls may have the same method


NO_CALL = CallShare()


@dataclass(frozen=True)
class Proposal:
    """The drafts of a step and the drafter calls that made them."""

    drafts: Sequence[Draft] = ()  # [entries]
    calls: Sequence[DrafterCall] = ()
    shares: Sequence[CallShare] = ()  # [entries]
    # [calls], draft tokens on the device; None: the call left none there
    sources: Sequence[HostCopy | None] = ()

    @property
    def pending(self) -> Tensor | None:
        """The draft tokens that this pass reads on the device, int64; None: all tokens are on the host."""
        if not any(self.sources):
            return None
        on_device = (draft.device for draft in self.drafts if draft.device is not None)
        return next((tokens.source.on_device for tokens in on_device), None)

    def with_device_times(self) -> "Proposal":
        """Return the proposal with the time of each call: on the host or on the device, whichever took longer."""
        if not any(self.sources):
            return self
        device_seconds = [0.0 if source is None else source.device_seconds for source in self.sources]
        calls = [
            replace(call, seconds=max(call.seconds, seconds))
            for call, seconds in zip(self.calls, device_seconds, strict=True)
        ]
        # Requests of one call have equal shares, so each distinct share is updated once.
        updated = {NO_CALL: NO_CALL}
        for share in set(self.shares) - {NO_CALL}:
            added = calls[share.call].seconds - self.calls[share.call].seconds
            updated[share] = share._replace(seconds=share.seconds + added / calls[share.call].requests)
        return replace(self, calls=calls, shares=[updated[share] for share in self.shares])

    @property
    def is_cold(self) -> bool:
        """Whether a drafter compiled or captured a graph."""
        return any(call.is_cold for call in self.calls)

    @property
    def seconds(self) -> float:
        """Time of all calls."""
        return sum(call.seconds for call in self.calls)


def fair_shares(wanted: Sequence[int], total: int, weights: Sequence[float] | None = None) -> list[int]:
    """Divide `total`: entries that want less than their share get all they want, the others share what remains.

    Shares are proportional to the weights, or equal without weights.
    """
    each_weight = [1.0] * len(wanted) if weights is None else list(weights)
    shares, remaining, remaining_weight = [0] * len(wanted), max(total, 0), sum(each_weight)
    for index in sorted(range(len(wanted)), key=lambda index: wanted[index] / each_weight[index]):
        # 1e-9: a share that is a whole number but for rounding is not cut by one.
        shares[index] = min(wanted[index], int(remaining * each_weight[index] / remaining_weight + 1e-9))
        remaining -= shares[index]
        remaining_weight -= each_weight[index]
    return shares


def divide_evenly(entries: Sequence[PassEntry], wanted: Sequence[int], total: int) -> list[int]:
    """Divide a budget of draft tokens by `fair_shares` without weights."""
    return fair_shares(wanted, total)


def fit_to_room(
    entries: Sequence[PassEntry],
    plans: Plans,
    cache: PagedCache,
    max_rows: int | None,
    divide: Divide = divide_evenly,
) -> list[DraftPlan | None]:
    """Return the plans cut to the pass's row budget and to free KV pages; None where no draft fits.

    Pages for the runs are already reserved. No cached page is evicted and no request preempted for draft tokens.
    """
    if not any(plans):
        return [None] * len(entries)
    fitted = [_within_limits(entry, plan, cache) for entry, plan in zip(entries, plans, strict=True)]
    wanted = [0 if plan is None else plan.max_nodes for plan in fitted]  # draft tokens, [entries]
    if not any(wanted):
        return fitted
    granted = wanted
    if max_rows is not None:
        budget = max_rows - sum([entry.run for entry in entries])
        if sum(wanted) > budget:
            granted = divide(entries, wanted, budget)
    free_pages = cache.free_pages
    if granted == wanted and sum(wanted) // cache.page_size + len(wanted) <= free_pages:
        return fitted  # enough pages even if every draft starts a new one
    for index, (entry, plan, max_nodes) in enumerate(zip(entries, fitted, granted, strict=True)):
        if plan is None:
            continue
        rows, pages = entry.computed + entry.run, len(entry.kv.pages)
        nodes = min(max_nodes, (pages + free_pages) * cache.page_size - rows)
        free_pages -= max(0, cache.pages_for(rows + max(nodes, 0)) - pages)
        if nodes != plan.max_nodes:
            fitted[index] = replace(plan, max_nodes=nodes) if nodes > 0 else None
    return fitted


def _within_limits(entry: PassEntry, plan: DraftPlan | None, cache: PagedCache) -> DraftPlan | None:
    """Return the plan cut to as many draft tokens as can be committed, with the target's token after them."""
    if plan is None or not entry.draws or not entry.request.sampler.can_draft:
        return None
    committable = min(entry.request.room - 1, cache.max_draft_depth(entry.computed + entry.run - 1))
    nodes, depth = min(plan.max_nodes, MAX_DRAFT_NODES), min(plan.max_depth, committable)
    if nodes <= 0 or depth <= 0:
        return None
    if nodes == plan.max_nodes and depth == plan.max_depth:
        return plan
    return replace(plan, max_nodes=nodes, max_depth=depth)


def plain_plans(entries: Sequence[PassEntry]) -> Plans:
    """Return the plans of a step without drafts."""
    return [None] * len(entries)


def propose(
    transaction: Transaction,
    plans: Plans,
    max_rows: int | None,
    divide: Divide,
    clock: Callable[[], float],
    memory: KvMemory | None = None,
) -> Proposal:
    """Call the planned drafters; return one draft per entry, within row budget and free pages.

    `memory` is for drafters that have KV rows in the target's pages; their rows are reserved first.
    """
    entries = transaction.entries
    fitted = fit_to_room(entries, plans, transaction.cache, max_rows, divide)
    if memory is not None and any(fitted):
        transaction.prepare_drafter_rows(fitted, memory.store)
    return call_drafters(entries, fitted, clock, memory)


def call_drafters(
    entries: Sequence[PassEntry], plans: Plans, clock: Callable[[], float], memory: KvMemory | None = None
) -> Proposal:
    """Call each planned drafter once for all its requests; return the usable parts of the drafts.

    Drafters whose calls include shadow drafts are called first, since a shadow draft may replace a planned one.
    """
    drafts, shares = [NO_DRAFT] * len(entries), [NO_CALL] * len(entries)
    if not any(plans):
        return Proposal(drafts, shares=shares)
    replaced: set[int] = set()  # indices of entries whose shadow draft is verified
    calls: list[DrafterCall] = []
    sources: list[HostCopy | None] = []
    pending: HostCopy | None = None  # the device tokens that this pass reads
    for planned in _calls_of(plans):
        group = [item for item in planned if item.shadow is not None or item.entry_index not in replaced]
        if not group:
            continue
        method, drafter = group[0].plan.method, group[0].plan.drafter
        row_memory = memory if drafter.traits.needs.uses_pages else None
        tasks = [_draft_task(entries[index], plan, row_memory) for index, plan, _ in group]
        for index, _, _ in group:
            entries[index].request.drafter_view.notified[id(drafter)] = drafter
        began = clock()
        proposed = drafter.propose(tasks)
        seconds = clock() - began
        per_request, empty, share = seconds / len(group), 0, NO_CALL
        for (index, plan, shadow), task, proposed_draft in zip(group, tasks, proposed, strict=True):
            draft = usable_part(proposed_draft, task)
            if not draft.parents:
                empty += 1
            if shadow is not None:
                entry_plan = plans[index]
                if entry_plan is None or not shadow.keep(draft):
                    continue
                replaced.add(index)
                draft = draft.within(entry_plan.max_nodes, entry_plan.max_depth)
            if draft.device is not None:
                # Tokens stay on the device if sampling does not need them on the host. A pass reads only one source.
                source = draft.device.source
                if pending in (None, source) and entries[index].request.sampler.can_pipeline:
                    pending = source
                else:
                    draft = draft.on_host()
            drafts[index] = draft
            if share.method != plan.method:  # one object for consecutive requests with the same method
                share = CallShare(plan.method, per_request, len(calls))
            shares[index] = share
        calls.append(
            DrafterCall(
                method,
                requests=len(group),
                guesses=sum([task.max_nodes for task in tasks]),
                levels=max(map(_levels, tasks, proposed)),
                empty=empty,
                seconds=seconds,
                lag=sum([plan.lag for _, plan, _ in group]),
                is_cold=True in [draft.is_cold for draft in proposed],
                is_observing=bool(drafter.traits.needs),
            )
        )
        device_tokens = [draft.device for draft in proposed if draft.device is not None]
        sources.append(device_tokens[0].source if device_tokens else None)
    return Proposal(drafts, calls, shares, sources)


class _Planned(NamedTuple):
    """A draft that a drafter call should return."""

    entry_index: int
    plan: DraftPlan
    shadow: ShadowDraft | None  # None: the entry's planned draft


def _calls_of(plans: Plans) -> Iterable[list[_Planned]]:
    """Return the drafts of each call, one call per drafter. Calls with shadow drafts come first."""
    by_drafter: dict[int, list[_Planned]] = {}
    for index, plan in enumerate(plans):
        if plan is not None and plan.shadow is not None:
            shadow_plan = plan.shadow.plan
            by_drafter.setdefault(id(shadow_plan.drafter), []).append(
                _Planned(index, shadow_plan, plan.shadow)
            )
    for index, plan in enumerate(plans):
        if plan is not None:
            by_drafter.setdefault(id(plan.drafter), []).append(_Planned(index, plan, None))
    return by_drafter.values()


def _draft_task(entry: PassEntry, plan: DraftPlan, row_memory: KvMemory | None) -> DraftTask:
    pages = None if row_memory is None else row_memory.of(entry.kv)
    return DraftTask(draft_request_of(entry.request), plan.max_nodes, plan.max_depth, pages, plan.stop)


def _levels(task: DraftTask, draft: Draft) -> int:
    """Return the number of levels that the drafter computed: all, or those of its draft if it may stop early."""
    return min(task.max_depth, task.max_nodes) if task.stop is None else max(draft.depth, 1)


def usable_part(draft: Draft, task: DraftTask) -> Draft:
    """Return the part of a draft that the request can verify: current text, valid tokens, within the limits.

    A drawn node is dropped only for properties fixed before its token was drawn: its position, its parent, or a q that
    covers tokens outside the vocabulary. A chosen token has no q and may be dropped for its value.
    """
    request = task.request
    if draft.epoch != request.epoch:
        return NO_DRAFT
    checked = within_grammar(without_unknown_tokens(draft.rebase(request.tokens), request), request)
    if not checked.is_chain and not request.sampling.rule.takes_trees:
        parents = checked.parents
        checked = checked.keep(lambda node: parents[node] == node - 1)  # the chain of first nodes
    return checked.within(task.max_nodes, task.max_depth)


def without_unknown_tokens(draft: Draft, request: DraftRequest) -> Draft:
    """Return the draft without chosen nodes whose token, and drawn nodes whose q, is outside the vocabulary."""
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
    """Return the draft without nodes that the request's grammar forbids, since they could not be accepted.

    A chosen node is dropped if its token is forbidden. Of a drawn node only the descendants are dropped, because
    dropping the node for its token would bias the text.
    """
    grammar = request.sampling.grammar
    if grammar is None or not len(draft):
        return draft
    allowed = grammar.follows(draft.tokens, draft.parents)  # [nodes]

    def is_allowed(node: int) -> bool:
        parent = draft.parents[node]
        is_drawn = bool(draft.drawn) and draft.drawn[node] is not None
        return (parent == ROOT or allowed[parent]) and (is_drawn or allowed[node])

    return draft.keep(is_allowed)
