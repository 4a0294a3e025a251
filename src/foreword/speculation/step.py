"""One step: plan, propose, trim, forward, accept, commit. All of decoding is this.

Plain decoding is an empty draft; a prefill chunk is a run of tokens that are already committed; a
chain is a tree of width one. None of them has a code path of its own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import NamedTuple

from foreword.backends.batch import ForwardOutput
from foreword.backends.interface import KvStore
from foreword.kv.paged_cache import PagedCache
from foreword.speculation.accept import Acceptance
from foreword.speculation.anticipating import anticipate
from foreword.speculation.drafting import Drafter, KvMemory
from foreword.speculation.faults import FaultLog
from foreword.speculation.measured.situation import Situation
from foreword.speculation.observing import Observation
from foreword.speculation.proposing import NOBODY, Plans, Proposal, fit_to_room, propose
from foreword.speculation.protocols import Policy, Target
from foreword.speculation.report import RequestReport, StageSeconds, StepReport
from foreword.speculation.requests import PassEntry
from foreword.speculation.rows.layout import BatchBuffers
from foreword.speculation.transaction import Transaction
from foreword.speculation.verdict import Verdict


class Launched(NamedTuple):
    """A step under way: everything was handed to the device, nothing is committed."""

    transaction: Transaction
    output: ForwardOutput
    acceptance: Acceptance
    proposal: Proposal
    observation: Observation
    launch_seconds: float  # of all of the launch
    verify_seconds: float  # of handing the pass over; on a CPU, of the pass
    is_cold: bool  # whether something was compiled or captured


@dataclass
class Stepper:
    """Runs steps on one target and one KV cache."""

    target: Target
    cache: PagedCache
    policy: Policy
    max_rows: int | None = None  # rows of a pass, guesses included; None: no bound
    clock: Callable[[], float] = perf_counter  # seconds
    situation: Situation = field(default_factory=Situation)
    faults: FaultLog = field(default_factory=FaultLog)  # what went wrong and cost nobody more than guesses
    store: KvStore | None = (
        None  # the target's, for drafters that keep rows in its pages; None: there are none
    )
    _buffers: BatchBuffers = field(default_factory=BatchBuffers)
    _brought: list[Drafter] = field(init=False)  # drafters of the policy
    _memory: KvMemory | None = field(init=False)  # for drafters that keep rows in the pages
    newest: Launched | None = None  # the last pass, as long as it is under way
    _unlearned: list[StepReport] = field(default_factory=list)  # of steps that nobody has learned from yet
    _uncounted: list[StepReport] = field(
        default_factory=list
    )  # of steps whose drafts are in no statistics yet

    def __post_init__(self) -> None:
        self._brought = list(self.policy.drafters())
        self._memory = None if self.store is None else KvMemory(self.cache, self.store)

    def step(self, entries: Sequence[PassEntry]) -> StepReport:
        """One pass over the entries."""
        report = self.resolve(self.launch(entries))
        self.learn()
        return report

    def launch(self, entries: Sequence[PassEntry], plans: Plans | None = None) -> Launched:
        """Plan, propose, forward; returns as soon as the work is handed over.

        If anything fails, nothing happened. `plans` are the policy's unless given. A pass that follows one under way
        for the same requests is plain: how that one ends must not depend on guesses of this one, nor they on its token.
        """
        began = self.clock()
        before = self._before(entries)
        follows = any(entry.kv.passes for entry in entries)
        transaction = Transaction(self.cache, entries)
        try:
            transaction.reserve()
            chosen = plans or (plain(entries) if follows else self._plan(entries))
            proposal = self._propose(transaction, chosen)
            tells = getattr(self.policy, "tells", None)
            observation = Observation.of(entries, chosen, self._brought, self._memory, tells)
            batch = transaction.batch(
                proposal.drafts,
                self._buffers,
                observation.taps,
                observation.wanted,
                before.drawn_at() if before is not None else None,
            )
            pending = proposal.pending
            drawn = pending if before is None else before.newest
            if drawn is not None:
                batch = batch.behind(drawn)
            handed_over = self.clock()
            output = self.target.forward(batch)
            verify_seconds = self.clock() - handed_over
            is_cold = output.is_cold or proposal.is_cold
            acceptance = Acceptance.begin(output.logits, entries, proposal.drafts, observation.wants_draws)
            if pending is not None and self._memory is not None:
                with self.faults.forgiven("anticipate"):
                    is_cold |= anticipate(
                        transaction, chosen, proposal.drafts, observation, acceptance, output, self._memory
                    )
        except BaseException:
            transaction.abort()
            raise
        self.newest = launched = Launched(
            transaction,
            output,
            acceptance,
            proposal,
            observation,
            self.clock() - began,
            verify_seconds,
            is_cold,
        )
        return launched

    def _before(self, entries: Sequence[PassEntry]) -> Acceptance | None:
        """The pass that draws what the entries still wait for; None: they wait for nothing."""
        if not any(entry.pending for entry in entries):
            return None
        if self.newest is None:
            raise AssertionError("a token is pending that no pass draws")
        return self.newest.acceptance

    def resolve(self, launched: Launched) -> StepReport:
        """Wait for the pass, judge the drafts and commit; if anything fails, nothing happened.

        What it has shown is left to `learn`: a pass that nobody plans can be on its way before.
        """
        waiting = self.clock()
        if self.newest is launched:
            self.newest = None
        drafts = launched.proposal.drafts
        with launched.transaction as transaction:
            verdicts = launched.acceptance.verdicts()
            applied = transaction.commit(verdicts)
        with self.faults.forgiven("observe"):
            launched.observation.tell(transaction.entries, drafts, verdicts, applied, launched.output)
        accepting = self.clock() - waiting
        # Between the two halves other steps may have had their turn: that time is theirs.
        whole = launched.launch_seconds + accepting
        proposal = launched.proposal.arrived()
        seconds = StageSeconds(proposal.seconds, launched.verify_seconds, accepting, whole)
        report = _report(transaction.entries, proposal, verdicts, applied, seconds)
        report.is_cold = launched.is_cold
        self._unlearned.append(report)
        self._uncounted.append(report)
        return report

    def learn(self) -> None:
        """What the steps since the last time have shown: costs, acceptance, and whatever the policy makes of it."""
        self._learn()
        reports, self._uncounted = self._uncounted, []
        for report in reports:
            with self.faults.forgiven("books"):
                self.situation.count(report)

    def _learn(self) -> None:
        """What the next plan depends on; statistics can wait until its pass is on its way."""
        reports, self._unlearned = self._unlearned, []
        for report in reports:
            with self.faults.forgiven("books"):
                self.situation.learn(report)
            with self.faults.forgiven("learn"):
                self.policy.learn(report)

    def _plan(self, entries: Sequence[PassEntry]) -> Plans:
        self._learn()  # a policy compares what it has planned with what came of it before it plans anew
        if self.situation.speculating:
            with self.faults.forgiven("plan"):  # a policy that fails costs guesses, never a request
                return self.policy.plan(entries, self.situation)
        return plain(entries)

    def _propose(self, transaction: Transaction, plans: Plans) -> Proposal:
        entries = transaction.entries
        fitted = fit_to_room(entries, plans, self.cache, self.max_rows)
        if self.store is not None and any(fitted):
            transaction.lend(fitted, self.store)
        proposal = propose(entries, fitted, self.clock, self._memory)
        if not proposal.calls:
            return proposal
        with self.faults.forgiven("trim"):
            trimmed = self.policy.trim(entries, proposal.drafts, self.situation)
            return replace(proposal, drafts=trimmed)
        return proposal


def plain(entries: Sequence[PassEntry]) -> Plans:
    return [None] * len(entries)


def _report(
    entries: Sequence[PassEntry],
    proposal: Proposal,
    verdicts: Sequence[Verdict],
    applied: Sequence[bool],
    seconds: StageSeconds,
) -> StepReport:
    asked = proposal.asked or [NOBODY] * len(entries)
    parts = [
        RequestReport(
            entry.request, verdict, entry.run, entry.computed, entry.draws, who.method, who.seconds, present
        )
        for entry, verdict, who, present in zip(entries, verdicts, asked, applied, strict=True)
    ]
    return StepReport(parts, proposal.calls, seconds)
