"""How soon a request is served, and how draft tokens are divided between requests of several tenants."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol, cast

from foreword.speculation.proposing import fair_shares
from foreword.speculation.requests import PassEntry, StepRequest


class Slo(IntEnum):
    """What a class of requests is promised; a lower value comes first."""

    LATENCY = 0  # a bound on the time of each step that serves it
    THROUGHPUT = 1  # its turn
    BATCH = 2  # to be finished eventually: it takes what the others leave


@dataclass(frozen=True)
class Service:
    """What the operator's rules and its user say about one request."""

    name: str = Slo.THROUGHPUT.name.lower()  # of its class, for people
    slo: Slo = Slo.THROUGHPUT
    step_seconds: float | None = None  # most that a step may take which serves it; None: no bound
    ageing_seconds: float = 30.0  # a request that has waited longer comes before all classes
    weight: float = 1.0  # its tenant's share of slots and draft tokens, against other tenants'
    priority: int = 0  # within its class: a lower value comes first, as in vLLM


DEFAULT_SERVICE = Service()


class ServedRequest(Protocol):
    """What policies read of a request that the step does not know."""

    service: Service
    step_limit: float | None  # seconds beyond which draft tokens make no step longer; None: no bound


def served(request: StepRequest) -> ServedRequest:
    """Return the request with what the operator's rules say about it; the engine's requests have that."""
    return cast(ServedRequest, request)


@dataclass(frozen=True)
class Wish:
    """Draft tokens that are wanted for one request."""

    nodes: int
    tenant: str
    service: Service


def divide_by_service(entries: Sequence[PassEntry], wanted: Sequence[int], total: int) -> list[int]:
    """Return how many of the draft tokens that each entry wants it gets."""
    pairs = zip(entries, wanted, strict=True)
    wishes = [
        Wish(nodes, entry.request.drafter_view.tenant, served(entry.request).service)
        for entry, nodes in pairs
    ]
    return draft_shares(wishes, total)


def draft_shares(wishes: Sequence[Wish], total: int) -> list[int]:
    """Return each request's draft tokens: latency-bound requests first, then the others; tenants by their weights."""
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
