"""The report of a step, read by statistics, cost estimates, policies and benchmarks."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from foreword.speculation.draft import Draft
from foreword.speculation.requests import StepRequest, Verdict


@dataclass(frozen=True)
class DrafterCall:
    """One call of a drafter."""

    method: str
    requests: int  # requests in the call
    guesses: int  # draft tokens requested, over all requests
    levels: int  # depth of the deepest draft requested
    empty: int  # requests without a draft
    seconds: float
    lag: int = 0  # tokens, over all requests, committed since the drafter's previous call
    is_cold: bool = False  # compiled or captured a graph, so that its time is not typical


class RequestReport(NamedTuple):
    """The result of a step for one request."""

    request: StepRequest
    verdict: Verdict
    run: int = 0  # committed tokens that got their KV
    context: int = 0  # KV rows computed before
    draws: bool = False  # whether its next token was drawn
    called: str = ""  # the drafter that was called; empty: none
    draft_seconds: float = 0.0  # its share of the drafter's call
    applied: bool = True  # False: the request had ended before its verdict

    @property
    def draft(self) -> Draft:
        return self.verdict.draft

    @property
    def rows(self) -> int:
        return self.run + len(self.verdict.draft)


@dataclass(frozen=True)
class StageSeconds:
    """Durations of a step's stages, in seconds."""

    draft: float = 0.0
    verify: float = 0.0  # launching the pass; on a CPU, running it
    accept: float = 0.0  # waiting for the device, acceptance, commit
    # The whole step without the time between launch and resolve. The rest beyond the three stages is scheduling,
    # bookkeeping and failed tries.
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
    """One step: each request's part in pass order, the drafter calls, and the times. Sums are computed once."""

    requests: Sequence[RequestReport]
    calls: Sequence[DrafterCall] = ()
    seconds: StageSeconds = StageSeconds()
    passes: int = 1  # more than one if the step was retried
    is_cold: bool = False  # compiled or captured a graph, so that its time is not typical
    # parts with a draft request or verified draft tokens
    with_drafts: Sequence[RequestReport] = field(init=False)
    rows: int = field(init=False)  # tokens in the pass, including draft tokens
    tokens: int = field(init=False)  # committed tokens
    decodes_only: bool = field(init=False)  # whether no prompt chunk was in the pass

    def __post_init__(self) -> None:
        parts = self.requests
        self.with_drafts = [part for part in parts if part.called or part.verdict.draft.parents]
        runs = [part.run for part in parts]
        self.rows = sum(runs) + sum([len(part.verdict.draft) for part in self.with_drafts])
        self.tokens = sum([len(part.verdict.tokens) for part in parts])
        self.decodes_only = runs.count(1) == len(runs)

    @cached_property
    def seconds_per_row(self) -> StageSeconds:
        """Stage times per row, without drafting, which is charged to the requests that had drafts.

        Valid after `finish`.
        """
        rows, spent = max(self.rows, 1), self.seconds
        return StageSeconds(0.0, spent.verify / rows, spent.accept / rows, (spent.total - spent.draft) / rows)

    @property
    def mean_context(self) -> int:
        """Mean number of KV rows per request before the step."""
        return sum([part.context for part in self.requests]) // max(len(self.requests), 1)

    @property
    def verdicts(self) -> list[Verdict]:
        return [part.verdict for part in self.requests]
