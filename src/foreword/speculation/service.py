"""How soon a request is to be served, and how what is scarce is divided between requests."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum


class Slo(IntEnum):
    """What a class of requests is promised; a lower value comes first."""

    LATENCY = 0  # a bound on the time of each step that serves it
    THROUGHPUT = 1  # its turn
    BATCH = 2  # to be finished some day: it takes what the others leave


@dataclass(frozen=True)
class Service:
    """What the operator's rules and its user say about one request."""

    name: str = Slo.THROUGHPUT.name.lower()  # of its class, for people
    slo: Slo = Slo.THROUGHPUT
    step_seconds: float | None = None  # that a step may take which serves it; None: no bound
    ageing_seconds: float = 30.0  # who has waited longer comes before all classes
    weight: float = 1.0  # its tenant's share of places and guesses, against other tenants'
    priority: int = 0  # within its class: a lower value comes first, as in vLLM


DEFAULT_SERVICE = Service()


@dataclass(frozen=True)
class Deadline:
    """When an answer has to be there."""

    at: float  # by the engine's clock
    milliseconds: float  # after its arrival
    must_be_whole: bool = False  # it is given up as soon as it cannot be; else it ends then with what it has


def fair_shares(wanted: Sequence[int], total: int, weights: Sequence[float] | None = None) -> list[int]:
    """As much of what each wants as the total allows: small wishes first, the rest by weight, or evenly."""
    heavy = [1.0] * len(wanted) if weights is None else list(weights)
    shares, left, weight_left = [0] * len(wanted), max(total, 0), sum(heavy)
    for index in sorted(range(len(wanted)), key=lambda place: wanted[place] / heavy[place]):
        shares[index] = min(wanted[index], int(left * heavy[index] / weight_left + 1e-9))
        left -= shares[index]
        weight_left -= heavy[index]
    return shares


@dataclass(frozen=True)
class Wish:
    """Guesses that would be made for one request."""

    nodes: int
    tenant: str
    service: Service


def guess_shares(wishes: Sequence[Wish], total: int) -> list[int]:
    """How many guesses each gets: those that wait for tokens first, then the others; tenants by their weights."""
    shares, left = [0] * len(wishes), max(total, 0)
    for slo in sorted({wish.service.slo for wish in wishes}):
        by_tenant: dict[str, list[int]] = {}
        for place, wish in enumerate(wishes):
            if wish.service.slo == slo:
                by_tenant.setdefault(wish.tenant, []).append(place)
        groups = list(by_tenant.values())
        wanted = [sum(wishes[place].nodes for place in group) for group in groups]
        weights = [wishes[group[0]].service.weight for group in groups]
        for group, granted in zip(groups, fair_shares(wanted, left, weights), strict=True):
            for place, share in zip(
                group, fair_shares([wishes[p].nodes for p in group], granted), strict=True
            ):
                shares[place] = share
        left = max(total, 0) - sum(shares)
    return shares
