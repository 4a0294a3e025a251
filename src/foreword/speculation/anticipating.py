"""Guesses that are begun while those before them are judged, so that a device need not wait for the host."""

from collections.abc import Sequence
from typing import cast

from foreword.backends.batch import ForwardOutput
from foreword.speculation.accept import Acceptance
from foreword.speculation.draft import Draft
from foreword.speculation.drafting import Anticipates, Ask, KvMemory, Unjudged, anticipates
from foreword.speculation.observing import Observation
from foreword.speculation.proposing import Plans
from foreword.speculation.requests import DraftPlan, PassEntry, as_drafter_sees
from foreword.speculation.transaction import Transaction


def anticipate(
    transaction: Transaction,
    plans: Plans,
    drafts: Sequence[Draft],
    observation: Observation,
    acceptance: Acceptance,
    output: ForwardOutput,
    memory: KvMemory,
) -> bool:
    """Start the next drafts after a pass that was handed over, and return whether that compiled or captured something.

    That is for chains whose tokens are still on the device: of the others, the host is told in time.
    """
    entries, drawn = transaction.entries, acceptance.newest
    if drawn is None:
        return False
    states_at, drawn_at = observation.first_rows(entries, drafts), acceptance.first_rows()
    going: dict[int, tuple[Anticipates, list[Unjudged]]] = {}
    reach = [0] * len(entries)
    for index, (entry, plan, draft) in enumerate(zip(entries, plans, drafts, strict=True)):
        state, row = states_at[index], drawn_at.get(index)
        if plan is None or state is None or row is None or not _can_go_on(entry, draft):
            continue
        ask = Ask(as_drafter_sees(entry.request), plan.max_nodes, plan.max_depth, memory.of(entry.kv))
        for observer in observation.observers[index]:
            if observer.is_on and anticipates(observer.drafter):
                reach[index] = _rows_behind(entry, draft, plan)
                drafter = cast(Anticipates, observer.drafter)
                unjudged = Unjudged(ask, draft, state + entry.run - 1, row)
                going.setdefault(id(drafter), (drafter, []))[1].append(unjudged)
    if going:
        transaction.reach(reach)
    were_cold = [drafter.anticipate(some, output.hidden, drawn) for drafter, some in going.values()]
    return any(were_cold)


def _can_go_on(entry: PassEntry, draft: Draft) -> bool:
    """Whether the device alone decides what the pass makes final, and more may follow."""
    return (
        draft.device is not None
        and draft.is_chain
        and entry.request.room > 2  # one token, a guess and what the target says after it
    )


def _rows_behind(entry: PassEntry, draft: Draft, plan: DraftPlan) -> int:
    """Rows of the pass, of the token behind it, and of the guesses behind that, of which the last one needs none."""
    return entry.run + len(draft) + min(plan.max_nodes, plan.max_depth)
