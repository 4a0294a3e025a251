"""What an engine does about guessing beside its steps: books, roll-outs, checks, reports."""

import logging
from time import monotonic

from foreword.acceptance.rules.rule import Rule
from foreword.control.measured import MeasuredPolicy
from foreword.control.policy_file.document import Prices
from foreword.control.reporting.books import SpeculationBooks
from foreword.control.reporting.figures import ControlReport
from foreword.control.rollout.evidence import Outcome
from foreword.engine.guessing.drafter_pool import DrafterPool
from foreword.engine.messages import NewRequest
from foreword.engine.policy.assignment import Assignment
from foreword.engine.policy.reporting import Load, control_report
from foreword.engine.policy.steering import Pressure, Steering
from foreword.engine.policy.verification import CHECK, Books, IdleChecks
from foreword.engine.policy.watching import WATCH_SECONDS
from foreword.engine.requests.request import Request
from foreword.errors import RequestError
from foreword.kv.paged_cache import PagedCache
from foreword.speculation.measured.situation import Situation
from foreword.speculation.protocols import Policy
from foreword.speculation.report import StageSeconds, StepReport

_log = logging.getLogger(__name__)

REPORT_SECONDS = 1.0
"""After which a busy engine's report is made anew: it is asked for far more often than it changes."""


class GuessingDesk:
    """Sees every step and every end of a request; it belongs to the engine's thread."""

    def __init__(
        self, cache: PagedCache, policy: Policy, steering: Steering | None, drafters: DrafterPool, rule: Rule
    ) -> None:
        self._cache = cache
        self._policy = policy if isinstance(policy, MeasuredPolicy) else None
        self._steering = steering
        self._drafters = drafters
        self.books = SpeculationBooks(cache.page_size)
        self._began = monotonic()
        self._steps = 0
        self._report: ControlReport | None = None
        self._reported_at, self._reported_steps = 0.0, 0
        self._checks: IdleChecks | None = None
        self._check_pages = 0
        self._check_seconds = 0.0
        self._is_checking = False
        if steering is not None:
            steering.attach(drafters)
            self._checks = IdleChecks(steering, rule is Rule.COUPLED, not steering.is_shape_invariant)

    @property
    def idle_seconds(self) -> float | None:
        """Longest time between two calls of `between_steps`: the policy file is due then. None without a file."""
        return None if self._steering is None else WATCH_SECONDS

    def between_steps(self, waiting: int) -> None:
        if self._steering is not None:
            used = 1 - self._cache.available_pages / self._cache.pool.num_pages
            self._steering.between_steps(Pressure(waiting, used), self.books)

    def observe(self, report: StepReport, preemptions: int) -> None:
        """A step was done."""
        self._steps += 1
        self._check_seconds += report.seconds.total
        if not self._is_checking:  # it runs alone, and nobody is served by it
            self.books.observe(report, preemptions)

    def ended(self, request: Request) -> None:
        """A request was answered, and is gone from the engine."""
        if self._checks is None or self._steering is None:
            return
        if request.name == CHECK:
            self._is_checking = False
            pages = self._cache.available_pages
            self._checks.finished(request, Books(self._check_pages, pages, self._check_seconds))
            return
        self._checks.ended(request)
        if request.places:
            outcome = outcome_of(request, self._steering.document.prices)
            for place in request.places:
                self._steering.ended(place, outcome)

    def next_check(self) -> tuple[NewRequest, Assignment] | None:
        """A request that is to be decoded again, now that there is time."""
        found = None if self._checks is None else self._checks.next()
        if found is not None:
            self._check_pages, self._check_seconds = self._cache.available_pages, 0.0
            self._is_checking = True
        return found

    def interrupted(self) -> None:
        """Somebody wants the engine: what is being checked is decoded again when there is time."""
        self._is_checking = False

    def report(self, situation: Situation, seconds: StageSeconds, is_busy: bool) -> ControlReport:
        """How guessing stands, or stood a few steps ago."""
        now = monotonic()
        if self._is_stale(now, is_busy):
            pages = self._cache.pool.num_pages
            used = pages - self._cache.available_pages
            load = Load(now - self._began, seconds, pages, used, self._drafters.fault_counts())
            self._report = control_report(self._policy, situation, self.books, self._steering, load)
            self._reported_at, self._reported_steps = now, self._steps
        assert self._report is not None
        return self._report

    def _is_stale(self, now: float, is_busy: bool) -> bool:
        if self._report is None or (not is_busy and self._steps != self._reported_steps):
            return True
        return now - self._reported_at >= REPORT_SECONDS

    def move(self, drafter: str, cohort: str, state: str) -> None:
        """The operator's own move."""
        try:
            if self._steering is None:
                raise RequestError("there is no policy file")
            self._steering.set_stage(drafter, cohort, state)
        except RequestError as error:
            _log.warning("%s for %s stays as it is: %s", drafter, cohort, error)
        self._report = None

    def close(self) -> None:
        if self._steering is not None:
            self._steering.close()


def outcome_of(request: Request, prices: Prices | None) -> Outcome:
    """How a request has gone, for the arm that it belongs to."""
    ledger = request.ledger
    tokens = len(request.output_ids)
    later = tokens - ledger.first_tokens
    target, draft = ledger.seconds.total - ledger.seconds.draft, ledger.seconds.draft
    weights = prices or Prices(1.0, 1.0)
    return Outcome(
        passes=ledger.passes,
        tokens=tokens,
        ttft=ledger.queue_seconds + ledger.prefill_seconds,
        tpot=ledger.decode_seconds / later if later > 0 else None,
        cost=target * weights.target + draft * weights.draft,
        preemptions=ledger.preemptions,
        is_error=request.finish_reason == "error",
    )
