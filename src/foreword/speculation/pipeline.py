"""Overlapped passes: launches a pass before its newest token is known, and starts drafts before the verdict."""

from typing import NamedTuple

from foreword.backends.batch import ForwardBatch, ForwardOutput
from foreword.speculation.accept import Acceptance
from foreword.speculation.draft import Draft
from foreword.speculation.drafting import Drafter, DraftTask, InFlight, KvMemory
from foreword.speculation.layout import BatchBuffers
from foreword.speculation.observing import Observation
from foreword.speculation.probe import FaultLog, StepProbe
from foreword.speculation.proposing import Plans, Proposal
from foreword.speculation.requests import PassEntry, draft_request_of
from foreword.speculation.transaction import Transaction


class Launched(NamedTuple):
    """A step in flight: its pass runs on the device, and nothing is committed."""

    transaction: Transaction
    plans: Plans
    proposal: Proposal
    observation: Observation
    output: ForwardOutput
    acceptance: Acceptance
    probe: StepProbe

    @property
    def is_cold(self) -> bool:
        """Whether the pass or a drafter compiled or captured a graph."""
        return self.probe.is_cold or self.proposal.is_cold


class PassPipeline:
    """Tracks passes in flight. A pass may read the tokens of the previous pass on the device."""

    def __init__(self, memory: KvMemory | None, faults: FaultLog) -> None:
        """Create a pipeline without passes; `memory` is for drafters with KV rows in the target's pages, if any."""
        self.newest: Launched | None = None  # the most recent pass, while in flight
        self._memory, self._faults = memory, faults
        self._buffers = BatchBuffers()

    def lay_out(self, transaction: Transaction, proposal: Proposal, observation: Observation) -> ForwardBatch:
        """Return the batch of a pass. Tokens that are not known yet are read on the device."""
        previous = None
        if any(entry.pending for entry in transaction.entries):
            if self.newest is None:
                raise AssertionError("pending token without an in-flight pass")
            previous = self.newest.acceptance
        batch = transaction.batch(
            proposal.drafts,
            self._buffers,
            observation.taps,
            observation.keeps_states,
            None if previous is None else previous.drawn_at(),
        )
        drawn = proposal.pending if previous is None else previous.drawn_tokens
        return batch if drawn is None else batch.after(drawn)

    def enter(self, launched: Launched) -> None:
        """Register a launched pass, start the drafts after it if their drafters can, and end the launch's time."""
        if self._memory is not None and launched.proposal.pending is not None:
            with self._faults.suppressed("anticipate"):
                launched.probe.is_cold |= draft_early(launched, self._memory)
        self.newest = launched
        launched.probe.end_launch()

    def leave(self, launched: Launched) -> None:
        """Unregister a pass that is being resolved."""
        if self.newest is launched:
            self.newest = None


def draft_early(launched: Launched, memory: KvMemory) -> bool:
    """Start the drafts that follow a pass in flight; return whether this compiled or captured a graph.

    Drafts start early only after chains whose tokens are still on the device: the host knows other tokens in time.
    """
    transaction, observation = launched.transaction, launched.observation
    entries, drafts, drawn = transaction.entries, launched.proposal.drafts, launched.acceptance.drawn_tokens
    if drawn is None:
        return False
    # By entry: the first row of its hidden states, and the row that samples the token after its newest one.
    states_at, drawn_at = observation.first_rows(drafts), launched.acceptance.first_rows()
    by_drafter: dict[
        int, tuple[Drafter, list[InFlight]]
    ] = {}  # by id(): a plug-in drafter may not be hashable
    rows = [0] * len(entries)
    for index, (entry, plan, draft) in enumerate(zip(entries, launched.plans, drafts, strict=True)):
        first_state, drawn_row = states_at[index], drawn_at.get(index)
        if plan is None or first_state is None or drawn_row is None or not _can_continue(entry, draft):
            continue
        task = DraftTask(draft_request_of(entry.request), plan.max_nodes, plan.max_depth, memory.of(entry.kv))
        for observer in observation.observers[index]:
            if observer.is_on and observer.drafter.traits.starts_early:
                # Rows of the pass, of the token after it, and of the next draft, whose last token needs none.
                rows[index] = entry.run + len(draft) + min(plan.max_nodes, plan.max_depth)
                in_flight = InFlight(task, draft, first_state + entry.run - 1, drawn_row)
                _, of_drafter = by_drafter.setdefault(id(observer.drafter), (observer.drafter, []))
                of_drafter.append(in_flight)
    if by_drafter:
        transaction.reserve_early(rows)
    hidden = launched.output.hidden
    were_cold = [drafter.draft_early(requests, hidden, drawn) for drafter, requests in by_drafter.values()]
    return any(were_cold)


def _can_continue(entry: PassEntry, draft: Draft) -> bool:
    """Return whether the draft is a chain on the device and the answer has room for another draft after it."""
    # At least three more tokens: the target's, one draft token, and the target's token after it.
    return draft.device is not None and draft.is_chain and entry.request.room > 2
