"""The synchronous engine: requests in, committed tokens out."""

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from foreword.acceptance.rules.rule import Rule
from foreword.backends.interface import Decoder
from foreword.backends.memory import passes_in_flight
from foreword.backends.runner import ModelRunner
from foreword.control.fair_share import FairShare
from foreword.control.reporting.figures import ControlReport
from foreword.control.service import divide_by_service_class
from foreword.engine.adapters import Adapters
from foreword.engine.background import BackgroundWork
from foreword.engine.config import EngineParts
from foreword.engine.device_counts import device_counts
from foreword.engine.drafting.drafter_pool import needs_of_all
from foreword.engine.drafting.saved_estimates import SavedEstimates
from foreword.engine.intake import Intake
from foreword.engine.learner import TrafficLearner
from foreword.engine.messages import AnswerDelta, EngineStats, NewRequest
from foreword.engine.policy.monitor import SpeculationMonitor
from foreword.engine.requests.accounting import CohortAccounting
from foreword.engine.requests.request import Assignment, Request
from foreword.engine.scheduling.asynchronous import LookaheadGate
from foreword.engine.scheduling.order import DEADLINE, deadline_of
from foreword.engine.scheduling.scheduler import Scheduler, check_queues
from foreword.engine.text import Vocabulary
from foreword.errors import RequestError
from foreword.kv.paged_cache import PAGE_SIZE, PagedCache
from foreword.speculation.drafting import DrafterNeeds
from foreword.speculation.recovery import Recovery, StepInFlight
from foreword.speculation.report import StageSeconds, StepReport
from foreword.speculation.step import Stepper
from foreword.structured.compiler import Grammars

if TYPE_CHECKING:  # Triton is installed only on GPU machines
    from foreword.backends.cuda.compiling import Kernels

MASK_WAIT = 0.005  # maximum wait in seconds for grammar masks, when no pass can be launched without one

LOADING_SECONDS = 0.005
"""Time budget in seconds, between two steps, for loading kernels that were compiled meanwhile."""


