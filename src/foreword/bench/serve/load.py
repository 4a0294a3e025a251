"""The settings of a load test, and everything random in it: arrivals, order of prompts, dropped streams."""

import itertools
import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from foreword.bench.prompts import BenchPrompt
from foreword.errors import RequestError

ENDPOINTS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


@dataclass(frozen=True)
class Question:
    """What every request of the run has in common."""

    model: str  # the server's name of it
    endpoint: str = "completions"  # completions or chat
    max_tokens: int = 64  # the answer's bound
    temperature: float = 0.0  # 0 is greedy
    seed: int = 0  # request i is sent with seed + i
    # Let every chunk say how many tokens there are: not every server knows that.
    continuous_usage: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)  # more fields of the body; they win over ours

    def __post_init__(self) -> None:
        if self.endpoint not in ENDPOINTS:
            raise RequestError(f"--endpoint is completions or chat, not {self.endpoint!r}")
        if self.max_tokens < 1:
            raise RequestError(f"--max-tokens must be at least 1, not {self.max_tokens}")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise RequestError(f"--temperature must be 0 or more, not {self.temperature}")

    @property
    def path(self) -> str:
        """Where requests go, after the server's base address."""
        return ENDPOINTS[self.endpoint]

    def body(self, prompt: str, index: int) -> dict[str, Any]:
        """The JSON of the index-th request."""
        chat = self.endpoint == "chat"
        options = {"include_usage": True} | (
            {"continuous_usage_stats": True} if self.continuous_usage else {}
        )
        text = {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
        return {
            "model": self.model,
            **text,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "seed": self.seed + index,
            "stream": True,
            "stream_options": options,
            **self.extra,
        }


@dataclass(frozen=True)
class LoadSettings:
    """When requests are sent, how many, and which of them are left midway."""

    rate: float | None = None  # open loop: requests per second, inf is all at once; None is closed loop
    concurrency: int = 8  # closed loop: requests in flight at any time
    num_requests: int | None = None  # None: as many as start within the duration
    duration: float | None = None  # seconds in which requests are started; None: until num_requests
    timeout: float = 600.0  # seconds that one request may take
    disconnect: float = 0.0  # share of streams that are dropped midway
    seed: int = 0  # of arrivals, of the prompts' order and of the dropped streams

    def __post_init__(self) -> None:
        if self.rate is not None and not self.rate > 0:
            raise RequestError(f"--rate must be above 0 (or inf), not {self.rate}")
        if self.concurrency < 1:
            raise RequestError(f"--concurrency must be at least 1, not {self.concurrency}")
        if self.num_requests is None and self.duration is None:
            raise RequestError("how long? give --num-requests or --duration")
        if self.num_requests is not None and self.num_requests < 1:
            raise RequestError(f"--num-requests must be at least 1, not {self.num_requests}")
        _check_seconds("--duration", self.duration)
        _check_seconds("--timeout", self.timeout)
        if self.rate == math.inf and self.num_requests is None:
            raise RequestError("--rate inf sends everything at once: it needs --num-requests")
        if not 0 <= self.disconnect <= 1:
            raise RequestError(f"--disconnect is a share from 0 to 1, not {self.disconnect}")


def _check_seconds(option: str, seconds: float | None) -> None:
    if seconds is not None and not (math.isfinite(seconds) and seconds > 0):
        raise RequestError(f"{option} must be above 0 seconds, not {seconds}")


def extra_fields(speculation: str | None, extra_body: str | None) -> dict[str, Any]:
    """The body's further fields, from the texts of --speculation and --extra-body."""
    extra = {} if extra_body is None else _parse_json("--extra-body", extra_body)
    if not isinstance(extra, dict):
        raise RequestError("--extra-body must be a JSON object")
    if speculation is not None:
        value = False if speculation == "off" else _parse_json("--speculation", speculation)
        if not isinstance(value, dict | bool):
            raise RequestError('--speculation is off or a JSON object, such as {"method": "ngram"}')
        extra["speculation"] = value
    return extra


def _parse_json(option: str, text: str) -> Any:  # noqa: ANN401 - any JSON
    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is no JSON number")

    try:
        return json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{option} is not JSON: {error}") from None


def arrival_times(load: LoadSettings) -> Iterator[float]:
    """Seconds after the start at which the requests of an open loop are due: a Poisson process.

    The gaps, the one before the first request included, are exponential with mean 1 / rate.
    """
    if load.rate is None:
        raise ValueError("a closed loop has no arrival times")
    times = itertools.repeat(0.0) if load.rate == math.inf else _poisson(load.rate, load.seed)
    if load.duration is not None:
        limit = load.duration
        times = itertools.takewhile(lambda time: time < limit, times)
    return itertools.islice(times, load.num_requests)


def _poisson(rate: float, seed: int) -> Iterator[float]:
    chance = random.Random(f"{seed} arrivals")
    return itertools.accumulate(chance.expovariate(rate) for _ in itertools.count())


def prompts_in_turn(prompts: Sequence[BenchPrompt], seed: int) -> Iterator[str]:
    """The prompts, shuffled once and then in turn without end: kinds of work are mixed at any time."""
    shuffled = [prompt.text for prompt in prompts]
    random.Random(f"{seed} prompts").shuffle(shuffled)
    return itertools.cycle(shuffled)


def drop_points(share: float, max_tokens: int, seed: int) -> Iterator[int | None]:
    """For every request the number of content chunks after which its stream is dropped; None: never.

    The number is uniform over the first half of the longest answer, so that most answers are still running.
    """
    chance = random.Random(f"{seed} drops")
    while True:
        is_dropped, after = chance.random() < share, chance.randint(1, max(1, max_tokens // 2))
        yield after if is_dropped else None
