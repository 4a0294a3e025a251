"""Two ways to the same text."""

from collections.abc import Awaitable, Callable, Sequence
from math import inf

from foreword.proofs.server.answer import Answer, Choice
from foreword.proofs.server.client import Body
from foreword.proofs.server.ground import Ground
from foreword.proofs.server.shrink import smallest
from foreword.proofs.server.verdict import Outcome, Reproduction, Verdict, held, refuted

Ask = Callable[[Body], Awaitable[Answer]]

CONTEXT = 40
"""Characters shown before the place where two texts part."""


async def must_agree(
    check: str, ground: Ground, bodies: Sequence[Body], ways: tuple[Ask, Ask], words: tuple[str, str]
) -> Verdict:
    """Return the verdict of a claim that two ways to send a request lead to one text; `words` name the ways."""
    one, other = ways
    ties: list[tuple[Answer, Answer]] = []
    for tried, body in enumerate(bodies, 1):
        left, right = await one(body), await other(body)
        ground.judged(body["prompt"], left, right)
        if left.said == right.said:
            continue
        if body["temperature"] == 0 and is_near_tie(left.first, right.first, ground.tolerance):
            ties.append((left, right))
            continue

        async def shows(smaller: Body) -> bool:
            return (await one(smaller)).said != (await other(smaller)).said

        place = _first_difference(left, right)
        small = await smallest(body, shows)
        left, right = await one(small), await other(small)
        if left.said == right.said:  # it does not happen every time: show the request with which it did
            small, left, right = body, await one(body), await other(body)
        return refuted(check, tried, f"{words[0]} and {words[1]} differ {place}", shown(left, right, words))
    if not ties:
        return held(check, len(bodies))
    place = _first_difference(*ties[0])
    detail = f"{len(ties)} of {len(bodies)} differ at ties within {ground.tolerance} nats, the first {place}"
    example = shown(*ties[0], words)
    return Verdict(check, Outcome.DIFFERS_AT_TIES, len(bodies), detail, reproduction=example)


def shown(left: Answer, right: Answer, words: tuple[str, str]) -> Reproduction:
    """Return two answers that should be equal, from shortly before they differ."""
    begin = max(0, _common(left.text, right.text) - CONTEXT)
    bodies = [left.body] if left.body == right.body else [left.body, right.body]
    got, expected = brief(right, begin), brief(left, begin)
    return Reproduction(bodies, f"{words[1]}: {got}", f"{words[0]}: {expected}")


def brief(answer: Answer, begin: int = 0) -> str:
    """Return texts and reasons, from a character on, cut to what a line holds."""
    dots = "…" if begin else ""
    parts = [f"{dots}{text[begin : begin + 120]!r} ({reason})" for _, text, reason in answer.said]
    return "; ".join(parts[:4])


def _first_difference(left: Answer, right: Answer) -> str:
    """Return where two answers part: the token where both list them, else the character."""
    for place, (a, b) in enumerate(zip(left.first.tokens, right.first.tokens, strict=False)):
        if a.text != b.text:
            return f"from token {place} on"
    return f"from character {_common(left.text, right.text)} on"


def _common(left: str, right: str) -> int:
    """Return the number of characters that two texts begin with in common."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(left), len(right)))


def is_near_tie(left: Choice, right: Choice, tolerance: float) -> bool:
    """Return whether two greedy texts part at two tokens that are equally likely up to rounding."""
    for a, b in zip(left.tokens, right.tokens, strict=False):
        if a.text != b.text:
            return a.logprob - dict(a.top).get(b.text, -inf) <= tolerance
    return False
