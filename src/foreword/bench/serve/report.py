"""Summarises a load test: latencies, rates, goodput, failures."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from foreword.bench.serve.generator import Ending, LoadRun, RequestOutcome
from foreword.bench.skeleton import ratio
from foreword.errors import RequestError

PERCENTILES = (50, 90, 95, 99)


def time_to_first_token(outcome: RequestOutcome) -> float | None:
    """Return TTFT: arrival of the first chunk with text minus due time. None: no text."""
    return outcome.chunks[0].time - outcome.due if outcome.chunks else None


def end_to_end(outcome: RequestOutcome) -> float | None:
    """Return E2E: arrival of the last text or the finish reason, minus due time. None: neither arrived."""
    return None if outcome.last_event_time is None else outcome.last_event_time - outcome.due


def output_tokens(outcome: RequestOutcome) -> int:
    """Return the output tokens from usage, otherwise the sum over chunks, otherwise the number of chunks."""
    if outcome.usage_tokens is not None:
        return outcome.usage_tokens
    if states_tokens(outcome):
        return sum(chunk.tokens or 0 for chunk in outcome.chunks)
    return len(outcome.chunks)


def states_tokens(outcome: RequestOutcome) -> bool:
    """Return whether the answer has text and the number of tokens of every chunk is known."""
    return bool(outcome.chunks) and all(chunk.tokens is not None for chunk in outcome.chunks)


def time_per_output_token(outcome: RequestOutcome) -> float | None:
    """Return TPOT: (E2E - TTFT) / (output tokens - tokens of the first chunk). None: no text after the first chunk.

    If the tokens of the first chunk are unknown, it counts as one token.
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
    """Return ITL per token, one value for each token after the first chunk. None: tokens per chunk are unknown.

    A chunk of n tokens adds n values: the gap before it divided by n. The gap before a chunk without a token is added
    to the next gap.
    """
    if not states_tokens(outcome):
        return None
    per_token: list[float] = []
    gap_sum = 0.0  # since the last chunk with a token
    for gap, chunk in zip(gaps(outcome), outcome.chunks[1:], strict=True):
        gap_sum += gap
        if chunk.tokens:
            per_token += [gap_sum / chunk.tokens] * chunk.tokens
            gap_sum = 0.0
    return per_token


@dataclass(frozen=True)
class Spread:
    """Mean, percentiles and maximum of `n` times, in milliseconds; None: there are no times."""

    n: int
    mean_ms: float | None = None
    p50_ms: float | None = None
    p90_ms: float | None = None
    p95_ms: float | None = None
    p99_ms: float | None = None
    max_ms: float | None = None


def spread(seconds: Sequence[float]) -> Spread:
    """Return the summary of these times; percentiles are interpolated linearly (NumPy's default)."""
    if not seconds:
        return Spread(0)
    ms = 1e3 * np.asarray(seconds, dtype=np.float64)
    p50, p90, p95, p99 = np.percentile(ms, PERCENTILES, method="linear").tolist()
    return Spread(len(seconds), float(ms.mean()), p50, p90, p95, p99, float(ms.max()))


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
            raise RequestError(
                f"--goodput takes limits of ttft, tpot and e2el, such as ttft:500,tpot:50; not {part!r}"
            )
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
class TooManyRequests:
    """Answers 429."""

    count: int
    with_retry_after: int  # number with a Retry-After header
    retry_after: tuple[str, ...]  # distinct values of that header


@dataclass(frozen=True)
class Goodput:
    """Requests that were completed within all limits."""

    good: int
    share: float | None  # of all requests that were not disconnected on purpose; None: there are none
    requests_per_second: float


@dataclass(frozen=True)
class Report:
    """Summary of one run, as --json has it; latencies and rates are of completed requests.

    Requests disconnected on purpose are no failures.
    """

    seconds: float  # duration of the run
    sent: int
    completed: int
    dropped: int  # on purpose
    drops_too_late: int  # answers complete before their drop point
    failures: dict[str, int]  # by ending; HTTP errors by status, such as `HTTP 429`
    without_usage: int  # completed requests without `usage`
    counted_by_chunks: int  # completed requests whose tokens are known by the number of chunks only
    tokens_per_chunk_known: int  # completed requests whose chunks state their tokens
    prompt_tokens: int | None  # None: unknown for some completed answers
    output_tokens: int
    latencies: dict[str, Spread]
    failed: int
    failure_details: dict[str, str]  # first message of each kind
    http_429: TooManyRequests
    requests_per_second: float
    output_tokens_per_second: float
    goodput: Goodput | None  # None: no limits


def make_report(run: LoadRun, limits: GoodputLimits | None) -> Report:
    """Return the report of a run; without limits, it has no goodput."""
    completed = [outcome for outcome in run.outcomes if outcome.ending is Ending.COMPLETED]
    dropped = sum(outcome.ending is Ending.DROPPED for outcome in run.outcomes)
    failed = [o for o in run.outcomes if o.ending not in (Ending.COMPLETED, Ending.DROPPED)]
    too_many = [outcome for outcome in failed if outcome.status == 429]
    retry_after = [outcome.retry_after for outcome in too_many if outcome.retry_after is not None]
    without_usage = [outcome for outcome in completed if outcome.usage_tokens is None]
    prompts = [outcome.prompt_tokens for outcome in completed if outcome.prompt_tokens is not None]
    tokens = sum(map(output_tokens, completed))
    good = 0 if limits is None else sum(map(limits.are_met, run.outcomes))
    counted = len(run.outcomes) - dropped
    goodput = Goodput(good, good / counted if counted else None, ratio(good, run.seconds))
    return Report(
        seconds=run.seconds,
        sent=len(run.outcomes),
        completed=len(completed),
        dropped=dropped,
        drops_too_late=sum(outcome.drop_after is not None for outcome in completed),
        failures=dict(Counter(map(_kind, failed)).most_common()),
        without_usage=len(without_usage),
        counted_by_chunks=sum(not states_tokens(outcome) for outcome in without_usage),
        tokens_per_chunk_known=sum(map(states_tokens, completed)),
        prompt_tokens=sum(prompts) if len(prompts) == len(completed) else None,
        output_tokens=tokens,
        latencies=_latencies(run, completed),
        failed=len(failed),
        failure_details={_kind(outcome): outcome.detail for outcome in reversed(failed)},
        http_429=TooManyRequests(len(too_many), len(retry_after), tuple(sorted(set(retry_after)))),
        requests_per_second=ratio(len(completed), run.seconds),
        output_tokens_per_second=ratio(tokens, run.seconds),
        goodput=None if limits is None else goodput,
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
        "read_late": spread(run.loop_delays),
    }


def _spread_of(
    outcomes: Iterable[RequestOutcome], formula: Callable[[RequestOutcome], float | None]
) -> Spread:
    return spread([value for outcome in outcomes if (value := formula(outcome)) is not None])


def _kind(outcome: RequestOutcome) -> str:
    return f"HTTP {outcome.status}" if outcome.ending is Ending.REFUSED else str(outcome.ending)
