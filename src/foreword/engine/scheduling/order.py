"""Order of requests, rows per request, and deadlines."""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence

from foreword.control.service import Service, Slo
from foreword.engine.messages import NewRequest
from foreword.engine.requests.request import Deadline, Request
from foreword.speculation.measured.costs import StepCosts

AGED_DIVISOR = 8
"""One in this many running requests, and at least one, may be admitted because it exceeded its ageing time."""


class TenantQueues:
    """Waiting requests in one queue per tenant and service, so that only queue heads are compared."""

    def __init__(self, waiting: Iterable[Request]) -> None:
        self._queues: dict[tuple[str, Service], deque[Request]] = {}
        for request in waiting:  # by arrival
            self._queues.setdefault((request.tenant, request.service), deque()).append(request)

    def heads(self) -> list[Request]:
        """Return the first request of each queue."""
        return [queue[0] for queue in self._queues.values() if queue]

    def remove_head(self, head: Request) -> None:
        self._queues[head.tenant, head.service].popleft()


class Order:
    """Admission order of requests.

    Requests are admitted by class, by their tenant's number of running requests relative to its weight, by priority,
    and by arrival. A few requests that exceeded their ageing time come before all others, so that none starves.
    """

    def __init__(self, max_running: int, clock: Callable[[], float]) -> None:
        self._max_aged = max(1, max_running // AGED_DIVISOR)
        self._clock = clock

    def first(self, waiting: Sequence[Request], running: Sequence[Request]) -> Request | None:
        """Return the next request to admit, and set its `is_aged`; None if none waits."""
        now = self._clock()
        aged = [
            request
            for request in waiting
            if now - request.accounting.arrived >= request.service.ageing_seconds
        ]
        if aged and sum(request.scheduling.is_aged for request in running) < self._max_aged:
            oldest = min(aged, key=lambda request: request.request_id)
            oldest.scheduling.is_aged = True
            return oldest
        # Running requests are counted only if there is a choice, which saves time with a long queue of one tenant.
        counts = Counter(request.tenant for request in running) if len(waiting) > 1 else Counter[str]()

        def admission_rank(request: Request) -> tuple[float, ...]:
            service = request.service
            share = counts[request.tenant] / service.weight
            return (service.slo, share, service.priority, request.request_id)

        chosen = min(waiting, key=admission_rank, default=None)
        if chosen is not None:
            chosen.scheduling.is_aged = False
        return chosen


def preemption_rank(request: Request) -> tuple[int, int, int, int]:
    """Return the sort key of running requests; the last one is preempted first.

    The key of a request is constant while it runs.
    """
    service = request.service
    if request.scheduling.is_aged:
        return (0, 0, 0, request.request_id)
    return (1, service.slo, service.priority, request.request_id)


def is_preempted_by(running: Request, request: Request) -> bool:
    """Return whether a running request may be preempted to start `request`."""
    return not running.scheduling.is_aged and running.service.slo > request.service.slo


HEADROOM = 0.1  # fraction of the time limit that is not planned, because step times are known only as means

OTHERS_DIVISOR = 8
"""One in this many rows within the time limit, and at least one, is for classes other than latency."""


def tightest_limit(requests: Sequence[Request]) -> float | None:
    """Return the shortest step limit of the requests that decode, in seconds; None: no limit."""
    decoding = [request for request in requests if request.uncomputed == 1]
    limits = [request.service.step_seconds for request in decoding]
    return min([limit for limit in limits if limit is not None], default=None)


def rows_within_limit(
    requests: Sequence[Request], limit: float, costs: StepCosts, max_rows: int
) -> dict[int, int]:
    """Return rows per request id for a step of at most `limit` seconds; see `shared_rows`."""
    has_prompts = any(request.uncomputed > 1 for request in requests)
    rows = costs.rows_within(limit * (1 - HEADROOM), max_rows, has_prompts)
    return shared_rows(requests, rows)


def shared_rows(requests: Sequence[Request], rows: int) -> dict[int, int]:
    """Return rows per request id for a step of `rows` rows.

    Requests of the latency class are in every pass. Others take turns: those come first that were not in a pass for the
    longest time. Remaining rows go to prompts, those of the latency class first.
    """
    urgent = [request for request in requests if request.service.slo == Slo.LATENCY]
    others = [request for request in requests if request.service.slo != Slo.LATENCY]
    max_others = max(rows - len(urgent), rows // OTHERS_DIVISOR, 1)
    others.sort(key=lambda request: (request.scheduling.last_pass, request.request_id))
    chosen = [*urgent, *others[:max_others]]
    return rows_in_order(chosen, max(rows - len(chosen), 0))


def rows_in_order(requests: Sequence[Request], spare: int) -> dict[int, int]:
    """Return rows per request id: one each, and the `spare` rows for prompts, in the order of the requests."""
    rows = {}
    for request in requests:
        more = min(request.uncomputed - 1, spare)  # 0 while decoding
        rows[request.request_id] = 1 + more
        spare -= more
    return rows


END, REFUSE = "end", "refuse"
ON_DEADLINE = (END, REFUSE)
"""Values of `on_deadline`: return the answer as it is at the deadline, or fail once it cannot finish in time."""

DEADLINE = "deadline"  # the `finish_reason` of an answer ended by its deadline


def deadline_of(new: NewRequest, arrived: float) -> Deadline | None:
    """Return the deadline of a request that arrived at this time of the engine's clock; None if there is none."""
    milliseconds = new.deadline_ms
    if milliseconds is None:
        return None
    return Deadline(arrived + milliseconds / 1e3, milliseconds, new.on_deadline == REFUSE)


def reason_to_end(
    request: Request, now: float, costs: StepCosts, running: int, cached_rows: int = 0
) -> str | None:
    """Return why the deadline ends the answer now; None: it continues.

    The request shares its steps with `running` requests in all, and need not compute `cached_rows` prompt rows.
    """
    deadline = request.scheduling.deadline
    if deadline is None:
        return None
    message = f"deadline_ms is {deadline.milliseconds:g}"
    if now >= deadline.at:
        return f"{message}, and {len(request.output_ids)} tokens were generated by then"
    if not deadline.must_be_whole:
        return None
    needed = least_seconds(request, costs, running, cached_rows)
    if now + needed <= deadline.at:
        return None
    remaining_ms = 1e3 * (deadline.at - now)
    return f"{message}: {remaining_ms:.0f} ms are left, and the answer needs at least {1e3 * needed:.0f} ms"


def least_seconds(request: Request, costs: StepCosts, running: int, cached_rows: int = 0) -> float:
    """Return the minimum seconds to complete the answer, by measured costs, if all drafts are accepted."""
    params, plan = request.params, request.speculation
    never_stops = params.ignore_eos and not params.stop_texts and not params.stop_token_ids
    least_tokens = params.max_tokens if never_stops else max(params.min_tokens, 1)
    tokens = min(least_tokens - len(request.output_ids), request.room)
    tokens_per_pass = 1 if plan is None else 1 + plan.max_depth
    passes = -(-max(tokens, 1) // tokens_per_pass)
    step = costs.step_seconds(max(running, 1)) or 0.0
    uncomputed = max(len(request.tokens) - max(request.kv.computed, cached_rows) - 1, 0)
    first = max(step, costs.least_prompt_seconds(uncomputed))  # the last prefill step yields the first tokens
    return first + (passes - 1) * step
