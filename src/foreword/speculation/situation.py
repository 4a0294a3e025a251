"""What a policy may look at: how drafts have fared, and what steps have cost."""

from collections import defaultdict
from dataclasses import dataclass, field

RECENT_DRAFTS = 16
"""Drafts over which recent acceptance is averaged, roughly."""

COST_MEMORY = 0.1
"""Weight of the newest measurement in a moving average of costs."""


@dataclass
class AcceptanceStats:
    """How the drafts of a request, or of a cohort, have fared."""

    drafts: int = 0
    drafted: int = 0  # nodes that were judged
    accepted: int = 0  # nodes that were committed
    drafted_per_position: list[int] = field(default_factory=list)  # drafts that reached this level
    accepted_per_position: list[int] = field(default_factory=list)  # drafts accepted at this level
    rejected_per_position: list[int] = field(
        default_factory=list
    )  # drafts whose first rejected guess is here
    recent: float | None = None  # accepted levels / drafted levels of late; None before the first draft

    def observe(self, drafted: int, depth: int, accepted: int) -> None:
        """Count one judged draft of `depth` levels; an empty one does not count."""
        if not drafted:
            return
        self.drafts += 1
        self.drafted += drafted
        self.accepted += accepted
        missing = depth - len(self.drafted_per_position)
        self.drafted_per_position += [0] * missing
        self.accepted_per_position += [0] * missing
        self.rejected_per_position += [0] * missing
        for level in range(depth):
            self.drafted_per_position[level] += 1
            self.accepted_per_position[level] += level < accepted
        if accepted < depth:
            self.rejected_per_position[accepted] += 1
        share = accepted / depth
        self.recent = share if self.recent is None else self.recent + (share - self.recent) / RECENT_DRAFTS


class StepCosts:
    """The measured time of a target pass by its rows, and of a drafter's call by its guesses.

    Row counts are put in buckets, four to a doubling. Between known buckets the cost is
    interpolated; outside them it grows as `rows + PRIOR_ROWS`, which is how a small model on a CPU behaves.
    """

    PRIOR_ROWS = 4

    def __init__(self) -> None:
        self._passes: dict[int, tuple[float, float]] = {}  # bucket -> (mean rows, mean seconds)
        self._drafting: defaultdict[str, float] = defaultdict(float)  # method -> seconds per guess

    def observe_pass(self, rows: int, seconds: float) -> None:
        """Learn from one target pass."""
        bucket = _bucket(rows)
        known = self._passes.get(bucket)
        if known is None:
            self._passes[bucket] = (float(rows), seconds)
        else:
            self._passes[bucket] = tuple(  # type: ignore[assignment]
                old + COST_MEMORY * (new - old) for old, new in zip(known, (rows, seconds), strict=True)
            )

    def observe_drafting(self, method: str, guesses: int, seconds: float) -> None:
        """Learn from one call of a drafter that was asked for so many guesses in all."""
        each = seconds / max(guesses, 1)
        known = self._drafting.get(method)
        self._drafting[method] = each if known is None else known + COST_MEMORY * (each - known)

    def pass_seconds(self, rows: int) -> float | None:
        """Expected time of a pass over so many rows; None before the first was measured."""
        points = sorted(self._passes.values())
        if not points:
            return None
        below = [point for point in points if point[0] <= rows]
        above = [point for point in points if point[0] >= rows]
        if below and above:
            (x0, y0), (x1, y1) = below[-1], above[0]
            return y0 if x1 == x0 else y0 + (y1 - y0) * (rows - x0) / (x1 - x0)
        at, seconds = below[-1] if below else above[0]
        return seconds * (rows + self.PRIOR_ROWS) / (at + self.PRIOR_ROWS)

    def drafting_seconds(self, method: str, guesses: int) -> float:
        """Expected time of a drafter's call for so many guesses; 0 before the first was measured."""
        return self._drafting.get(method, 0.0) * guesses

    def curve(self) -> list[tuple[float, float]]:
        """What was measured: (rows, seconds), by rows."""
        return sorted(self._passes.values())


def _bucket(rows: int) -> int:
    """Four buckets to a doubling."""
    scale = max(rows.bit_length() - 3, 0)
    return (rows >> scale) << scale


@dataclass
class Situation:
    """All that was measured so far, and the switch for the whole engine."""

    speculating: bool = True  # False: everyone decodes plainly
    costs: StepCosts = field(default_factory=StepCosts)
    cohorts: defaultdict[str, AcceptanceStats] = field(default_factory=lambda: defaultdict(AcceptanceStats))
