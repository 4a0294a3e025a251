"""One decoding step: reserve, plan, propose, trim, forward, accept, commit, report.

Plain decoding (an empty draft), prompt chunks (a run of several tokens) and chains (trees of width one) share all code.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter

from foreword.backends.interface import KvStore
from foreword.kv.paged_cache import PagedCache
from foreword.speculation.accept import Acceptance
from foreword.speculation.drafting import KvMemory
from foreword.speculation.measured.situation import Situation
from foreword.speculation.observing import StepObservers
from foreword.speculation.pipeline import Launched, PassPipeline
from foreword.speculation.probe import FaultLog, StepProbe
from foreword.speculation.proposing import Divide, Plans, Proposal, divide_evenly, plain_plans, propose
from foreword.speculation.protocols import Policy, Target
from foreword.speculation.report import StepReport
from foreword.speculation.requests import PassEntry
from foreword.speculation.transaction import Transaction


@dataclass
class Stepper:
    """Runs steps on one target and one KV cache."""

    target: Target
    cache: PagedCache
    policy: Policy
    max_rows: int | None = None  # row budget of a pass, including draft tokens; None: unlimited
    divide: Divide = divide_evenly  # divides the row budget between drafts
    clock: Callable[[], float] = perf_counter  # seconds
    situation: Situation = field(default_factory=Situation)  # measurements, and the switch for speculation
    faults: FaultLog = field(default_factory=FaultLog)
    store: KvStore | None = None  # storage of the target's pages; None: no drafter writes KV rows into them

    def __post_init__(self) -> None:
        self._memory = None if self.store is None else KvMemory(self.cache, self.store)
        self._observers = StepObservers(self.situation, self.policy, self.faults, self._memory, self.clock)
        self.pipeline = PassPipeline(self._memory, self.faults)

    def step(self, entries: Sequence[PassEntry]) -> StepReport:
        """Run one pass over the entries."""
        report = self.resolve(self.launch(entries))
        self.learn()
        return report

    def launch(self, entries: Sequence[PassEntry], plans: Plans | None = None) -> Launched:
        """Run the stages up to forward, and start acceptance; `plans` replace the policy's. Errors change nothing."""
        probe = StepProbe(self.clock)
        transaction = Transaction(self.cache, entries)
        try:
            transaction.reserve()
            plans = plans or self._plan(entries)
            proposal = propose(transaction, plans, self.max_rows, self.divide, self.clock, self._memory)
            proposal = self._trim(entries, proposal)
            observation = self._observers.of_pass(entries, plans)  # which drafters observe which entries
            batch = self.pipeline.lay_out(transaction, proposal, observation)
            output = probe.forward(self.target, batch)
            acceptance = Acceptance.begin(output.logits, entries, proposal.drafts, observation.wants_draws)
            launched = Launched(transaction, plans, proposal, observation, output, acceptance, probe)
            self.pipeline.enter(launched)
        except BaseException:
            transaction.abort()
            raise
        return launched

    def resolve(self, launched: Launched) -> StepReport:
        """Wait for the verdicts, commit them and notify drafters. An exception before the commit changes nothing."""
        launched.probe.start_resolving()
        self.pipeline.leave(launched)
        with launched.transaction as transaction:
            verdicts = launched.acceptance.verdicts()
            applied = transaction.commit(verdicts)
        report = launched.probe.report(transaction.entries, launched.proposal, verdicts, applied)
        self._observers.publish(report, launched.observation, launched.output)
        return launched.probe.finish(report)

    def learn(self) -> None:
        """Update cost estimates, policy and statistics with all new reports. The next pass may already be in flight."""
        self._observers.catch_up()

    def _plan(self, entries: Sequence[PassEntry]) -> Plans:
        """Return the policy's plans, or no drafts if a request of the entries is also in the pass in flight."""
        if any(entry.kv.passes > 1 for entry in entries):  # its newest token is not known yet
            return plain_plans(entries)
        self._observers.before_plan()  # the policy and the costs see all reports first
        if self.situation.speculating:
            with self.faults.suppressed("plan"):  # a failing policy costs drafts, never a request
                return self.policy.plan(entries, self.situation)
        return plain_plans(entries)

    def _trim(self, entries: Sequence[PassEntry], proposal: Proposal) -> Proposal:
        """Return the proposal with the part of each draft that the policy wants to verify."""
        if proposal.calls:
            with self.faults.suppressed("trim"):
                return replace(proposal, drafts=self.policy.trim(entries, proposal.drafts, self.situation))
        return proposal
