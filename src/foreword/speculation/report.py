"""What a step did, written once: statistics, costs, policies and benchmarks all read this."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

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
    lag: int = 0  # tokens of all requests that it had to read first, committed since it was last called
    is_cold: bool = False  # something was compiled or captured in it: the next will not take as long


class RequestReport(NamedTuple):
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
        return self.run + len(self.verdict.draft)


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


@dataclass
class StepReport:
    """One step: every request's part of it, in the order of the pass, who was asked, and what it cost.

    The sums are computed once, for all readers.
    """

    requests: Sequence[RequestReport]
    calls: Sequence[DrafterCall] = ()
    seconds: StageSeconds = StageSeconds()
    passes: int = 1  # more where a step was tried again
    is_cold: bool = False  # something was compiled or captured in it: its time says nothing of the next
    guessing: Sequence[RequestReport] = field(init=False)  # with a draft request, or verified draft tokens
    rows: int = field(init=False)  # of the pass, draft tokens included
    tokens: int = field(init=False)  # that were committed
    decodes_only: bool = field(init=False)  # whether no prompt was computed beside the answers

    def __post_init__(self) -> None:
        parts = self.requests
        self.guessing = [part for part in parts if part.asked or part.verdict.draft.parents]
        runs = [part.run for part in parts]
        self.rows = sum(runs) + sum([len(part.verdict.draft) for part in self.guessing])
        self.tokens = sum([len(part.verdict.tokens) for part in parts])
        self.decodes_only = runs.count(1) == len(runs)

    @cached_property
    def seconds_per_row(self) -> StageSeconds:
        """Without drafting, which is billed to the requests that were drafted for. Read once the times are set."""
        rows, spent = max(self.rows, 1), self.seconds
        return StageSeconds(0.0, spent.verify / rows, spent.accept / rows, (spent.total - spent.draft) / rows)

    @property
    def mean_context(self) -> int:
        """KV rows that a request had, on average: as many are read for each."""
        return sum([part.context for part in self.requests]) // max(len(self.requests), 1)

    @property
    def verdicts(self) -> list[Verdict]:
        return [part.verdict for part in self.requests]
