"""Sends requests (in two ways, concurrently, many samples), compares the answers, and shrinks a failing request."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from math import inf

from foreword.errors import RequestError
from foreword.proofs.server.client import Body, Broken, ReceivedChoice, RefusedByServer, Server, ServerAnswer
from foreword.proofs.server.context import (
    FILTERS_OFF,
    ClaimStatus,
    ClaimVerdict,
    Examine,
    ProofContext,
    Reproduction,
    held,
    refuted,
)

_FAILURES = (Broken, RefusedByServer, RequestError)


@dataclass(frozen=True)
class Call:
    """One of several concurrent requests."""

    body: Body
    streamed: bool = False


class FailsTogether(Exception):  # noqa: N818 - named after the server's fault
    """A request fails next to others and succeeds alone."""

    def __init__(self, failure: str, prompt: str, alone: ServerAnswer, bodies: Sequence[Body]) -> None:
        super().__init__(failure)
        self.prompt = prompt
        self.alone = alone  # answer to the same request alone
        self.bodies = bodies  # concurrent requests that show the fault


async def send_together(server: Server, calls: Sequence[Call]) -> list[ServerAnswer]:
    """Return the answers to concurrent calls.

    Raise `FailsTogether` if a call fails that succeeds alone; a call that fails alone raises its own error.
    """
    results = await _send(server, calls)
    for index, (call, result) in enumerate(zip(calls, results, strict=True)):
        if not (failure := _failure(result)):
            continue
        alone = await server.send(call.body, streamed=call.streamed)
        if isinstance(result, ServerAnswer) and alone.is_cut:
            continue  # this server's answers never have a finish_reason
        group = await _smallest_group(server, calls, index)
        raise FailsTogether(failure, call.body["prompt"], alone, group)
    return [result for result in results if isinstance(result, ServerAnswer)]


async def _smallest_group(server: Server, calls: Sequence[Call], failing: int) -> list[Body]:
    """Return the bodies of two calls that fail together, one of them number `failing`; of all calls if no pair does."""
    group = calls
    for other in range(len(calls)):
        pair = [calls[index] for index in sorted((failing, other))]
        if other != failing and any(map(_failure, await _send(server, pair))):
            group = pair
            break
    return [server.wire_body(call.body, streamed=call.streamed) for call in group]


async def _send(server: Server, calls: Sequence[Call]) -> list[ServerAnswer | BaseException]:
    sent = (server.send(call.body, streamed=call.streamed) for call in calls)
    return await asyncio.gather(*sent, return_exceptions=True)


def _failure(result: ServerAnswer | BaseException) -> str:
    """Return why a result is not a complete answer; empty if it is one."""
    if isinstance(result, ServerAnswer):
        return "the answer was cut off: it has no finish_reason" if result.is_cut else ""
    if isinstance(result, _FAILURES):
        return str(result)
    raise result


MOST_TRIES = 16  # maximum number of attempts to shrink a failing request


async def smallest(body: Body, shows: Callable[[Body], Awaitable[bool]]) -> Body:
    """Return a body with fewer tokens, fields and words for which `shows` still returns True."""
    tries = MOST_TRIES

    async def still_shows(smaller: Body) -> bool:
        nonlocal tries
        tries -= 1
        try:
            return tries >= 0 and await shows(smaller)
        except (Broken, RefusedByServer):
            return False

    tokens = 1
    while tokens < body.get("max_tokens", 1):
        if await still_shows(smaller := {**body, "max_tokens": tokens}):
            body = smaller
            break
        tokens *= 2
    for unneeded in ({"logprobs"}, FILTERS_OFF.keys()):
        smaller = {name: value for name, value in body.items() if name not in unneeded}
        if smaller != body and await still_shows(smaller):
            body = smaller
    words = body["prompt"].split(" ") if isinstance(body["prompt"], str) else []
    while len(words) > 1:
        words = words[len(words) // 2 :]
        if not await still_shows(smaller := {**body, "prompt": " ".join(words)}):
            break
        body = smaller
    return body


Ask = Callable[[Body], Awaitable[ServerAnswer]]  # sends a body
AnswerPart = Callable[[ServerAnswer], str]

Way = Callable[[ProofContext], Ask]  # a way of sending: for example whole or streamed

Fault = tuple[str, Reproduction]  # what is wrong, and the requests that show it
CONTEXT = 40  # characters shown before the first difference


def agree(
    bodies_of: Callable[[ProofContext], list[Body]], ways: tuple[Way, Way], words: tuple[str, str]
) -> Examine:
    """Return the examination of a claim that texts are equal if sent in two ways; `words` name the ways."""

    async def verdict(context: ProofContext) -> ClaimVerdict:
        bodies, one, other = bodies_of(context), ways[0](context), ways[1](context)
        ties: list[tuple[ServerAnswer, ServerAnswer]] = []  # answers that differ where rounding may decide
        for tried, body in enumerate(bodies, 1):
            left, right = await one(body), await other(body)
            context.judged(body["prompt"], left, right)
            if left.contents == right.contents:
                continue
            if body["temperature"] == 0 and is_near_tie(left.first, right.first, context.tolerance):
                ties.append((left, right))
                continue
            fault = f"{words[0]} and {words[1]} differ {_first_difference(left, right)}"
            return refuted(tried, fault, shown(*await _smallest_difference(body, one, other), words))
        if not ties:
            return held(len(bodies))
        where = _first_difference(*ties[0])
        detail = (
            f"{len(ties)} of {len(bodies)} differ at ties within {context.tolerance} nats, the first {where}"
        )
        example = shown(*ties[0], words)
        return ClaimVerdict(ClaimStatus.DIFFERS_AT_TIES, len(bodies), detail, reproduction=example)

    return verdict


async def _smallest_difference(body: Body, one: Ask, other: Ask) -> tuple[ServerAnswer, ServerAnswer]:
    """Return the two answers to the smallest body for which they differ; those to `body` if none differ again."""

    async def shows(smaller: Body) -> bool:
        return (await one(smaller)).contents != (await other(smaller)).contents

    small = await smallest(body, shows)
    left, right = await one(small), await other(small)
    return (left, right) if left.contents != right.contents else (await one(body), await other(body))


def every_case(
    cases: Callable[[ProofContext], AsyncIterator[Fault | None]],
    detail: Callable[[ProofContext], str] = lambda _: "",
    without: str = "",
) -> Examine:
    """Return the examination of a claim that holds in every case.

    `cases` yields a fault or None per case; `detail` describes a claim that held, `without` why there may be no case.
    """

    async def verdict(context: ProofContext) -> ClaimVerdict:
        tried = 0
        async for fault in cases(context):
            tried += 1
            if fault is not None:
                return refuted(tried, *fault)
        return held(tried, detail(context) if tried else without)

    return verdict


async def smallest_fault(
    context: ProofContext, body: Body, fault: str, fault_of: AnswerPart, got: AnswerPart
) -> Fault:
    """Return the fault of one answer, with a small request for which `fault_of` still returns a fault."""

    async def shows(smaller: Body) -> bool:
        return bool(fault_of(await context.server.ask(smaller)))

    answer = await context.server.ask(await smallest(body, shows))
    return fault, Reproduction([answer.body], got(answer), fault_of(answer) or fault)


def shown(left: ServerAnswer, right: ServerAnswer, words: tuple[str, str]) -> Reproduction:
    """Return the reproduction of two answers that differ, cut to the text around their first difference."""
    begin = max(0, _common(left.text, right.text) - CONTEXT)
    bodies = [left.body] if left.body == right.body else [left.body, right.body]
    got, expected = brief(right, begin), brief(left, begin)
    return Reproduction(bodies, f"{words[1]}: {got}", f"{words[0]}: {expected}")


def brief(answer: ServerAnswer, begin: int = 0) -> str:
    """Return texts and finish reasons in one line, from character `begin` on."""
    dots = "…" if begin else ""
    parts = [f"{dots}{text[begin : begin + 120]!r} ({reason})" for _, text, reason in answer.contents]
    return "; ".join(parts[:4])


def _first_difference(left: ServerAnswer, right: ServerAnswer) -> str:
    """Return where two answers differ: the token if both list them, otherwise the character."""
    for index, (a, b) in enumerate(zip(left.first.tokens, right.first.tokens, strict=False)):
        if a.text != b.text:
            return f"from token {index} on"
    return f"from character {_common(left.text, right.text)} on"


def _common(left: str, right: str) -> int:
    """Return the length of the common prefix."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(left), len(right)))


