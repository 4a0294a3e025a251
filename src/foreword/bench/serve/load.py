"""Settings of a load test, and its random choices: arrival times, prompt order, dropped streams."""

import itertools
import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from foreword.bench.prompts import BenchPrompt
from foreword.bench.skeleton import check_least
from foreword.errors import RequestError

ENDPOINTS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


@dataclass(frozen=True)
class RequestTemplate:
    """Settings that all requests share."""

    model: str  # name on the server
    endpoint: str = "completions"  # completions or chat
    max_tokens: int = 64
    temperature: float = 0.0  # 0 is greedy
    seed: int = 0  # request i is sent with seed + i
    continuous_usage: bool = False  # request usage in every event, which not all servers support
    extra: Mapping[str, Any] = field(default_factory=dict)  # further body fields, which replace equal ones

    def __post_init__(self) -> None:
        if self.endpoint not in ENDPOINTS:
            raise RequestError(f"--endpoint is completions or chat, not {self.endpoint!r}")
        check_least(1, max_tokens=self.max_tokens)
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise RequestError(f"--temperature must be 0 or more, not {self.temperature}")

    @property
    def path(self) -> str:
        """URL path of the requests."""
        return ENDPOINTS[self.endpoint]

    def body(self, prompt: str, index: int) -> dict[str, Any]:
        """Return the body of request `index`."""
        is_chat = self.endpoint == "chat"
        usage_options = {"continuous_usage_stats": True} if self.continuous_usage else {}
        return {
            "model": self.model,
            **({"messages": [{"role": "user", "content": prompt}]} if is_chat else {"prompt": prompt}),
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "seed": self.seed + index,
            "stream": True,
            "stream_options": {"include_usage": True, **usage_options},
            **self.extra,
        }


@dataclass(frozen=True)
class LoadSettings:
    """Arrival of requests, their number, time limit and disconnects."""

    rate: float | None = None  # open loop: requests per second, inf: all at once; None: closed loop
    concurrency: int = 8  # closed loop: requests in flight
    num_requests: int | None = None  # None: limited by the duration
    duration: float | None = None  # seconds in which requests start; None: until num_requests
    timeout: float = 600.0  # per request, seconds
    disconnect: float = 0.0  # fraction of streams dropped midway
    seed: int = 0  # of arrivals, prompt order and dropped streams

    def __post_init__(self) -> None:
        if self.rate is not None and not self.rate > 0:
            raise RequestError(f"--rate must be above 0 (or inf), not {self.rate}")
        check_least(1, concurrency=self.concurrency)
        if self.num_requests is None and self.duration is None:
            raise RequestError("the load has no end: give --num-requests or --duration")
        check_least(1, num_requests=self.num_requests)
        _check_seconds("--duration", self.duration)
        _check_seconds("--timeout", self.timeout)
        if self.rate == math.inf and self.num_requests is None:
            raise RequestError("--rate inf sends everything at once: it needs --num-requests")
        if not 0 <= self.disconnect <= 1:
            raise RequestError(f"--disconnect must be a fraction from 0 to 1, not {self.disconnect}")


def _check_seconds(option: str, seconds: float | None) -> None:
    if seconds is not None and not (math.isfinite(seconds) and seconds > 0):
        raise RequestError(f"{option} must be above 0 seconds, not {seconds}")


def extra_fields(speculation: str | None, extra_body: str | None) -> dict[str, Any]:
    """Return further body fields from --speculation and --extra-body."""
    extra = {} if extra_body is None else _parse_json("--extra-body", extra_body)
    if not isinstance(extra, dict):
        raise RequestError("--extra-body must be a JSON object")
    if speculation is not None:
        value = False if speculation == "off" else _parse_json("--speculation", speculation)
        if not isinstance(value, dict | bool):
            raise RequestError(
                '--speculation must be off, true, false or a JSON object, such as {"method": "ngram"}'
            )
        extra["speculation"] = value
    return extra


def _parse_json(option: str, text: str) -> Any:  # noqa: ANN401 - any JSON
    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is not a JSON number")

    try:
        return json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{option} is not JSON: {error}") from None


def arrival_times(load: LoadSettings) -> Iterator[float]:
    """Yield the due times of an open loop in seconds after the start: a Poisson process.

    All gaps, including the one before the first request, are exponentially distributed with mean 1 / rate. An infinite
    rate has mean 0: all requests are due at once.
    """
    if load.rate is None:
        raise ValueError("a closed loop has no arrival times")
    rate, rng = load.rate, random.Random(f"{load.seed} arrivals")
    times = itertools.accumulate(rng.expovariate(rate) for _ in itertools.count())
    limit = math.inf if load.duration is None else load.duration
    return itertools.islice(itertools.takewhile(lambda time: time < limit, times), load.num_requests)


def prompts_in_turn(prompts: Sequence[BenchPrompt], seed: int) -> Iterator[str]:
    """Yield the prompts forever, shuffled once."""
    shuffled = [prompt.text for prompt in prompts]
    random.Random(f"{seed} prompts").shuffle(shuffled)
    return itertools.cycle(shuffled)


def drop_points(fraction: float, max_tokens: int, seed: int) -> Iterator[int | None]:
    """Yield for each request the number of content chunks after which its stream is dropped; None: never.

    The numbers are uniform over the first half of the longest answer, so that most answers are not complete by then.
    """
    rng = random.Random(f"{seed} drops")
    while True:
        is_dropped, drop_after = rng.random() < fraction, rng.randint(1, max(1, max_tokens // 2))
        yield drop_after if is_dropped else None
