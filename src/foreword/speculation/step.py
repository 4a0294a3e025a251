"""One step: plan, propose, verify, accept, commit. All of decoding is this.

Plain decoding is an empty draft; a prefill chunk is a run of tokens that are already committed; a
chain is a tree of width one. None of them has a code path of its own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from foreword.acceptance.coupled import DrawRow, draw, follow
from foreword.kv.paged_cache import PagedCache
from foreword.models.batch import MAX_DRAFT_NODES
from foreword.speculation.draft import Draft
from foreword.speculation.protocols import Ask, Planned, Policy, Scheduled, Target
from foreword.speculation.transaction import NOTHING_DRAWN, Transaction, Verdict


@dataclass(frozen=True)
class Launched:
    """A step under way: everything was handed to the device, nothing is committed."""

    transaction: Transaction
    verdicts: Callable[[], list[Verdict]]  # waits for the device


class Stepper:
    """Runs steps on one target and one KV cache."""

    def __init__(self, target: Target, cache: PagedCache, policy: Policy) -> None:
        self._target = target
        self._cache = cache
        self._policy = policy

    def step(self, scheduled: Sequence[Scheduled]) -> list[Verdict]:
        """One pass over the scheduled requests; leaving it by an exception leaves no trace."""
        return self.resolve(self.launch(scheduled))

    def launch(self, scheduled: Sequence[Scheduled]) -> Launched:
        """Plan, propose, verify; returns as soon as the work is handed over."""
        plan = self._policy.plan(scheduled)
        transaction = Transaction(self._cache, scheduled)
        try:
            drafts = propose(plan)
            output = self._target.verify(transaction.batch(drafts))
            drawn = draw(output.logits, rows_to_draw(scheduled, drafts))
        except BaseException:
            transaction.abort()
            raise
        return Launched(transaction, lambda: accept(drawn, scheduled, drafts))

    def resolve(self, launched: Launched) -> list[Verdict]:
        """Wait for the verdicts and commit them."""
        with launched.transaction as transaction:
            verdicts = launched.verdicts()
            transaction.commit(verdicts)
        return verdicts


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
    return Ask(request, min(planned.max_nodes, MAX_DRAFT_NODES), request.room - 1)


def fits(draft: Draft, ask: Ask) -> bool:
    """Whether a draft was made for the request as it is now and stays within what was asked."""
    request = ask.request
    fresh = draft.committed_len == len(request.tokens) and draft.epoch == request.epoch
    return fresh and len(draft) <= ask.max_nodes and max(draft.depths(), default=0) <= ask.max_depth


def rows_to_draw(scheduled: Sequence[Scheduled], drafts: Sequence[Draft]) -> list[DrawRow]:
    """For every row with logits, whose draw it is and at which position the drawn token would stand."""
    rows = []
    for share, draft in zip(scheduled, drafts, strict=True):
        if share.reaches_end:
            end = len(share.request.tokens)
            rows += [DrawRow(share.request.draw_key, end + depth) for depth in (0, *draft.depths())]
    return rows


def accept(drawn: Tensor, scheduled: Sequence[Scheduled], drafts: Sequence[Draft]) -> list[Verdict]:
    """Follow the target's own draws through each draft as far as they agree."""
    tokens = drawn.tolist()
    verdicts, row = [], 0
    for share, draft in zip(scheduled, drafts, strict=True):
        if not share.reaches_end:
            verdicts.append(NOTHING_DRAWN)
            continue
        path, own = follow(tokens[row : row + 1 + len(draft)], draft.tokens, draft.parents)
        row += 1 + len(draft)
        block = [*(draft.tokens[node] for node in path), own]
        kept = share.request.kept(block)
        verdicts.append(Verdict(tuple(path[:kept]), tuple(block[:kept])))
    return verdicts
