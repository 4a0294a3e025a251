"""What a step did, written once: statistics, costs, policies and benchmarks all read this."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from foreword.speculation.draft import Draft
from foreword.speculation.requests import StepRequest
from foreword.speculation.verdict import Verdict


@dataclass(frozen=True)
class DrafterCall:
    """One call of a drafter."""

    method: str
    asks: int  # requests that it was asked about
    guesses: int  # that were asked for, of all requests
    levels: int  # of the deepest ask
    empty: int  # asks that it had nothing to say about
    seconds: float
    behind: int = 0  # tokens of all requests that came while it was not asked, which it had to read first


@dataclass(frozen=True)
class RequestReport:
    """What a step did for one request."""

    request: StepRequest
    verdict: Verdict
    run: int = 0  # committed tokens that got their KV
    context: int = 0  # KV rows that were there before
    draws: bool = False  # whether its next token was drawn
    asked: str = ""  # the drafter that was asked for it; empty: none
    draft_seconds: float = 0.0  # its part of its drafter's call
    applied: bool = True  # False: the request was gone when its verdict came

    @property
    def draft(self) -> Draft:
        return self.verdict.draft

    @property
    def rows(self) -> int:
        return self.run + len(self.draft)


@dataclass(frozen=True)
class StageSeconds:
    """Where the time of a step went."""

    draft: float = 0.0
    verify: float = 0.0  # the pass, until it was handed over; on a CPU, until it was done
    accept: float = 0.0  # waiting for the device, judging, committing
    # All of it, but for the time between launch and resolve, which may be other steps'. What the other three leave is
    # scheduling, bookkeeping and tries that failed.
    total: float = 0.0

    def __add__(self, other: "StageSeconds") -> "StageSeconds":
        return StageSeconds(
            self.draft + other.draft,
            self.verify + other.verify,
            self.accept + other.accept,
            self.total + other.total,
        )

    def __sub__(self, other: "StageSeconds") -> "StageSeconds":
        return StageSeconds(
            self.draft - other.draft,
            self.verify - other.verify,
            self.accept - other.accept,
            self.total - other.total,
        )


@dataclass(frozen=True)
class StepReport:
    """One step: every request's part of it, in the order of the pass, who was asked, and what it cost."""

    requests: Sequence[RequestReport]
    calls: Sequence[DrafterCall] = ()
    seconds: StageSeconds = StageSeconds()
    passes: int = 1  # more where a step was tried again

    @cached_property
    def rows(self) -> int:
        """Of the pass, guesses included."""
        return sum(part.rows for part in self.requests)

    @property
    def decodes_only(self) -> bool:
        """Whether no prompt was computed beside the answers."""
        return all(part.run == 1 for part in self.requests)

    @property
    def longest_context(self) -> int:
        """KV rows that the longest request had."""
        return max((part.context for part in self.requests), default=0)

    @property
    def verdicts(self) -> list[Verdict]:
        return [part.verdict for part in self.requests]
