"""One line of a proof, for people and for machines."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ProofRow:
    """What was shown of a rule in one kind of case."""

    rule: str  # the rule, or "all", or "noise"
    case: str  # what was tried
    tried: int  # cases, draws or samples
    deviation: float  # the worst that was seen
    limit: float  # what it must not exceed
    passed: bool
    # Share of planted faults that the check catches, where it is a statistical one.
    power: float | None = None
    note: str = ""  # what else is worth knowing


def bounded(rule: str, case: str, tried: int, deviation: float, limit: float) -> ProofRow:
    """A row that passes if its deviation stays within the limit."""
    return ProofRow(rule, case, tried, deviation, limit, bool(deviation <= limit))
