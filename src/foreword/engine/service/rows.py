"""Rows of a pass that has to be short, because it serves requests with a bound on the time of their steps."""

from collections.abc import Sequence

from foreword.engine.requests.request import Request
from foreword.speculation.measured.costs import StepCosts
from foreword.speculation.service import Slo

HEADROOM = 0.1
"""Part of the time that is left free: what steps take is known as a mean."""

OTHERS = 8
"""Of the rows that fit into the time, one of so many is for the other classes, and at least one."""


def tightest(requests: Sequence[Request]) -> float | None:
    """Seconds that a step may take which serves these; None: no bound."""
    limited = [request for request in requests if request.service.step_seconds is not None]
    limits = [request.service.step_seconds for request in limited if request.lag == 1]
    return min([limit for limit in limits if limit is not None], default=None)


def short_runs(requests: Sequence[Request], limit: float, costs: StepCosts, max_rows: int) -> dict[int, int]:
    """Who takes part in a step of so many seconds, by id, and with how many committed tokens.

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
    others.sort(key=lambda request: (request.served, request.request_id))
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