def is_near_tie(left: ReceivedChoice, right: ReceivedChoice, tolerance: float) -> bool:
    """Return whether two greedy texts differ at two tokens that are equally likely up to rounding."""
    for a, b in zip(left.tokens, right.tokens, strict=False):
        if a.text != b.text:
            return a.logprob - dict(a.top).get(b.text, -inf) <= tolerance
    return False


SEEDS_APART = 1_000_003  # distance between the seeds of different checks
MOST_ANSWERS = 64
"""Maximum number of concurrent answers. Servers refuse more than a limit (Foreword's is 128)."""


def requests_for(context: ProofContext) -> int:
    """Return the number of requests for all sampled answers."""
    return -(-context.plan.draws // context.abilities.n)


async def draw(
    context: ProofContext, server: Server, depth: int, stream_of_seeds: int, *, logprobs: bool
) -> AsyncIterator[tuple[str, ServerAnswer, ReceivedChoice]]:
    """Yield (prompt, answer, choice) of all sampled answers, several requests at a time, with alternating prompts."""
    texts, n = context.plan.texts, context.abilities.n
    total = requests_for(context)
    at_once = max(1, min(context.plan.at_once, MOST_ANSWERS // n))
    for begin in range(0, total, at_once):
        bodies = []
        for number in range(begin, min(begin + at_once, total)):
            seed = SEEDS_APART * stream_of_seeds + number
            several = {"n": n} if n > 1 else {}
            body = context.sampled(texts[number % len(texts)], seed, max_tokens=depth, **several)
            bodies.append(context.with_logprobs(body) if logprobs else body)
        answers = await send_together(server, [Call(body) for body in bodies])
        for body, answer in zip(bodies, answers, strict=True):
            context.judged(body["prompt"], answer)
            for choice in answer.choices.values():
                yield body["prompt"], answer, choice
