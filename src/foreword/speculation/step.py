"""One step: plan, propose, verify, accept, commit. All of decoding is this.

Plain decoding is an empty draft; a prefill chunk is a run of tokens that are already committed; a
chain is a tree of width one. None of them has a code path of its own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np
from torch import Tensor

from foreword.acceptance.accept import judge
from foreword.acceptance.batch import Judgement, Verdicts
from foreword.acceptance.logprobs import request_logprobs
from foreword.kv.paged_cache import PagedCache
from foreword.models.batch import MAX_DRAFT_NODES
from foreword.speculation.draft import Draft, stack
from foreword.speculation.protocols import Ask, Planned, Policy, Scheduled, Target
from foreword.speculation.transaction import NOTHING_DRAWN, Transaction, Verdict


@dataclass(frozen=True)
class Launched:
    """A step under way: everything was handed to the device, nothing is committed."""

    transaction: Transaction
    verdicts: Callable[[], list[Verdict]]  # waits for the device
    draft_seconds: float
    verify_seconds: float  # until the pass was handed over; on a CPU, until it was done


@dataclass(frozen=True)
class StepResult:
    """What a step committed, one verdict for every scheduled request, and where its time went."""

    verdicts: list[Verdict]
    draft_seconds: float
    verify_seconds: float
    accept_seconds: float


class Stepper:
    """Runs steps on one target and one KV cache."""

    def __init__(self, target: Target, cache: PagedCache, policy: Policy) -> None:
        self._target = target
        self._cache = cache
        self._policy = policy

    def step(self, scheduled: Sequence[Scheduled]) -> StepResult:
        """One pass over the scheduled requests; leaving it by an exception leaves no trace."""
        return self.resolve(self.launch(scheduled))

    def launch(self, scheduled: Sequence[Scheduled]) -> Launched:
        """Plan, propose, verify; returns as soon as the work is handed over."""
        plan = self._policy.plan(scheduled)
        transaction = Transaction(self._cache, scheduled)
        began = perf_counter()
        try:
            drafts = propose(plan)
            drafted = perf_counter()
            output = self._target.verify(transaction.batch(drafts))
        except BaseException:
            transaction.abort()
            raise
        return Launched(
            transaction,
            lambda: accept(output.logits, scheduled, drafts),
            drafted - began,
            perf_counter() - drafted,
        )

    def resolve(self, launched: Launched) -> StepResult:
        """Wait for the verdicts and commit them."""
        began = perf_counter()
        with launched.transaction as transaction:
            verdicts = launched.verdicts()
            transaction.commit(verdicts)
        return StepResult(verdicts, launched.draft_seconds, launched.verify_seconds, perf_counter() - began)


def propose(plan: Sequence[Planned]) -> list[Draft]:
    """One draft for every planned request. Each drafter is asked once, for all of its requests."""
    drafts = [Draft()] * len(plan)
    asks: dict[int, list[int]] = {}
    for index, planned in enumerate(plan):
        if planned.drafter is not None and planned.scheduled.reaches_end:
            asks.setdefault(id(planned.drafter), []).append(index)
    for indexes in asks.values():
        drafter = plan[indexes[0]].drafter
        assert drafter is not None
        wanted = [_ask(plan[index]) for index in indexes]
        for index, ask, draft in zip(indexes, wanted, drafter.propose(wanted), strict=True):
            drafts[index] = draft if fits(draft, ask) else Draft()
    return drafts


def _ask(planned: Planned) -> Ask:
    request = planned.scheduled.request
    # The target adds a token of its own behind the deepest accepted node.
    return Ask(request, min(planned.max_nodes, MAX_DRAFT_NODES), min(planned.max_depth, request.room - 1))


def fits(draft: Draft, ask: Ask) -> bool:
    """Whether a draft was made for the request as it is now, of known tokens, within what was asked."""
    request = ask.request
    fresh = draft.committed_len == len(request.tokens) and draft.epoch == request.epoch
    known = all(0 <= token < request.sampler.vocab_size for token in draft.tokens)
    return fresh and known and len(draft) <= ask.max_nodes and max(draft.depths(), default=0) <= ask.max_depth


def accept(logits: Tensor, scheduled: Sequence[Scheduled], drafts: Sequence[Draft]) -> list[Verdict]:
    """Judge the draft of every request whose next token can be drawn; `logits` has their rows, in order."""
    verdicts = [NOTHING_DRAWN] * len(scheduled)
    drawing = [index for index, share in enumerate(scheduled) if share.reaches_end]
    if drawing:
        trees = stack([drafts[index] for index in drawing])
        judged = Judgement.of(logits, trees, [scheduled[index].request.sampler for index in drawing])
        found = judge(judged)
        for place, index in enumerate(drawing):
            verdicts[index] = verdict_for(place, scheduled[index], judged, found)
    return verdicts


def verdict_for(place: int, share: Scheduled, judged: Judgement, found: Verdicts) -> Verdict:
    """What the request at this place of the judged batch commits: it may end inside the accepted path."""
    if (error := found.error(place)) is not None:
        return Verdict((), (), error=error)
    block = found.tokens(judged.trees, place)
    kept = share.request.kept(block)
    logprobs = request_logprobs(judged, found, place)[:kept]
    path, drafted = found.path(place)[:kept], int(np.diff(judged.trees.row_starts)[place]) - 1
    return Verdict(tuple(path), tuple(block[:kept]), tuple(logprobs), drafted=drafted)
