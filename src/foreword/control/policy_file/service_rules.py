"""Service classes and tenant shares of the policy file."""

from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from foreword.control.policy_file.fields import Fields, policy_error
from foreword.control.policy_file.matching import Match, RequestTraits
from foreword.control.service import DEFAULT_SERVICE, Service, Slo

SLOS = tuple(slo.name.lower() for slo in Slo)


@dataclass(frozen=True)
class ServiceClass:
    """Requests with the same service objective."""

    name: str
    slo: Slo
    match: Match
    tpot_ms: float | None = None  # latency class: maximum step time in milliseconds; None: another class


@dataclass(frozen=True)
class ServiceRules:
    """Service classes and tenant weights."""

    classes: tuple[ServiceClass, ...] = ()
    shares: tuple[tuple[str, float], ...] = ()  # (tenant pattern with * and ?, weight)
    ageing_seconds: float = DEFAULT_SERVICE.ageing_seconds

    def of(self, traits: RequestTraits) -> Service:
        """Return the service of a request: its first matching class, and the weight of its first matching tenant."""
        service_class = next((rule for rule in self.classes if rule.match.fits(traits)), None)
        weights = (weight for pattern, weight in self.shares if fnmatchcase(traits.tenant, pattern))
        weight = next(weights, DEFAULT_SERVICE.weight)
        if service_class is None:
            return Service(ageing_seconds=self.ageing_seconds, weight=weight)
        limit = None if service_class.tpot_ms is None else service_class.tpot_ms / 1e3
        return Service(service_class.name, service_class.slo, limit, self.ageing_seconds, weight)


def parse_service(value: object, parse_match: Callable[[object, str], Match]) -> ServiceRules:
    """Return the service rules of the policy file's key `service`. `parse_match` parses a rule's conditions."""
    given = Fields(value, "service")
    classes = tuple(_class(name, rule, parse_match) for name, rule in given.objects("classes").items())
    shares = tuple(_weight(tenant, weight) for tenant, weight in given.objects("shares").items())
    rules = ServiceRules(
        classes, shares, given.number("ageing_seconds", DEFAULT_SERVICE.ageing_seconds, least=0)
    )
    given.end()
    return rules


def _class(name: str, value: object, parse_match: Callable[[object, str], Match]) -> ServiceClass:
    given = Fields(value, f"service.classes.{name}")
    slo = given.choice("slo", None, SLOS)
    if slo is None:
        raise policy_error(given.path_of("slo"), f"is missing: one of {', '.join(SLOS)}")
    limit = given.number("tpot_ms", None, least=0)
    if (slo == "latency") != bool(limit):
        raise policy_error(
            given.path_of("tpot_ms"),
            "must be a positive number of milliseconds for slo latency, and for no other",
        )
    match = parse_match(given.take("match", {}), given.path_of("match"))
    given.end()
    return ServiceClass(name, Slo[slo.upper()], match, limit)


def _weight(tenant: str, weight: object) -> tuple[str, float]:
    """Return a tenant pattern and its checked weight."""
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not weight > 0:
        raise policy_error(f"service.shares.{tenant}", f"must be a positive number, not {weight!r}")
    return tenant, float(weight)
