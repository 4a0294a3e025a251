"""One step: plan, propose, verify, accept, commit. All of decoding is this.

Plain decoding is an empty draft; a prefill chunk is a run of tokens that are already committed; a
chain is a tree of width one. None of them has a code path of its own.
"""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter

from foreword.kv.paged_cache import PagedCache
from foreword.speculation.accept import accept
from foreword.speculation.layout import BatchBuffers
from foreword.speculation.proposing import Proposal, fit_to_room, propose
from foreword.speculation.protocols import Planned, Policy, Scheduled, Target
from foreword.speculation.situation import Situation
from foreword.speculation.transaction import Transaction
from foreword.speculation.verdict import NOTHING_DRAWN, Verdict

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Launched:
    """A step under way: everything was handed to the device, nothing is committed."""

    scheduled: Sequence[Scheduled]
    transaction: Transaction
    verdicts: Callable[[], list[Verdict]]  # waits for the device; raises what made the launch fail
    proposal: Proposal
    verify_seconds: float  # until the pass was handed over; on a CPU, until it was done


@dataclass(frozen=True)
class StepResult:
    """What a step committed, one verdict for every scheduled request, and where its time went."""

    verdicts: list[Verdict]
    applied: list[bool]  # False: the request was gone when its verdict came
    rows: list[int]  # of the pass, per request
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    accept_seconds: float = 0.0


@dataclass
class Stepper:
    """Runs steps on one target and one KV cache."""

    target: Target
    cache: PagedCache
    policy: Policy
    max_rows: int | None = None  # rows of a pass, guesses included; None: no bound
    situation: Situation = field(default_factory=Situation)
    faults: Counter[str] = field(default_factory=Counter)  # what went wrong and was recovered from, by stage
    _buffers: BatchBuffers = field(default_factory=BatchBuffers)

    def step(self, scheduled: Sequence[Scheduled]) -> StepResult:
        """One pass over the scheduled requests."""
        return self.resolve(self.launch(scheduled))

    def launch(self, scheduled: Sequence[Scheduled]) -> Launched:
        """Plan, propose, verify; returns as soon as the work is handed over."""
        return self._launch(scheduled, self._plan(scheduled))

    def resolve(self, launched: Launched) -> StepResult:
        """Wait for the verdicts and commit them.

        If anything failed, the step is tried again without guesses, then one request at a time, and only the
        requests that fail alone are given up.
        """
        try:
            return self._resolve(launched)
        except Exception as error:
            self.note_fault("step", error)
        present = [share for share in launched.scheduled if self.cache.is_open(share.request.kv)]
        try:
            results = [self._resolve(self._launch(present, _plain(present)))]
        except Exception as error:
            self.note_fault("plain step", error)
            results = [self._alone(share) for share in present]
        return _merged(launched.scheduled, present, results)

    def _plan(self, scheduled: Sequence[Scheduled]) -> Sequence[Planned]:
        if not self.situation.speculating:
            return _plain(scheduled)
        try:
            return self.policy.plan(scheduled, self.situation)
        except Exception as error:  # a policy that fails costs guesses, never a request
            self.note_fault("plan", error)
            return _plain(scheduled)

    def _launch(self, scheduled: Sequence[Scheduled], plan: Sequence[Planned]) -> Launched:
        transaction = Transaction(self.cache, scheduled)
        proposal, began = Proposal(), perf_counter()
        try:
            transaction.reserve()
            proposal = propose(fit_to_room(plan, self.cache, self.max_rows))
            batch = transaction.batch(proposal.drafts, self._buffers)
            began = perf_counter()
            output = self.target.forward(batch)
        except Exception as error:
            transaction.abort()
            return Launched(scheduled, transaction, _raising(error), proposal, perf_counter() - began)
        except BaseException:
            transaction.abort()
            raise
        verified = perf_counter() - began
        parts, drafts = transaction.parts, proposal.drafts
        return Launched(
            scheduled, transaction, lambda: accept(output.logits, parts, drafts), proposal, verified
        )

    def _resolve(self, launched: Launched) -> StepResult:
        began = perf_counter()
        with launched.transaction as transaction:
            verdicts = launched.verdicts()
            applied = transaction.commit(verdicts)
        drafts = launched.proposal.drafts
        rows = [part.run + len(draft) for part, draft in zip(transaction.parts, drafts, strict=True)]
        self._learn(launched, verdicts, applied, sum(rows))
        times = (launched.proposal.seconds, launched.verify_seconds, perf_counter() - began)
        return StepResult(verdicts, applied, rows, *times)

    def _alone(self, share: Scheduled) -> StepResult:
        try:
            return self._resolve(self._launch([share], _plain([share])))
        except Exception as error:
            self.note_fault("request", error)
            message = f"the model failed on this request: {type(error).__name__}: {error}"
            share.request.fail(message)
            return StepResult([Verdict(error=message)], [True], [0])

    def _learn(
        self, launched: Launched, verdicts: Sequence[Verdict], applied: Sequence[bool], rows: int
    ) -> None:
        self.situation.costs.observe_pass(rows, launched.verify_seconds)
        for call in launched.proposal.calls:
            self.situation.costs.observe_drafting(call.method, call.guesses, call.seconds)
        for share, verdict, present in zip(launched.scheduled, verdicts, applied, strict=True):
            if present:
                for stats in (share.request.acceptance, self.situation.cohorts[share.request.cohort]):
                    stats.observe(verdict.drafted, verdict.depth, len(verdict.path))

    def note_fault(self, stage: str, error: Exception) -> None:
        """Count a fault that cost nobody more than guesses or a try; the first of each stage is logged."""
        self.faults[stage] += 1
        if self.faults[stage] == 1:
            _log.error("a %s failed and is recovered from: %s", stage, error, exc_info=error)


def _plain(scheduled: Sequence[Scheduled]) -> list[Planned]:
    return [Planned(share) for share in scheduled]


def _raising(error: Exception) -> Callable[[], list[Verdict]]:
    def fail() -> list[Verdict]:
        raise error

    return fail


def _merged(
    scheduled: Sequence[Scheduled], present: Sequence[Scheduled], results: Sequence[StepResult]
) -> StepResult:
    """The results of several smaller steps as one, in the order of the whole."""
    found = {
        id(share.request): outcome
        for share, outcome in zip(
            present,
            (
                row
                for result in results
                for row in zip(result.verdicts, result.applied, result.rows, strict=True)
            ),
            strict=True,
        )
    }
    rows = [found.get(id(share.request), (NOTHING_DRAWN, False, 0)) for share in scheduled]
    return StepResult(
        [verdict for verdict, _, _ in rows],
        [applied for _, applied, _ in rows],
        [count for _, _, count in rows],
        sum(result.draft_seconds for result in results),
        sum(result.verify_seconds for result in results),
        sum(result.accept_seconds for result in results),
    )
