"""Passes that overlap: one that is laid out before the token it starts with is known, and early drafting."""

from collections.abc import Sequence
from typing import NamedTuple

from foreword.backends.batch import ForwardBatch, ForwardOutput
from foreword.speculation.accept import Acceptance
from foreword.speculation.draft import Draft
from foreword.speculation.drafting import Drafter, DraftTask, InFlight, KvMemory
from foreword.speculation.layout import BatchBuffers
from foreword.speculation.observing import Observation
from foreword.speculation.probe import FaultLog, StepProbe
from foreword.speculation.proposing import Plans, Proposal
from foreword.speculation.requests import PassEntry, as_drafter_sees
from foreword.speculation.transaction import Transaction


class Launched(NamedTuple):
    """A step in flight: everything was handed to the device, nothing is committed."""

    transaction: Transaction
    plans: Plans
    proposal: Proposal
    observation: Observation
    output: ForwardOutput
    acceptance: Acceptance
    probe: StepProbe

    @property
    def is_cold(self) -> bool:
        """Whether something was compiled or captured."""
        return self.probe.is_cold or self.proposal.is_cold


class PassPipeline:
    """The order of passes: each may read what the one before it draws, from the device."""

    def __init__(self, memory: KvMemory | None, faults: FaultLog) -> None:
        """`memory` is for drafters that keep rows in the pages; None: there are none."""
        self.newest: Launched | None = None  # the last pass, while it is in flight
        self._memory, self._faults = memory, faults
        self._buffers = BatchBuffers()

    def follows(self, entries: Sequence[PassEntry]) -> bool:
        """Whether an earlier pass is in flight for one of the entries, beside the one that was begun for them now.

        Such a pass is plain: its drafts would depend on a token that is not known, and the earlier one's end on them.
        """
        return any(entry.kv.passes > 1 for entry in entries)

    def lay_out(self, transaction: Transaction, proposal: Proposal, observation: Observation) -> ForwardBatch:
        """Return the batch of a pass; tokens that are not known yet are read on the device."""
        before = None
        if any(entry.pending for entry in transaction.entries):
            if self.newest is None:
                raise AssertionError("pending token without an in-flight pass")
            before = self.newest.acceptance
        batch = transaction.batch(
            proposal.drafts,
            self._buffers,
            observation.taps,
            observation.wanted,
            None if before is None else before.drawn_at(),
        )
        drawn = proposal.pending if before is None else before.newest
        return batch if drawn is None else batch.after(drawn)

    def enter(self, launched: Launched) -> None:
        """Note a pass that was handed over, and start the drafts after it that can be started early."""
        if self._memory is not None and launched.proposal.pending is not None:
            with self._faults.forgiven("anticipate"):
                launched.probe.is_cold |= draft_early(launched, self._memory)
        self.newest = launched
        launched.probe.launched()

    def leave(self, launched: Launched) -> None:
        """Note that a pass is no longer in flight."""
        if self.newest is launched:
            self.newest = None


def draft_early(launched: Launched, memory: KvMemory) -> bool:
    """Start the next drafts after a pass in flight, and return whether that compiled or captured something.

    That is for chains whose tokens are still on the device: the host knows the tokens of the others in time.
    """
    transaction, plans, proposal, observation, output, acceptance, _ = launched
    entries, drawn = transaction.entries, acceptance.newest
    if drawn is None:
        return False
    states_at, drawn_at = observation.first_rows(proposal.drafts), acceptance.first_rows()
    going: dict[int, tuple[Drafter, list[InFlight]]] = {}
    rows = [0] * len(entries)
    for index, (entry, plan, draft) in enumerate(zip(entries, plans, proposal.drafts, strict=True)):
        state, row = states_at[index], drawn_at.get(index)
        if plan is None or state is None or row is None or not _can_continue(entry, draft):
            continue
        ask = DraftTask(as_drafter_sees(entry.request), plan.max_nodes, plan.max_depth, memory.of(entry.kv))
        for observer in observation.observers[index]:
            if observer.is_on and observer.drafter.traits.starts_early:
                # Rows of the pass, of the token after it and of the draft after that, whose last token needs none.
                rows[index] = entry.run + len(draft) + min(plan.max_nodes, plan.max_depth)
                unjudged = InFlight(ask, draft, state + entry.run - 1, row)
                going.setdefault(id(observer.drafter), (observer.drafter, []))[1].append(unjudged)
    if going:
        transaction.reserve_early(rows)
    were_cold = [drafter.draft_early(some, output.hidden, drawn) for drafter, some in going.values()]
    return any(were_cold)


def _can_continue(entry: PassEntry, draft: Draft) -> bool:
    """Whether the device alone decides what the pass makes final, and more may follow."""
    # Room for one token, a draft token and the target's own token after it.
    return draft.device is not None and draft.is_chain and entry.request.room > 2
