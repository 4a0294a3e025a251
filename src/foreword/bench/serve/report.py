"""Summarises a load test: latencies, rates, goodput, failures."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from foreword.bench.serve.generator import Ending, LoadRun, RequestOutcome
from foreword.errors import RequestError

PERCENTILES = (50, 90, 95, 99)


def time_to_first_token(outcome: RequestOutcome) -> float | None:
    """Return TTFT: arrival of the first chunk with text minus due time. None: no text."""
    return outcome.chunks[0].time - outcome.due if outcome.chunks else None


def end_to_end(outcome: RequestOutcome) -> float | None:
    """Return E2E: arrival of the last chunk minus due time."""
    return None if outcome.last is None else outcome.last - outcome.due


def output_tokens(outcome: RequestOutcome) -> int:
    """Return the output tokens by usage, otherwise by the chunks' counts, otherwise one per chunk with text."""
    if outcome.usage_tokens is not None:
        return outcome.usage_tokens
    if states_tokens(outcome):
        return sum(chunk.tokens or 0 for chunk in outcome.chunks)
    return len(outcome.chunks)


def states_tokens(outcome: RequestOutcome) -> bool:
    """Return whether there was text and every chunk stated its number of tokens."""
    return bool(outcome.chunks) and all(chunk.tokens is not None for chunk in outcome.chunks)


def time_per_output_token(outcome: RequestOutcome) -> float | None:
    """Return TPOT: (E2E - TTFT) / (output tokens - tokens of the first chunk). None: no text after the first chunk.

    A first chunk that does not state its tokens counts as one token.
    """
    ttft, e2e = time_to_first_token(outcome), end_to_end(outcome)
    if ttft is None or e2e is None:
        return None
    first = outcome.chunks[0].tokens
    later = output_tokens(outcome) - (1 if first is None else first)
    return (e2e - ttft) / later if later > 0 else None


def gaps(outcome: RequestOutcome) -> list[float]:
    """Return ITL: the times between chunks with text, whatever their number of tokens."""
    times = [chunk.time for chunk in outcome.chunks]
    return [after - before for before, after in pairwise(times)]


def gaps_per_token(outcome: RequestOutcome) -> list[float] | None:
    """Return ITL per token: each gap divided by the tokens of its second chunk, once per token. None: unknown.

    The gap before a chunk without a token is added to the next gap.
    """
    if not states_tokens(outcome):
        return None
    per_token: list[float] = []
    held = 0.0
    for gap, chunk in zip(gaps(outcome), outcome.chunks[1:], strict=True):
        held += gap
        if chunk.tokens:
            per_token += [held / chunk.tokens] * chunk.tokens
            held = 0.0
    return per_token


@dataclass(frozen=True)
class Spread:
    """Summary of times in milliseconds."""

    n: int
    mean: float | None = None  # None: no values
    percentiles: tuple[float | None, ...] = (None,) * len(PERCENTILES)
    most: float | None = None

    def as_json(self) -> dict[str, float | int | None]:
        """Return the JSON object; without values, only n is not null."""
        named = {
            f"p{percent}_ms": point for percent, point in zip(PERCENTILES, self.percentiles, strict=True)
        }
        return {"n": self.n, "mean_ms": self.mean, **named, "max_ms": self.most}


def spread(seconds: Sequence[float]) -> Spread:
    """Return the summary of these times; percentiles are interpolated linearly (NumPy's default)."""
    if not seconds:
        return Spread(0)
    ms = 1e3 * np.asarray(seconds, dtype=np.float64)
    points = tuple(float(point) for point in np.percentile(ms, PERCENTILES, method="linear"))
    return Spread(len(seconds), float(ms.mean()), points, float(ms.max()))


@dataclass(frozen=True)
class GoodputLimits:
    """Maximum milliseconds of a good request; None: no limit."""

    ttft: float | None = None
    tpot: float | None = None
    e2el: float | None = None

    def are_met(self, outcome: RequestOutcome) -> bool:
        """Return whether the request was completed within all limits.

        An answer of fewer than two tokens has no TPOT and meets that limit. An answer without text meets no TTFT limit.
        """
        ttft = time_to_first_token(outcome)
        times = (
            (math.inf if ttft is None else ttft, self.ttft),
            (time_per_output_token(outcome) or 0.0, self.tpot),
            (end_to_end(outcome) or 0.0, self.e2el),
        )
        is_fast = all(limit is None or 1e3 * seconds <= limit for seconds, limit in times)
        return is_fast and outcome.ending is Ending.COMPLETED


def parse_limits(text: str) -> GoodputLimits:
    """Parse limits in milliseconds, such as `ttft:500,tpot:50,e2el:5000`."""
    limits: dict[str, float] = {}
    for part in text.split(","):
        name, _, number = part.strip().partition(":")
        if name not in ("ttft", "tpot", "e2el"):
            raise RequestError(f"--goodput knows ttft, tpot and e2el, as in ttft:500,tpot:50; not {part!r}")
        if name in limits:
            raise RequestError(f"--goodput has {name} twice")
        try:
            limits[name] = float(number)
        except ValueError:
            limits[name] = math.nan
        if not (math.isfinite(limits[name]) and limits[name] > 0):
            raise RequestError(f"--goodput {name} takes milliseconds above 0, not {number!r}")
    return GoodputLimits(**limits)


