"""Selects the requests of the next pass, and the rows of each."""

from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import attrgetter

from foreword.engine.requests.request import Request
from foreword.engine.scheduling import order
from foreword.engine.scheduling.kept_prompts import KeptPrompts
from foreword.errors import RequestError
from foreword.kv.paged_cache import PagedCache
from foreword.kv.sequence import KvSequence
from foreword.speculation.requests import PassEntry
from foreword.speculation.step import Stepper

MIN_CHUNK = 16  # minimum prompt rows per pass, even if they exceed the time limit

_arrival = attrgetter("request_id")


class Scheduler:
    """Selects the requests of each pass and their rows. Admission follows `order.Order`.

    - A running request that is ready and not in flight is in the pass with at least one row. Remaining rows go to
      prompts in the order of `preemption_rank`, except for rows reserved for the drafts that the policy will request.
    - While others decode, prompt rows are limited so that the pass takes a bounded time. While requests of the latency
      class decode, the other classes take turns, so that the pass meets the shortest limit.
    - When pages run out, the last request by `preemption_rank` is preempted: it releases its pages and waits again, in
      the order of arrival. A request is also preempted to admit one of a more urgent class.
    - No request starves: those that waited too long are admitted first, the earliest of them is never preempted, and
      requests that do not fit alone are refused.
    """

    def __init__(
        self, stepper: Stepper, max_rows: int, max_running: int, max_seconds: float | None = None
    ) -> None:
        """Set the limits of one pass.

        `max_rows` includes draft tokens. `max_seconds` limits a pass with prompts while others decode; None: no limit.
        """
        self._cache, self._policy, self._faults = stepper.cache, stepper.policy, stepper.faults
        self._situation, self._clock = stepper.situation, stepper.clock
        self._max_rows, self._max_running, self._max_seconds = max_rows, max_running, max_seconds
        self.kept_prompts = KeptPrompts(self._cache)
        self._order = order.Order(max_running, stepper.clock)
        self.waiting: list[Request] = []  # sorted by arrival
        self.running: list[Request] = []  # sorted by preemption rank
        self.preemptions = 0  # since the start
        self._passes = 0  # number of scheduled passes

    @property
    def has_requests(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, requests: Iterable[Request]) -> None:
        """Queue requests by their ids, which number them by arrival."""
        for request in requests:
            insort(self.waiting, request, key=_arrival)

    def check(self, request: Request) -> None:
        """Raise `RequestError` for a request that could never run."""
        pages = self._cache.pool.num_pages
        if self._cache.pages_for(request.answer.final_len) > pages:
            raise RequestError(
                f"the request may need {request.answer.final_len} tokens of KV cache and there are "
                f"{pages * self._cache.page_size}; lower max_tokens or enlarge the cache"
            )

    def remove(self, request: Request) -> None:
        """Remove an ended request and close its KV; the prompt stays if other answers to it wait."""
        if request in self.running:
            self.running.remove(request)
            self.kept_prompts.keep(request, self.waiting)
            self._cache.close(request.kv)
        elif request in self.waiting:
            self.waiting.remove(request)
            self.kept_prompts.release_unneeded(self.waiting)

    def schedule(self, may_pipeline: bool = False) -> list[PassEntry]:
        """Admit and preempt requests, then return the entries of the next pass.

        A request is skipped while its grammar mask is computed. With `may_pipeline`, requests in flight are included if
        every ready request can be laid out now; otherwise all requests in flight are skipped.
        """
        self._admit()
        self.kept_prompts.release_unneeded(self.waiting)
        ready = [request for request in self.running if request.sampler.is_ready]
        free = [request for request in ready if self._can_be_laid_out(request)]
        if len(free) < len(ready) or not may_pipeline:
            free = [request for request in free if not request.kv.passes]
        runs = self._run_lengths(free)
        self._preempt_for_pages(runs)
        self._passes += 1
        chosen = [request for request in self.running if request.request_id in runs]
        for request in chosen:
            request.scheduling.last_pass = self._passes
        return [PassEntry.of(request, runs[request.request_id]) for request in chosen]

    def _can_be_laid_out(self, request: Request) -> bool:
        """Return whether the next pass can include the request now; it may still be in a pass in flight."""
        return not self._cache.is_busy(request.kv) and (not request.kv.passes or request.can_pipeline)

    def late(self) -> list[tuple[Request, str]]:
        """Return the requests to end now because of their deadlines, with the reasons of `order.reason_to_end`."""
        timed = [
            request for request in (*self.running, *self.waiting) if request.scheduling.deadline is not None
        ]
        if not timed:
            return []
        now, costs, running = self._clock(), self._situation.costs, len(self.running)
        reasons = (
            (request, order.reason_to_end(request, now, costs, running, self._cached_rows(request)))
            for request in timed
        )
        return [(request, reason) for request, reason in reasons if reason is not None]

    def _cached_rows(self, request: Request) -> int:
        """Return the prompt rows that a waiting request will take from the prefix cache or from its leader.

        The leader is the first of several answers to one prompt (`n` > 1). Return 0 for a request that its deadline
        cannot refuse: only that check uses the count.
        """
        deadline = request.scheduling.deadline
        if request.kv.computed or deadline is None or not deadline.must_be_whole:
            return 0
        if request.scheduling.leader is not None:
            return request.prompt_len - 1
        pages = self._cache.matching_pages(request.owner_of_pages, request.tokens)
        return pages * self._cache.page_size

    def counts_by_service_class(self) -> dict[str, tuple[int, int]]:
        """Return the number of running and of waiting requests by service class."""
        running = Counter(request.service.name for request in self.running)
        waiting = Counter(request.service.name for request in self.waiting)
        return {name: (running[name], waiting[name]) for name in sorted({*running, *waiting})}

    def preempt(self, request: Request) -> None:
        """Release the pages of a running request and queue it by its arrival; its KV will be computed again."""
        self.running.remove(request)
        self._cache.close(request.kv)
        request.preempt()
        self.preemptions += 1
        insort(self.waiting, request, key=_arrival)

    def _run_lengths(self, requests: list[Request]) -> dict[int, int]:
        """Return, by request id, the number of tokens whose KV the next pass computes, without draft tokens."""
        if (limit := order.tightest_limit(requests)) is not None:
            return order.rows_within_limit(requests, limit, self._situation.costs, self._max_rows)
        decoding = [request for request in requests if request.uncomputed == 1]
        if len(decoding) == len(requests) <= self._max_rows:
            return dict.fromkeys([request.request_id for request in requests], 1)
        budget = self._max_rows - len(requests)
        if len(decoding) < len(requests):
            budget -= min(self._draft_rows(decoding), budget // 2)
            if decoding:
                budget = min(budget, self._rows_in_time(len(requests)))
        return order.rows_in_order(requests, budget)

    def _draft_rows(self, decoding: list[Request]) -> int:
        """Return the rows that the policy wants for draft tokens; 0 if the policy fails."""
        if self._situation.speculating:
            with self._faults.suppressed("rows wanted"):
                return max(0, int(self._policy.rows_wanted(decoding, self._situation)))
        return 0

    def _rows_in_time(self, requests: int) -> int:
        """Return the prompt rows that fit into a step's time limit, beside one row per request."""
        if self._max_seconds is None:
            return self._max_rows
        return max(self._situation.costs.prompt_rows_within(self._max_seconds) - requests, MIN_CHUNK)

    def _preempt_for_pages(self, runs: dict[int, int]) -> None:
        """Preempt requests, the last first, until the others have pages for their rows; remove them from `runs`."""
        if len(runs) + sum(runs.values()) // self._cache.page_size <= self._cache.free_pages:
            return  # enough pages even if every run starts a new one
        while True:
            chosen = [request for request in self.running if request.request_id in runs]
            missing = sum([self._missing_pages(request, runs[request.request_id]) for request in chosen])
            if missing <= self._cache.available_pages:
                return
            if not self.kept_prompts.release_all():
                last = self.running[-1]
                runs.pop(last.request_id, None)
                self.preempt(last)

    def _missing_pages(self, request: Request, run: int) -> int:
        """Return how many more pages the request needs for its next `run` rows."""
        kv = request.kv
        missing = self._cache.pages_for(kv.begin + run) - len(kv.pages)
        return missing if missing > 0 else 0

    def _admit(self) -> None:
        """Start waiting requests while there are pages for their tokens, and a spare one per running request."""
        if not self.waiting:
            return
        skipped: set[int] = set()  # ids of requests that wait for the prompt rows of a first answer
        queues = order.TenantQueues(self._candidates())
        promised = self._promised()
        while (request := self._order.first(queues.heads(), self.running)) is not None:
            queues.remove_head(request)
            if _waits_for_leader(request):
                skipped.add(request.request_id)
                continue
            preempted_before = self.preemptions
            start = self._find_start(request, promised)
            if start is None:
                return
            request.kv = start.open()
            if not request.accounting.passes:
                request.accounting.cached_tokens = request.kv.computed
            self.waiting.remove(request)
            insort(self.running, request, key=order.preemption_rank)
            has_preempted = self.preemptions > preempted_before
            if has_preempted:
                promised = self._promised()
            else:
                promised += self._missing_pages(request, request.uncomputed)
            if self._is_full or has_preempted:  # the candidates have changed
                queues = order.TenantQueues(
                    other for other in self._candidates() if other.request_id not in skipped
                )

    @property
    def _is_full(self) -> bool:
        return len(self.running) >= self._max_running

    def _candidates(self) -> list[Request]:
        """Return the requests that may start; if the engine is full, those that may preempt another."""
        if not self._is_full:
            return self.waiting
        return [request for request in self.waiting if order.is_preempted_by(self.running[-1], request)]

    def _promised(self) -> int:
        """Return the pages that running requests still need for their current tokens."""
        return sum(self._missing_pages(request, request.uncomputed) for request in self.running)

    def _find_start(self, request: Request, promised: int) -> "_Start | None":
        """Return how to start a request if there is room; None: it must wait.

        Requests of less urgent classes are preempted if that makes enough room. `promised` pages are not available.
        """
        while True:
            start = self._start(request)
            spare = self._cache.available_pages - promised - len(self.running)
            needed = self._cache.pages_for(len(request.tokens)) - start.shared_pages
            if needed <= spare and not self._is_full and self._cache.can_open:
                return start
            if (needed > spare or not self._cache.can_open) and self.kept_prompts.release_all():
                continue
            # A preempted request releases its pages, those promised to it, and its spare one.
            releasable = sum(
                len(running.kv.pages) + self._missing_pages(running, running.uncomputed) + 1
                for running in self.running
                if order.is_preempted_by(running, request)
            )
            is_last_preemptible = bool(self.running) and order.is_preempted_by(self.running[-1], request)
            if not is_last_preemptible or needed > spare + releasable:
                return None
            self.preempt(self.running[-1])
            promised = self._promised()

    def _start(self, request: Request) -> "_Start":
        """Return how to start a request: with the rows of the first answer to its prompt, or of the prefix cache."""
        cache, leader, page_size = self._cache, request.scheduling.leader, self._cache.page_size
        is_scored = request.prompt_logprobs is None or request.scored >= request.prompt_len - 1
        # Rows found in the cache yield no log-probabilities.
        tokens = request.tokens if is_scored else ()
        matching = cache.matching_pages(request.owner_of_pages, tokens)
        rows = request.prompt_len - 1
        source = None if leader is None else self.kept_prompts.source(leader)
        has_more_rows = source is not None and source.computed >= rows > matching * page_size
        if source is not None and has_more_rows and cache.can_fork(source, rows):
            return _Start(rows // page_size, lambda: cache.fork(source, rows))
        idle = cache.idle_matching_pages(request.owner_of_pages, tokens)
        return _Start(
            matching - idle,
            lambda: cache.open(request.owner_of_pages, tokens, again=request.accounting.passes > 0),
        )


@dataclass(frozen=True)
class _Start:
    """A way to start a request: with KV rows of another answer, of the prefix cache, or of neither."""

    shared_pages: int  # pages that other sequences use too, so that they take no free page
    open: Callable[[], KvSequence]  # opens the request's KV sequence


def _waits_for_leader(request: Request) -> bool:
    """Return whether the first answer to the same prompt will compute rows that this request can copy."""
    leader = request.scheduling.leader
    return leader is not None and leader.finish_reason is None and leader.kv.computed < request.prompt_len - 1


def check_queues(cache: PagedCache, scheduler: Scheduler, active: Iterable[Request]) -> None:
    """Raise `AssertionError` if queues, pages and the `active` requests are inconsistent."""
    cache.check_integrity()
    queued = [*scheduler.running, *scheduler.waiting]
    if sorted(r.request_id for r in queued) != sorted(r.request_id for r in active):
        raise AssertionError("the queues do not hold exactly the requests that are being answered")
    if any(cache.is_open(request.kv) for request in scheduler.waiting):
        raise AssertionError("a waiting request holds KV pages")
    if not all(cache.is_open(request.kv) for request in scheduler.running):
        raise AssertionError("a running request has no KV sequence")
    if cache.num_open != len(scheduler.running) + len(scheduler.kept_prompts):
        raise AssertionError("a KV sequence belongs to no request")
