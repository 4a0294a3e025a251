"""Requests in, committed tokens out: the engine without threads."""

import itertools
from collections import Counter
from dataclasses import dataclass, field
from time import perf_counter

from foreword.acceptance.rules.rule import Rule
from foreword.backends.interface import Decoder
from foreword.control.fair_share import FairShare
from foreword.control.fixed import FixedPolicy
from foreword.drafters.config import SpeculationConfig
from foreword.engine.config import EngineConfig
from foreword.engine.drafter_pool import Build, DrafterRack
from foreword.engine.intake import Intake
from foreword.engine.messages import AnswerDelta, EngineStats, NewRequest
from foreword.engine.request import Request
from foreword.engine.scheduler import Scheduler, SchedulerSizes
from foreword.engine.vocabulary import Vocabulary
from foreword.errors import RequestError
from foreword.kv.paged_cache import PAGE_SIZE, PagedCache
from foreword.speculation.protocols import Drafter, Policy, added_memory
from foreword.speculation.situation import Situation
from foreword.speculation.step import Launched, Stepper, StepResult


@dataclass
class StepSeconds:
    """Where the time of an engine's steps went, added up."""

    steps: int = 0
    draft: float = 0.0
    verify: float = 0.0
    accept: float = 0.0
    total: float = 0.0  # all of the step; what the other three leave is scheduling and bookkeeping

    def add(self, result: StepResult, total: float) -> None:
        """Count one step."""
        self.steps += 1
        self.draft += result.draft_seconds
        self.verify += result.verify_seconds
        self.accept += result.accept_seconds
        self.total += total


@dataclass(frozen=True)
class UnderWay:
    """A step of the engine between its two halves."""

    requests: list[Request]  # in the order of the pass
    launched: Launched
    began: float


@dataclass(frozen=True)
class Parts:
    """What an engine may be given instead of its own."""

    config: EngineConfig = field(default_factory=EngineConfig)
    policy: Policy = field(default_factory=FixedPolicy)  # who drafts, with what, how deep
    build_drafter: Build | None = None  # makes the drafters that requests ask for; None: they cannot ask
    speculation: SpeculationConfig | None = None  # of requests that don't ask


