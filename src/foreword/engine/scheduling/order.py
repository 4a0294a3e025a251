"""Which requests come first, how many rows each gets, and when a deadline ends one."""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence

from foreword.control.service import Service, Slo
from foreword.engine.messages import NewRequest
from foreword.engine.requests.request import Deadline, Request
from foreword.speculation.measured.costs import StepCosts

LANE = 8
"""One place of so many, and at least one, is for requests that have waited too long."""


class Lines:
    """Waiting requests, one queue per tenant and service, so that only the first of each are compared."""

    def __init__(self, waiting: Iterable[Request]) -> None:
        self._lines: dict[tuple[str, Service], deque[Request]] = {}
        for request in waiting:  # by arrival
            self._lines.setdefault((request.tenant, request.service), deque()).append(request)

    def heads(self) -> list[Request]:
        """Return the first of every queue."""
        return [line[0] for line in self._lines.values() if line]

    def leave(self, head: Request) -> None:
        """Remove the first of a queue."""
        self._lines[head.tenant, head.service].popleft()


class Order:
    """The order in which requests begin, and in which they are put off when there is no room.

    By class; within it by what the tenant holds already in proportion to its weight; then by priority; then by
    arrival. Requests that have waited longer than their ageing time come before all of them, by arrival, as long as few
    run that came in this way: no request starves, and many old requests do not push the others out.
    """

    def __init__(self, max_running: int, clock: Callable[[], float]) -> None:
        self._lane = max(1, max_running // LANE)
        self._clock = clock

    def first(self, waiting: Sequence[Request], running: Sequence[Request]) -> Request | None:
        """Return the waiting request whose turn it is; None: there is none."""
        held = Counter(request.tenant for request in running)
        lane_is_open = sum(request.queued.is_aged for request in running) < self._lane
        now = self._clock()

        def turn(request: Request) -> tuple[float, ...]:
            if lane_is_open and self._has_aged(request, now):
                return (0, request.request_id)
            service = request.service
            share = held[request.tenant] / service.weight
            return (1, service.slo, share, service.priority, request.request_id)

        chosen = min(waiting, key=turn, default=None)
        if chosen is not None:
            chosen.queued.is_aged = lane_is_open and self._has_aged(chosen, now)
        return chosen

    @staticmethod
    def _has_aged(request: Request, now: float) -> bool:
        return now - request.accounting.arrived >= request.service.ageing_seconds


def standing(request: Request) -> tuple[int, int, int, int]:
    """Return the rank by which requests are preempted, the last first; it is fixed while a request runs."""
    service = request.service
    if request.queued.is_aged:
        return (0, 0, 0, request.request_id)
    return (1, service.slo, service.priority, request.request_id)


def gives_way(running: Request, request: Request) -> bool:
    """Return whether a running request is preempted so that the other can start."""
    return not running.queued.is_aged and running.service.slo > request.service.slo


HEADROOM = 0.1
"""Part of the time that is left free: what steps take is known as a mean."""

OTHERS = 8
"""Of the rows that fit into the time, one of so many is for the other classes, and at least one."""


def tightest(requests: Sequence[Request]) -> float | None:
    """Return the seconds that a step may take which serves these; None: no bound."""
    limited = [request for request in requests if request.service.step_seconds is not None]
    limits = [request.service.step_seconds for request in limited if request.lag == 1]
    return min([limit for limit in limits if limit is not None], default=None)


def short_runs(requests: Sequence[Request], limit: float, costs: StepCosts, max_rows: int) -> dict[int, int]:
    """Return the rows of a step of so many seconds, by request id.

    The latency class takes part in every pass. The others take turns: who was served longest ago comes first. What
    is then left of the time goes to prompts, the latency class's first.
    """
    has_prompts = any(request.lag > 1 for request in requests)
    rows = costs.rows_within(limit * (1 - HEADROOM), max_rows, has_prompts)
    return shared_rows(requests, rows)


def shared_rows(requests: Sequence[Request], rows: int) -> dict[int, int]:
    """The same for a step of so many rows."""
    urgent = [request for request in requests if request.service.slo == Slo.LATENCY]
    others = [request for request in requests if request.service.slo != Slo.LATENCY]
    places = max(rows - len(urgent), rows // OTHERS, 1)
    others.sort(key=lambda request: (request.queued.served, request.request_id))
    chosen = [*urgent, *others[:places]]
    return runs_in_turn(chosen, max(rows - len(chosen), 0))


def runs_in_turn(requests: Sequence[Request], spare: int) -> dict[int, int]:
    """One row for each, by id, and of the spare ones what its prompt still needs, the first request's first."""
    runs = {}
    for request in requests:
        more = min(request.lag - 1, spare)
        runs[request.request_id] = 1 + more
        spare -= more
    return runs


END, REFUSE = "end", "refuse"
ON_DEADLINE = (END, REFUSE)
"""An answer ends with what it has at its deadline; or as soon as it cannot be whole by then."""

DEADLINE = "deadline"
"""The `finish_reason` of such an answer."""


def deadline_of(new: NewRequest, arrived: float) -> Deadline | None:
    """Return the deadline by the clock of `arrived`; None: there is none."""
    wanted = new.deadline_ms
    return None if wanted is None else Deadline(arrived + wanted / 1e3, wanted, new.on_deadline == REFUSE)


def reason_to_end(request: Request, now: float, costs: StepCosts, running: int, found: int = 0) -> str | None:
    """Return why the answer should end now; None: it goes on.

    `found` are rows that it need not compute although it has none yet.
    """
    deadline = request.queued.deadline
    if deadline is None:
        return None
    reported = f"deadline_ms is {deadline.milliseconds:g}"
    if now >= deadline.at:
        return f"{reported}, and {len(request.output_ids)} tokens were there by then"
    if not deadline.must_be_whole:
        return None
    needed = least_seconds(request, costs, running, found)
    if now + needed <= deadline.at:
        return None
    left = 1e3 * (deadline.at - now)
    return f"{reported}: {left:.0f} ms are left, and the answer needs at least {1e3 * needed:.0f} ms"


def least_seconds(request: Request, costs: StepCosts, running: int, found: int = 0) -> float:
    """Return the least seconds that the answer takes, by measured costs: all drafts may be accepted."""
    params, plan = request.params, request.speculation
    never_stops = params.ignore_eos and not params.stop_texts and not params.stop_token_ids
    wanted = params.max_tokens if never_stops else max(params.min_tokens, 1)
    tokens = min(wanted - len(request.output_ids), request.room)
    passes = -(-max(tokens, 1) // (1 if plan is None else 1 + plan.max_depth))
    step = costs.step_seconds(max(running, 1)) or 0.0
    unread = max(len(request.tokens) - max(request.kv.computed, found) - 1, 0)
    first = max(step, costs.least_prompt_seconds(unread))  # the prompt's last step makes the first tokens
    return first + (passes - 1) * step
