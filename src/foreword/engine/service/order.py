"""Who comes first."""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence

from foreword.engine.requests.request import Request
from foreword.speculation.service import Service

LANE = 8
"""One place of so many, and at least one, is for those who have waited too long."""


class Lines:
    """Those who wait, each tenant's requests of one service in a line, so that only the first of each are compared."""

    def __init__(self, waiting: Iterable[Request]) -> None:
        self._lines: dict[tuple[str, Service], deque[Request]] = {}
        for request in waiting:  # by arrival
            self._lines.setdefault((request.tenant, request.service), deque()).append(request)

    def heads(self) -> list[Request]:
        """The first of every line."""
        return [line[0] for line in self._lines.values() if line]

    def leave(self, head: Request) -> None:
        """The first of a line has had its turn."""
        self._lines[head.tenant, head.service].popleft()


class Order:
    """The order in which requests begin, and in which they are put off when there is no room.

    By class; within it by what the tenant holds already in proportion to its weight; then by priority; then by
    arrival. Whoever has waited longer than its ageing time comes before all of them, by arrival, as long as few run
    that came in this way: so nobody starves, and a heap of old requests does not push the others out.
    """

    def __init__(self, max_running: int, clock: Callable[[], float]) -> None:
        self._lane = max(1, max_running // LANE)
        self._clock = clock

    def first(self, waiting: Sequence[Request], running: Sequence[Request]) -> Request | None:
        """Of those who wait, the one whose turn it is; None: there is none."""
        held = Counter(request.tenant for request in running)
        lane_is_open = sum(request.is_aged for request in running) < self._lane
        now = self._clock()

        def turn(request: Request) -> tuple[float, ...]:
            if lane_is_open and self._has_aged(request, now):
                return (0, request.request_id)
            service = request.service
            share = held[request.tenant] / service.weight
            return (1, service.slo, share, service.priority, request.request_id)

        chosen = min(waiting, key=turn, default=None)
        if chosen is not None:
            chosen.is_aged = lane_is_open and self._has_aged(chosen, now)
        return chosen

    @staticmethod
    def _has_aged(request: Request, now: float) -> bool:
        return now - request.ledger.arrived >= request.service.ageing_seconds


def standing(request: Request) -> tuple[int, int, int, int]:
    """The last in this order gives way first; it stays the same while a request runs."""
    service = request.service
    if request.is_aged:
        return (0, 0, 0, request.request_id)
    return (1, service.slo, service.priority, request.request_id)


def gives_way(running: Request, request: Request) -> bool:
    """Whether one that runs is put off so that the other can begin."""
    return not running.is_aged and running.service.slo > request.service.slo