class EngineCore:
    """Owns target, KV and scheduler; every `step` is one target pass for all requests that run.

    It belongs to one thread, but for `prepare`, which any thread may call.
    """

    def __init__(self, target: Decoder, vocabulary: Vocabulary, parts: Parts | None = None) -> None:
        parts = parts or Parts()
        config = parts.config
        num_pages = config.num_pages(target)
        self.max_model_len = config.context_length(target)
        target.allocate_kv(num_pages, PAGE_SIZE)
        self.target = target
        self.cache = PagedCache(num_pages, prefix_caching=config.enable_prefix_caching)
        self.scheduler = Scheduler(
            self.cache, SchedulerSizes(config.max_num_batched_tokens, config.max_num_seqs)
        )
        rule = Rule.parse(config.acceptance_rule)
        self.rack = DrafterRack(parts.build_drafter or _no_drafters, rule, parts.speculation)
        self._policy = FairShare(parts.policy, config.max_draft_share)
        self._stepper = Stepper(target, self.cache, self._policy, config.max_num_batched_tokens)
        self._intake = Intake(
            vocabulary, self.max_model_len, rule, self.rack, self.scheduler.check, itertools.count()
        )
        self._kv_row_bytes = target.kv_bytes_per_row()
        self._active: dict[
            str, list[Request]
        ] = {}  # by the user's id, those of its answers that have not ended
        self.seconds = StepSeconds()

    @property
    def has_requests(self) -> bool:
        """Whether anything is left to do."""
        return self.scheduler.has_requests

    @property
    def speculating(self) -> bool:
        """The switch for everyone: off, all requests decode plainly; on, as they wished."""
        return self._stepper.situation.speculating

    @speculating.setter
    def speculating(self, on: bool) -> None:
        self._stepper.situation.speculating = on

    @property
    def situation(self) -> Situation:
        """What was measured: acceptance by cohort, the cost of steps."""
        return self._stepper.situation

    @property
    def faults(self) -> Counter[str]:
        """What went wrong in steps and was recovered from, by stage."""
        return self._stepper.faults

    def prepare(self, new: NewRequest) -> list[Request]:
        """Check a request and make ready what it needs; nothing is queued. Raises `RequestError`."""
        requests = self._intake.admit(new)
        for request in requests:
            request.ledger.kv_bytes_per_row = self._kv_row_bytes
        return requests

    def enqueue(self, requests: list[Request]) -> None:
        """Queue the requests of one `prepare`."""
        name = requests[0].name
        if name in self._active:
            raise RequestError(f"a request with the id {name!r} is being answered; choose another id")
        self._active[name] = list(requests)
        self.scheduler.add(requests)

    def add(self, new: NewRequest) -> list[Request]:
        """Check and queue a request; returns one `Request` for each of its answers."""
        requests = self.prepare(new)
        self.enqueue(requests)
        return requests

    def abort(self, request_id: str) -> list[AnswerDelta]:
        """Stop working on a request, also while a step is under way; the ends of its answers are returned."""
        requests = list(self._active.get(request_id, ()))
        for request in requests:
            request.finish_reason = "abort"
            self._remove(request)
        return [request.take_delta() for request in requests]

    def step(self) -> list[AnswerDelta]:
        """One target pass; returns what the answers have gained."""
        under_way = self.launch()
        return [] if under_way is None else self.resolve(under_way)

    def launch(self) -> UnderWay | None:
        """Hand the next pass to the device; None if there is nothing to do."""
        began = perf_counter()
        scheduled = self.scheduler.schedule(self.speculating)
        if not scheduled:
            return None
        requests = list(self.scheduler.running)
        for request in requests:
            request.ledger.started = request.ledger.started or began
        return UnderWay(requests, self._stepper.launch(scheduled), began)

    def resolve(self, under_way: UnderWay) -> list[AnswerDelta]:
        """Wait for the pass and commit it."""
        result = self._stepper.resolve(under_way.launched)
        deltas = self._settle(under_way.requests, result)
        self.seconds.add(result, perf_counter() - under_way.began)
        return deltas

    def stats(self) -> EngineStats:
        """How things stand."""
        pool, cohorts = self.cache.pool, self.situation.cohorts
        return EngineStats(
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            kv_pages=pool.num_pages,
            kv_pages_used=pool.num_pages - self.cache.available_pages,
            prefix_queries=self.cache.prefix_queries,
            prefix_hits=self.cache.prefix_hits,
            preemptions=self.scheduler.preemptions,
            steps=self.seconds.steps,
            draft_seconds=self.seconds.draft,
            verify_seconds=self.seconds.verify,
            accept_seconds=self.seconds.accept,
            step_seconds=self.seconds.total,
            speculating=self.speculating,
            drafter_memory_bytes=added_memory([self.rack, self._policy]),
            drafter_faults=dict(self.rack.fault_counts()),
            step_faults=dict(self.faults),
            acceptance={name: (s.drafts, s.drafted, s.accepted) for name, s in cohorts.items()},
        )

    def _settle(self, requests: list[Request], result: StepResult) -> list[AnswerDelta]:
        """Do the books of a step and say what the answers have gained."""
        now, all_rows, deltas = perf_counter(), max(sum(result.rows), 1), []
        for request, verdict, applied, rows in zip(
            requests, result.verdicts, result.applied, result.rows, strict=True
        ):
            if not applied:
                continue
            request.ledger.count_pass(result, rows / all_rows)
            if verdict.tokens or request.finish_reason is not None:
                request.ledger.note_tokens(len(verdict.tokens), now)
                deltas.append(request.take_delta())
            if request.finish_reason is not None:
                self._remove(request)
        return deltas

    def _remove(self, request: Request) -> None:
        self.scheduler.remove(request)
        answers = self._active[request.name]
        answers.remove(request)
        if not answers:
            del self._active[request.name]
        try:
            self._policy.forget(request)
        except Exception as error:  # what a drafter keeps too long costs memory, never an answer
            self._stepper.note_fault("forget", error)

    def check_integrity(self) -> None:
        """Raise `AssertionError` if requests, queues and pages contradict each other."""
        self.cache.check_integrity()
        queued = [*self.scheduler.running, *self.scheduler.waiting]
        active = [request for answers in self._active.values() for request in answers]
        if sorted(r.request_id for r in queued) != sorted(r.request_id for r in active):
            raise AssertionError("the queues do not hold exactly the requests that are being answered")
        if any(self.cache.is_open(request.kv) for request in self.scheduler.waiting):
            raise AssertionError("a waiting request holds KV pages")
        if not all(self.cache.is_open(request.kv) for request in self.scheduler.running):
            raise AssertionError("a running request has no KV sequence")
        if self.cache.num_open != len(self.scheduler.running):
            raise AssertionError("a KV sequence belongs to nobody")


def _no_drafters(config: SpeculationConfig) -> Drafter:
    raise RequestError(
        f"this engine cannot make drafters, so method {'+'.join(config.method)!r} is not to be had"
    )
