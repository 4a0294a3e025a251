"""The report of a step, read by statistics, cost estimates, policies and benchmarks."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import add, sub
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
    empty: int  # requests for which the drafter returned no usable draft token
    seconds: float  # time of the call
    lag: int = 0  # tokens, over all requests, committed since the drafter's previous call
    is_cold: bool = False  # whether the call compiled or captured a graph, so that its time is not typical
    is_observing: bool = False  # whether the drafter also observes passes, which is part of its cost


class RequestReport(NamedTuple):
    """The result of a step for one request."""

    request: StepRequest
    verdict: Verdict
    run: int = 0  # tokens whose KV rows the pass computed, without draft tokens
    context: int = 0  # KV rows before the pass
    draws: bool = False  # whether the pass sampled its next token
    called: str = ""  # the method of the drafter that was called; empty: none
    draft_seconds: float = 0.0  # the request's share of the drafter's call
    applied: bool = True  # False: the request had ended before its verdict

    @property
    def draft(self) -> Draft:
        """The verified draft."""
        return self.verdict.draft

    @property
    def rows(self) -> int:
        """Tokens of the request in the pass, including draft tokens."""
        return self.run + len(self.verdict.draft)


@dataclass(frozen=True)
class StageSeconds:
    """Durations of a step's stages, in seconds."""

    draft: float = 0.0
    verify: float = 0.0  # launching the pass; on a CPU, running it
    accept: float = 0.0  # waiting for the device, acceptance, commit
    # Launch and resolve of the step: the three stages, planning, bookkeeping and failed tries. The time between launch
    # and resolve belongs to other steps.
    total: float = 0.0
    observe: float = 0.0  # notification of drafters; a part of `accept`

    def __add__(self, other: "StageSeconds") -> "StageSeconds":
        return StageSeconds(*map(add, vars(self).values(), vars(other).values()))

    def __sub__(self, other: "StageSeconds") -> "StageSeconds":
        return StageSeconds(*map(sub, vars(self).values(), vars(other).values()))


@dataclass
class StepReport:
    """Results, drafter calls and times of one step. Sums over the requests are computed once."""

    requests: Sequence[RequestReport]  # in the order of the pass
    calls: Sequence[DrafterCall] = ()
    seconds: StageSeconds = StageSeconds()
    passes: int = 1  # more than one if the step was retried
    is_cold: bool = False  # whether the step compiled or captured a graph, so that its time is not typical
    with_drafts: Sequence[RequestReport] = field(init=False)  # with a drafter call or verified draft tokens
    rows: int = field(init=False)  # tokens in the pass, including draft tokens
    tokens: int = field(init=False)  # committed tokens
    decodes_only: bool = field(init=False)  # whether no prompt chunk was in the pass

    def __post_init__(self) -> None:
        results = self.requests
        self.with_drafts = [result for result in results if result.called or result.verdict.draft.parents]
        runs = [result.run for result in results]
        self.rows = sum(runs) + sum([len(result.verdict.draft) for result in self.with_drafts])
        self.tokens = sum([len(result.verdict.tokens) for result in results])
        self.decodes_only = runs.count(1) == len(runs)

    @cached_property
    def seconds_per_row(self) -> StageSeconds:
        """Stage times divided by rows; valid after `StepProbe.finish`.

        Draft time is 0, since it is divided between the requests of a drafter call.
        """
        rows, spent = max(self.rows, 1), self.seconds
        return StageSeconds(0.0, spent.verify / rows, spent.accept / rows, (spent.total - spent.draft) / rows)

    @property
    def mean_context(self) -> int:
        """Mean number of KV rows per request before the step."""
        return sum([result.context for result in self.requests]) // max(len(self.requests), 1)

    @property
    def verdicts(self) -> list[Verdict]:
        return [result.verdict for result in self.requests]