class EngineCore:
    """Owns target, KV cache, scheduler and drafters.

    Each `step` is one target pass for all running requests. Only one thread may call its methods, except `prepare`,
    which is thread-safe.
    """

    def __init__(self, target: Decoder, vocabulary: Vocabulary, parts: EngineParts | None = None) -> None:
        parts = parts or EngineParts()
        config, rule = parts.config.fitted(target), Rule.parse(parts.config.acceptance_rule)
        self._policy = FairShare(parts.policy, config.max_draft_share)
        policy_drafters = self._policy.drafters()
        self.drafters = parts.drafter_pool(rule, policy_drafters, target.config.num_layers)
        early_drafters = [*policy_drafters, *map(self.drafters.create_early, parts.offered)]
        needs, spare_rows = needs_of_all(self.drafters.default, early_drafters), config.spare_rows(target)
        self.drafters.supplied_needs = needs = needs | DrafterNeeds(rows=spare_rows)
        num_pages = config.num_pages(target, needs.rows)
        self.max_model_len = config.context_length(target, needs.rows)
        self.target = target
        states = config.state_sizes(target)
        self.runner = ModelRunner.allocate(
            target, num_pages, PAGE_SIZE, needs.rows, vocabulary.size, states=states
        )
        window = None if needs.rows else target.kv_rows().window  # drafter rows are not windowed
        self.cache = PagedCache(
            num_pages, prefix_caching=config.enable_prefix_caching, window=window, states=states
        )
        parts.spare_rows.lay_out(needs.rows, spare_rows, self.cache.void_rows.add)
        self.max_rows = config.max_num_batched_tokens  # row budget of a pass
        self._clock = parts.clock
        self._stepper = Stepper(
            self.runner,
            self.cache,
            self._policy,
            self.max_rows,
            divide_by_service_class,
            clock=parts.clock,
            store=self.runner.store,
        )
        # Measured acceptance and costs, and `speculating`, the engine-wide switch: off decodes all requests without
        # drafts; on: each request's own setting applies.
        self.situation = self._stepper.situation
        self.faults = self._stepper.faults.counts  # recovered faults by stage
        self._recovery = Recovery(self._stepper)
        self.steps_ahead = config.steps_ahead or passes_in_flight(target.device)
        self._lookahead = LookaheadGate(self._policy, self._stepper.faults)
        max_running = min(states.most_running(config.max_num_seqs), self.max_rows)
        self.scheduler = Scheduler(self._stepper, self.max_rows, max_running, config.max_step_seconds)
        self.adapters = Adapters(target)
        self.background = BackgroundWork()  # loads drafters and compiles grammars for new requests
        self._grammars = Grammars(vocabulary.grammar_tokens)
        self._intake = Intake(
            vocabulary,
            self.max_model_len,
            rule,
            self.drafters,
            self.scheduler.check,
            self.adapters,
            itertools.count(),
            self._grammars,
            parts.policy_file,
        )
        self.is_prepared_for = self._intake.is_prepared_for  # whether `prepare` needs no loading or compiling
        self.speculation_monitor = SpeculationMonitor(
            self.cache, parts.policy, parts.policy_file, self.drafters, rule
        )
        # Unfinished answers by the user's request id; by None those of the replay (an ended request decoded again).
        self._active: dict[str | None, list[Request]] = {}
        self.steps = 0  # number of committed steps
        self.seconds = StageSeconds()  # total over all steps, by stage
        self._cohorts = CohortAccounting()
        self.kernels: Kernels | None = getattr(target, "kernels", None)  # None: not a compiling backend
        self.saved_estimates: SavedEstimates | None = None  # None: estimates are not saved
        self.learner: TrafficLearner | None = None  # None: the head is not trained while serving

    @property
    def has_requests(self) -> bool:
        return self.scheduler.has_requests

    def prepare(self, new: NewRequest, assigned: Assignment | None = None) -> list[Request]:
        """Check a request; return one unqueued `Request` per answer. `assigned` overrides the policy file."""
        with self.drafters.keep_all_open():
            requests = self._intake.admit(new, assigned)
            for request in requests:
                self.drafters.hold(request)
        for request in requests:
            request.accounting.kv_bytes_per_row = self.runner.store.bytes_per_row
            request.accounting.arrived = arrived = self._clock()
            request.scheduling.deadline = deadline_of(new, arrived)
        return requests

    def enqueue(self, requests: list[Request]) -> None:
        """Queue the requests of one `prepare`; raise `RequestError` if their id is in use, which discards them."""
        key = _key(requests[0])
        if key in self._active:
            self.discard(requests)
            raise RequestError(f"a request with the id {key!r} is being answered; choose another id")
        if key is not None and self._abort(None):  # user requests interrupt a replay
            self.speculation_monitor.interrupted()
        self._active[key] = list(requests)
        for request in requests:
            self.drafters.begin(request)
        self.scheduler.add(requests)
        self._notify_learner()

    def discard(self, requests: Sequence[Request]) -> None:
        """Release prepared requests that will not be queued."""
        for request in requests:
            self.adapters.release(request.identity.adapter)
            self.drafters.release(request)

    def add(self, new: NewRequest) -> list[Request]:
        """Check and queue a request; return one `Request` per answer."""
        self.enqueue(requests := self.prepare(new))
        return requests

    @property
    def idle_seconds(self) -> float | None:
        """Maximum seconds that an idle engine waits before it calls `use_idle_time` again; None: unlimited."""
        if self.kernels is not None and self.kernels.pending:
            return LOADING_SECONDS
        limits = [self.speculation_monitor.idle_seconds]
        if self.learner is not None:
            limits.append(self.learner.idle_seconds)
        return min((limit for limit in limits if limit is not None), default=None)

    def use_idle_time(self) -> None:
        """While idle, load compiled kernels and queue the replay that a roll-out (gradual deployment) may need."""
        if self.kernels is not None and self.kernels.pending and not self.has_requests:
            self.kernels.advance(LOADING_SECONDS)
        # "check": the label of faults in replays
        with self._stepper.faults.suppressed("check"), self.drafters.keep_all_open():
            if not self.has_requests and (replay := self.speculation_monitor.next_replay()) is not None:
                self.enqueue(self.prepare(*replay))
        self._notify_learner()

    def _notify_learner(self) -> None:
        if self.learner is not None:
            with self._stepper.faults.suppressed("learning"):
                (self.learner.busy if self.has_requests else self.learner.idle)()

    def abort(self, request_id: str) -> list[AnswerDelta]:
        """Abort a request, also while a step is in flight; return the final deltas of its answers."""
        return [request.take_delta() for request in self._abort(request_id)]

    def _abort(self, key: str | None) -> list[Request]:
        requests = list(self._active.get(key, ()))
        for request in requests:
            request.answer.finish("abort")
            self._remove(request)
        return requests

    def step(self) -> list[AnswerDelta]:
        """Run one target pass; return the new deltas, also of answers that ended at their deadline."""
        ended = self.end_late()
        in_flight = self.launch()
        if in_flight is None:
            self.wait_for_masks()
            return ended
        return [*ended, *self.resolve(in_flight)]

    def wait_for_masks(self) -> None:
        """Wait at most `MASK_WAIT` for the grammar mask of any running request; called if no pass can be launched."""
        if any(not request.sampler.is_ready for request in self.scheduler.running):
            self._grammars.wait_for_masks(MASK_WAIT)

    def end_late(self) -> list[AnswerDelta]:
        """End the answers that `Scheduler.late` returns, because of their deadlines; return their final deltas."""
        late = self.scheduler.late()
        for request, reason in late:
            request.answer.finish(DEADLINE, reason)
            self._remove(request)
        return [request.take_delta() for request, _ in late]

    def launch(self) -> StepInFlight | None:
        """Launch the next pass on the device; return None if nothing can be launched now.

        The next step may be launched before this one is resolved; it leaves out the requests that have a draft in this
        one. Steps must be resolved in launch order.
        """
        if self.kernels is not None and self.kernels.pending:
            self.kernels.advance(LOADING_SECONDS)
        with self._stepper.faults.suppressed("policy"):  # policy work must not fail a request
            self.speculation_monitor.between_steps(len(self.scheduler.waiting))
        began = self._clock()
        entries = self.scheduler.schedule(self._lookahead.may_follow(self.scheduler.running, self.situation))
        if not entries:
            return None
        for entry in entries:
            assert isinstance(entry.request, Request)
            entry.request.accounting.start(began)
        return self._recovery.launch(entries)

    def resolve(self, in_flight: StepInFlight) -> list[AnswerDelta]:
        """Wait for the pass, then commit it and update statistics; return the new deltas."""
        return self.settle(self.commit(in_flight))

    def commit(self, in_flight: StepInFlight) -> StepReport:
        """Wait for the pass and commit it. Statistics are updated later, by `settle`."""
        report = self._recovery.resolve(in_flight)
        for result in report.requests:
            request = result.request
            assert isinstance(request, Request)
            if result.applied and request.answer.finish_reason is not None:
                self._remove(request)
        return report

    def settle(self, report: StepReport) -> list[AnswerDelta]:
        """Update cost estimates, policy and statistics for a committed step; return the new deltas."""
        self._stepper.learn()
        self.steps += 1
        self.seconds += report.seconds
        with self._stepper.faults.suppressed("books"):  # "books": the label of faults in statistics
            self.speculation_monitor.observe(report, self.scheduler.preemptions)
        if self.saved_estimates is not None:
            self.saved_estimates.save_if_due(self.seconds.total)
        return self._deltas(report)

    def stats(self) -> EngineStats:
        """Return the current statistics, without draft nodes."""
        pool, cohorts = self.cache.pool, self.situation.cohorts
        return EngineStats(
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            kv_pages=pool.num_pages,
            kv_pages_used=pool.num_pages - self.cache.available_pages,
            prefix_queries=self.cache.prefix_queries,
            prefix_hits=self.cache.prefix_hits,
            preemptions=self.scheduler.preemptions,
            steps=self.steps,
            draft_seconds=self.seconds.draft,
            verify_seconds=self.seconds.verify,
            accept_seconds=self.seconds.accept,
            step_seconds=self.seconds.total,
            speculating=self.situation.speculating,
            drafter_memory_bytes=self.drafters.memory_bytes(),
            drafter_faults=dict(self.drafters.fault_counts()),
            step_faults=dict(self.faults),
            acceptance={name: s.counts for name, s in cohorts.items() if s.draft_requests},
            cohorts=self._cohorts.snapshot(),
            services=self.scheduler.counts_by_service_class(),
            control=self._report(),
            learning=None if self.learner is None else self.learner.report(),
            **device_counts(self.kernels, self.cache.chunks),
        )

    def _report(self) -> ControlReport | None:
        """Return the state of speculation; None if its computation fails."""
        with self._stepper.faults.suppressed("report"):
            return self.speculation_monitor.report(self.situation, self.seconds, self.has_requests)
        return None

    def close(self) -> None:
        """Cancel preparations, save estimates, and release drafters and grammars."""
        if self.learner is not None:
            self.learner.close()
        self._grammars.close()
        self.background.close()
        self.speculation_monitor.close()
        if self.saved_estimates is not None:
            self.saved_estimates.save()
        self.drafters.close()

    def _deltas(self, report: StepReport) -> list[AnswerDelta]:
        """Add the step to the statistics of cohorts and requests; return the new deltas."""
        self._cohorts.observe(report)
        deltas, now = [], self._clock()
        for result in report.requests:
            request = result.request
            assert isinstance(request, Request)
            if not result.applied:
                continue
            request.accounting.observe(result, report, now)
            has_ended = request.answer.finish_reason is not None
            if (result.verdict.tokens or has_ended) and not request.identity.assigned.is_replay:
                deltas.append(request.take_delta())
            if has_ended:
                with self._stepper.faults.suppressed("books"):
                    self.speculation_monitor.ended(request)
                    if self.learner is not None:
                        self.learner.ended(request)
        return deltas

    def _remove(self, request: Request) -> None:
        """Remove an ended request from the scheduler, and release its adapter and drafters."""
        self.scheduler.remove(request)
        answers = self._active[_key(request)]
        answers.remove(request)
        if not answers:
            del self._active[_key(request)]
        self.adapters.release(request.identity.adapter)
        with self._stepper.faults.suppressed("forget"):  # if this fails, a drafter keeps the request's state
            self.drafters.end(request)

    def check_integrity(self) -> None:
        """Raise `AssertionError` if requests, queues and pages contradict each other."""
        active = [request for answers in self._active.values() for request in answers]
        check_queues(self.cache, self.scheduler, active)


def _key(request: Request) -> str | None:
    """Return the user's request id; None for a replay."""
    return None if request.identity.assigned.is_replay else request.identity.name
