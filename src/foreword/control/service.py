"""Service classes, and division of draft tokens between tenants."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol, cast

from foreword.speculation.proposing import fair_shares
from foreword.speculation.requests import PassEntry, StepRequest


class Slo(IntEnum):
    """Service objective of a class; lower values come first."""

    LATENCY = 0  # bounded step time
    THROUGHPUT = 1  # first come, first served
    BATCH = 2  # runs on what the others leave


@dataclass(frozen=True)
class Service:
    """Service parameters of one request, by the policy file and its user."""

    name: str = Slo.THROUGHPUT.name.lower()  # class name
    slo: Slo = Slo.THROUGHPUT
    step_seconds: float | None = None  # maximum time of a step that serves it; None: no limit
    ageing_seconds: float = 30.0  # requests that waited longer come before all classes
    weight: float = 1.0  # the tenant's share of slots and draft tokens
    priority: int = 0  # within its class: lower first, as in vLLM


DEFAULT_SERVICE = Service()


class ServedRequest(Protocol):
    """Request attributes that policies read besides `StepRequest`."""

    service: Service
    step_limit: float | None  # maximum step time with drafts; None: no limit


def served(request: StepRequest) -> ServedRequest:
    """Return the request with its service attributes, which all requests of an engine have."""
    return cast(ServedRequest, request)


@dataclass(frozen=True)
class Wish:
    """Draft tokens wanted for one request."""

    nodes: int
    tenant: str
    service: Service


def divide_by_service_class(entries: Sequence[PassEntry], wanted: Sequence[int], total: int) -> list[int]:
    """Return each entry's share of `total` draft tokens, by service class and tenant; see `draft_shares`."""
    pairs = zip(entries, wanted, strict=True)
    wishes = [
        Wish(nodes, entry.request.drafter_view.tenant, served(entry.request).service)
        for entry, nodes in pairs
    ]
    return draft_shares(wishes, total)


def draft_shares(wishes: Sequence[Wish], total: int) -> list[int]:
    """Divide draft tokens: latency-bound requests first, then the others; between tenants by weight."""
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
