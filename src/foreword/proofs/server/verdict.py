"""What became of a claim."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

CONFIDENCE = 0.95
"""How surely a fault of the size that is told would have been seen."""


class Outcome(StrEnum):
    """How a claim stands after its check."""

    PROVEN = "proven"  # of every request that was made: chance had no part in it
    NOT_REFUTED = "not refuted"  # chance has a part; what would have been seen is told
    REFUTED = "refuted"
    NOT_TRIED = "not tried"  # the server has not got what it takes, or it rests on a claim that was refuted


@dataclass(frozen=True)
class Reproduction:
    """The smallest request that shows the fault, what came of it and what should have."""

    bodies: Sequence[Mapping[str, Any]]  # sent in this order, or at once if `at_once`
    got: str
    expected: str
    at_once: bool = False


@dataclass(frozen=True)
class Verdict:
    """One line of the report."""

    check: str
    outcome: Outcome
    tried: int = 0  # cases: requests compared, tokens drawn
    detail: str = ""
    visible: str = ""  # the fault that would have been seen
    reproduction: Reproduction | None = None


def proven(check: str, tried: int, detail: str = "") -> Verdict:
    """Every case held; a fault that strikes only some requests may have missed these."""
    if not tried:
        return not_tried(check, detail or "no request showed it")
    share = 1 - (1 - CONFIDENCE) ** (1 / tried)
    visible = f"a fault in {share:.1%} of such requests"
    return Verdict(check, Outcome.PROVEN, tried, detail, visible)


def not_tried(check: str, why: str) -> Verdict:
    return Verdict(check, Outcome.NOT_TRIED, detail=why)


def refuted(check: str, tried: int, detail: str, reproduction: Reproduction) -> Verdict:
    return Verdict(check, Outcome.REFUTED, tried, detail, reproduction=reproduction)
