"""Two ways to the same text."""

from collections.abc import Awaitable, Callable, Sequence
from itertools import pairwise

from foreword.proofs.server.answer import Answer, Choice
from foreword.proofs.server.client import Body
from foreword.proofs.server.ground import Ground
from foreword.proofs.server.shrink import smallest
from foreword.proofs.server.verdict import Reproduction, Verdict, proven, refuted

Ask = Callable[[Body], Awaitable[Answer]]


async def must_agree(
    check: str, ground: Ground, bodies: Sequence[Body], ways: tuple[Ask, Ask], words: tuple[str, str]
) -> Verdict:
    """The verdict of a claim that two ways to ask lead to the same texts; `words` name the ways."""
    one, other = ways
    ties = 0
    for tried, body in enumerate(bodies, 1):
        left, right = await one(body), await other(body)
        ground.on_asked()
        if left.said == right.said:
            continue
        if body["temperature"] == 0 and is_near_tie(left.first, right.first, ground.tolerance):
            ties += 1
            continue

        async def shows(smaller: Body) -> bool:
            return (await one(smaller)).said != (await other(smaller)).said

        small = await smallest(body, shows)
        left, right = await one(small), await other(small)
        if left.said == right.said:  # it does not happen every time: show the request with which it did
            small, left, right = body, await one(body), await other(body)
        return refuted(check, tried, f"{words[0]} and {words[1]} differ", shown(left, right, words))
    told = f"{ties} differ at a tie that rounding may break" if ties else ""
    return proven(check, len(bodies), told)


def shown(left: Answer, right: Answer, words: tuple[str, str]) -> Reproduction:
    """Two answers that should be equal."""
    return Reproduction([left.body], f"{words[1]}: {brief(right)}", f"{words[0]}: {brief(left)}")


def brief(answer: Answer) -> str:
    """Texts and reasons, cut to what a line holds."""
    told = [f"{text[:120]!r} ({reason})" for _, text, reason in answer.said]
    return "; ".join(told[:4])


def is_near_tie(left: Choice, right: Choice, tolerance: float) -> bool:
    """Whether two greedy texts part at a place where the two likeliest tokens are equal up to rounding."""
    for a, b in zip(left.tokens, right.tokens, strict=False):
        if a.text != b.text:
            gaps = [first[1] - second[1] for first, second in list(pairwise(a.top))[:1]]
            return bool(gaps) and gaps[0] <= tolerance
    return False
