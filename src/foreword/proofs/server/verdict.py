"""What became of a claim."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from foreword.proofs.server.extent import Extent

CONFIDENCE = 0.95
"""Probability with which a fault of the stated size would have been seen."""


class Outcome(StrEnum):
    """How a claim stands after its check."""

    HELD = "held"  # in every case that was tried; says nothing of other prompts or longer texts
    DIFFERS_AT_TIES = "differs at near-ties"  # greedy texts part, but only where rounding may decide
    NOT_REFUTED = "not refuted"  # a statistical test with a stated power
    REFUTED = "refuted"
    FAILS_TOGETHER = "fails under concurrency"  # requests fail beside others that succeed alone
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
    extent: Extent = field(default_factory=Extent)

    @property
    def words(self) -> str:
        """The verdict as people read it, with its number of cases."""
        has_cases = self.outcome in (Outcome.HELD, Outcome.NOT_REFUTED)
        return f"{self.outcome.value} in {self.tried:,}" if has_cases else self.outcome.value


def held(check: str, tried: int, detail: str = "") -> Verdict:
    """Return the verdict of a claim that held in every case; not tried if there was none."""
    if not tried:
        return not_tried(check, detail or "no request showed it")
    share = 1 - (1 - CONFIDENCE) ** (1 / tried)
    visible = f"a fault in {share:.1%} of requests like these ({CONFIDENCE:.0%})"
    return Verdict(check, Outcome.HELD, tried, detail, visible)


def not_tried(check: str, why: str) -> Verdict:
    return Verdict(check, Outcome.NOT_TRIED, detail=why)


def refuted(check: str, tried: int, detail: str, reproduction: Reproduction) -> Verdict:
    return Verdict(check, Outcome.REFUTED, tried, detail, reproduction=reproduction)