@dataclass(frozen=True)
class Failures:
    """Requests that failed. Requests dropped on purpose do not count."""

    by_kind: dict[str, int]  # by ending; HTTP errors by status, such as `HTTP 429`
    details: dict[str, str]  # first message of each kind
    too_many: int  # number of answers 429
    too_many_with_retry_after: int  # number of these with a Retry-After header
    retry_after: tuple[str, ...]  # distinct values of that header

    @property
    def total(self) -> int:
        return sum(self.by_kind.values())


@dataclass(frozen=True)
class Report:
    """Summary of one run; latencies and rates are of completed requests."""

    seconds: float
    sent: int
    completed: int
    dropped: int  # on purpose
    drops_too_late: int  # answers complete before their drop point
    failures: Failures
    without_usage: int  # completed requests without `usage`
    counted_by_chunks: int  # completed requests whose tokens are known by the number of chunks only
    with_text: int  # completed requests with text
    tokens_per_chunk_known: int  # completed requests whose chunks state their tokens
    prompt_tokens: int | None  # None: unknown for some completed answers
    output_tokens: int
    good: int | None  # completed within the limits; None: no limits
    latencies: dict[str, Spread]

    def per_second(self, count: int) -> float:
        """Return a count per second of the run."""
        return count / self.seconds if self.seconds > 0 else 0.0

    @property
    def good_share(self) -> float | None:
        """Fraction of good requests, of all that were not dropped on purpose."""
        counted = self.sent - self.dropped
        return None if self.good is None or not counted else self.good / counted


def make_report(run: LoadRun, limits: GoodputLimits | None) -> Report:
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
        counted_by_chunks=sum(not states_tokens(outcome) for outcome in without_usage),
        with_text=sum(bool(outcome.chunks) for outcome in completed),
        tokens_per_chunk_known=sum(map(states_tokens, completed)),
        prompt_tokens=sum(prompts) if len(prompts) == len(completed) else None,
        output_tokens=sum(output_tokens(outcome) for outcome in completed),
        good=None if limits is None else sum(limits.are_met(outcome) for outcome in run.outcomes),
        latencies=_latencies(run, completed),
    )


def _latencies(run: LoadRun, completed: Sequence[RequestOutcome]) -> dict[str, Spread]:
    """Return latencies of completed requests, and the delays of the load generator in sending and reading."""
    per_token = [values for outcome in completed if (values := gaps_per_token(outcome)) is not None]
    return {
        "ttft": _spread_of(completed, time_to_first_token),
        "tpot": _spread_of(completed, time_per_output_token),
        "itl": spread([gap for outcome in completed for gap in gaps(outcome)]),
        "itl_per_token": spread([gap for values in per_token for gap in values]),
        "e2el": _spread_of(completed, end_to_end),
        "sent_late": _spread_of(run.outcomes, lambda one: None if one.sent is None else one.sent - one.due),
        "read_late": spread(run.read_late),
    }


def _spread_of(
    outcomes: Iterable[RequestOutcome], formula: Callable[[RequestOutcome], float | None]
) -> Spread:
    return spread([value for outcome in outcomes if (value := formula(outcome)) is not None])


def _failures(outcomes: Sequence[RequestOutcome]) -> Failures:
    failed = [o for o in outcomes if o.ending not in (Ending.COMPLETED, Ending.DROPPED)]
    too_many = [outcome for outcome in failed if outcome.status == 429]
    values = [outcome.retry_after for outcome in too_many if outcome.retry_after is not None]
    return Failures(
        by_kind=dict(Counter(map(_kind, failed)).most_common()),
        details={_kind(outcome): outcome.detail for outcome in reversed(failed)},
        too_many=len(too_many),
        too_many_with_retry_after=len(values),
        retry_after=tuple(sorted(set(values))),
    )


def _kind(outcome: RequestOutcome) -> str:
    return f"HTTP {outcome.status}" if outcome.ending is Ending.REFUSED else str(outcome.ending)


def report_json(report: Report) -> dict[str, Any]:
    """Return the report as JSON; times in milliseconds except `seconds`."""
    found, failures = asdict(report), report.failures
    for only_shown in ("with_text", "good"):
        del found[only_shown]
    return found | {
        "failed": failures.total,
        "failures": failures.by_kind,
        "failure_details": failures.details,
        "http_429": {
            "count": failures.too_many,
            "with_retry_after": failures.too_many_with_retry_after,
            "retry_after": list(failures.retry_after),
        },
        "requests_per_second": report.per_second(report.completed),
        "output_tokens_per_second": report.per_second(report.output_tokens),
        "goodput": None
        if report.good is None
        else {
            "good": report.good,
            "share": report.good_share,
            "requests_per_second": report.per_second(report.good),
        },
        "latencies": {name: values.as_json() for name, values in report.latencies.items()},
    }
