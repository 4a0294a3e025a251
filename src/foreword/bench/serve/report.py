"""What a run amounts to: counts, rates, latencies, goodput."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from foreword.bench.serve import formulas
from foreword.bench.serve.formulas import Spread, spread
from foreword.bench.serve.generator import Run
from foreword.bench.serve.goodput import Limits
from foreword.bench.serve.outcome import Ending, Outcome


@dataclass(frozen=True)
class Failures:
    """Requests that were sent and not answered in full, other than those dropped on purpose."""

    by_kind: dict[str, int]  # by ending; HTTP errors by status, such as `HTTP 429`
    details: dict[str, str]  # the first message of each kind
    too_many: int  # answered 429
    too_many_with_retry_after: int  # of those, how many said when to come back
    retry_after: tuple[str, ...]  # the different values of that header

    @property
    def total(self) -> int:
        return sum(self.by_kind.values())


@dataclass(frozen=True)
class Report:
    """One run, summed up. Latencies and rates are of completed requests alone."""

    seconds: float
    sent: int
    completed: int
    dropped: int  # left midway on purpose
    drops_too_late: int  # answers that were whole before the chunk at which they were to be left
    failures: Failures
    without_usage: int  # completed requests whose tokens were counted without `usage`
    counted_by_chunks: int  # of those, the ones of which only chunks could be counted
    with_text: int  # completed requests that had any
    tokens_per_chunk_known: int  # completed requests whose chunks said how many tokens they hold
    prompt_tokens: int | None  # None: not every completed answer had them in `usage`
    output_tokens: int
    good: int | None  # completed within the limits; None: no limits were given
    latencies: dict[str, Spread]

    def per_second(self, count: int) -> float:
        """So many in the time of the run."""
        return count / self.seconds if self.seconds > 0 else 0.0

    @property
    def good_share(self) -> float | None:
        """Of all requests that were sent and not dropped on purpose: a failed one is not good."""
        counted = self.sent - self.dropped
        return None if self.good is None or not counted else self.good / counted


def make_report(run: Run, limits: Limits | None) -> Report:
    completed = [outcome for outcome in run.outcomes if outcome.ending is Ending.COMPLETED]
    without_usage = [outcome for outcome in completed if outcome.usage_tokens is None]
    prompts = [outcome.prompt_tokens for outcome in completed if outcome.prompt_tokens is not None]
    return Report(
        seconds=run.seconds,
        sent=len(run.outcomes),
        completed=len(completed),
        dropped=sum(outcome.ending is Ending.DROPPED for outcome in run.outcomes),
        drops_too_late=sum(outcome.drop_after is not None for outcome in completed),
        failures=_failures(run.outcomes),
        without_usage=len(without_usage),
        counted_by_chunks=sum(not formulas.says_tokens(outcome) for outcome in without_usage),
        with_text=sum(bool(outcome.chunks) for outcome in completed),
        tokens_per_chunk_known=sum(map(formulas.says_tokens, completed)),
        prompt_tokens=sum(prompts) if len(prompts) == len(completed) else None,
        output_tokens=sum(formulas.output_tokens(outcome) for outcome in completed),
        good=None if limits is None else sum(limits.are_met(outcome) for outcome in run.outcomes),
        latencies=_latencies(completed) | _lateness(run),
    )


def _latencies(completed: Sequence[Outcome]) -> dict[str, Spread]:
    per_token = [values for outcome in completed if (values := formulas.gaps_per_token(outcome)) is not None]
    return {
        "ttft": _spread_of(completed, formulas.time_to_first_token),
        "tpot": _spread_of(completed, formulas.time_per_output_token),
        "itl": spread([gap for outcome in completed for gap in formulas.gaps(outcome)]),
        "itl_per_token": spread([gap for values in per_token for gap in values]),
        "e2el": _spread_of(completed, formulas.end_to_end),
    }


def _lateness(run: Run) -> dict[str, Spread]:
    """The generator's own: of sending, over all requests that went out, and of reading."""
    sent = [outcome.sent - outcome.due for outcome in run.outcomes if outcome.sent is not None]
    return {"sent_late": spread(sent), "read_late": spread(run.read_late)}


def _spread_of(outcomes: Iterable[Outcome], formula: Callable[[Outcome], float | None]) -> Spread:
    return spread([value for outcome in outcomes if (value := formula(outcome)) is not None])


def _failures(outcomes: Sequence[Outcome]) -> Failures:
    failed = [o for o in outcomes if o.ending not in (Ending.COMPLETED, Ending.DROPPED)]
    details: dict[str, str] = {}
    for outcome in failed:
        details.setdefault(_kind(outcome), outcome.detail)
    too_many = [outcome for outcome in failed if outcome.status == 429]
    told = [outcome.retry_after for outcome in too_many if outcome.retry_after is not None]
    return Failures(
        by_kind=dict(Counter(map(_kind, failed)).most_common()),
        details=details,
        too_many=len(too_many),
        too_many_with_retry_after=len(told),
        retry_after=tuple(sorted(set(told))),
    )


def _kind(outcome: Outcome) -> str:
    if outcome.ending is Ending.REFUSED:
        return f"HTTP {outcome.status}"
    return str(outcome.ending)


def report_json(report: Report) -> dict[str, Any]:
    """The report as JSON; times are milliseconds but for `seconds`."""
    failures = report.failures
    return {
        "seconds": report.seconds,
        "sent": report.sent,
        "completed": report.completed,
        "dropped": report.dropped,
        "drops_too_late": report.drops_too_late,
        "failed": failures.total,
        "failures": failures.by_kind,
        "failure_details": failures.details,
        "http_429": {
            "count": failures.too_many,
            "with_retry_after": failures.too_many_with_retry_after,
            "retry_after": list(failures.retry_after),
        },
        "without_usage": report.without_usage,
        "counted_by_chunks": report.counted_by_chunks,
        "tokens_per_chunk_known": report.tokens_per_chunk_known,
        "prompt_tokens": report.prompt_tokens,
        "output_tokens": report.output_tokens,
        "requests_per_second": report.per_second(report.completed),
        "output_tokens_per_second": report.per_second(report.output_tokens),
        "goodput": _goodput_json(report),
        "latencies": {name: values.as_json() for name, values in report.latencies.items()},
    }


def _goodput_json(report: Report) -> dict[str, Any] | None:
    if report.good is None:
        return None
    return {
        "good": report.good,
        "share": report.good_share,
        "requests_per_second": report.per_second(report.good),
    }
