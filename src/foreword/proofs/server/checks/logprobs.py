"""Log probabilities are those of the model, wherever they are computed."""

from dataclasses import dataclass
from math import exp
from typing import ClassVar

from foreword.proofs.server.answer import HALF, Answer, Token
from foreword.proofs.server.client import Body
from foreword.proofs.server.ground import Ground
from foreword.proofs.server.verdict import Reproduction, Verdict, held, not_tried, refuted

PLACES = 3
"""Tokens of an answer that are scored again by a request of their own."""


@dataclass(frozen=True)
class _Fault:
    bodies: list[Body]
    got: str
    expected: str


class Logprobs:
    """Lists that make sense in themselves, and the same numbers when the text is read instead of written."""

    name: ClassVar[str] = "logprobs"
    claim: ClassVar[str] = (
        "log probabilities form a law, greedy takes their largest, and a re-score repeats them"
    )
    rests_on: ClassVar[tuple[str, ...]] = ("seed alone",)

    def cost(self, ground: Ground) -> int:
        if not ground.abilities.logprobs:
            return 0
        return ground.plan.prompts * (1 + PLACES + (ground.plain is not None))

    async def examine(self, ground: Ground) -> Verdict:
        if not ground.abilities.logprobs:
            return not_tried(self.name, "the server lists no log probabilities")
        answers = places = 0
        for text in ground.plan.texts:
            body = ground.greedy(text)
            if ground.abilities.token_ids:
                body["return_token_ids"] = True
            answer = await ground.server.ask(body)
            fault = _law_fault(answer, ground.tolerance) or await self._plain_fault(ground, body, answer)
            scored = 0
            if fault is None:
                fault, scored = await self._rescored(ground, answer)
            places += scored
            answers += 1
            ground.judged(text, answer)
            if fault is not None:
                shown = Reproduction(fault.bodies, fault.got, fault.expected)
                return refuted(self.name, places, f"{fault.got}, expected {fault.expected}", shown)
        if not places:
            return held(self.name, answers, "no token could be scored again")
        return held(self.name, places, "tokens scored again")

    async def _rescored(self, ground: Ground, answer: Answer) -> tuple[_Fault | None, int]:
        """Ask for single tokens after prompts that end with the answer so far."""
        tokens, scored = answer.first.tokens, 0
        for place in sorted({len(tokens) * k // (PLACES + 1) for k in range(1, PLACES + 1)}):
            prompt = _prefix(ground, answer, place)
            again = await ground.server.ask({**answer.body, "prompt": prompt, "max_tokens": 1})
            if not again.first.tokens or not _is_same_prefix(answer, again, place):
                continue  # read as other tokens than it was written: it says nothing
            scored += 1
            if fault := _difference(tokens[place], again.first.tokens[0], ground.tolerance):
                bodies = [{**answer.body, "max_tokens": place + 1}, dict(again.body)]
                return _Fault(bodies, f"token {place}: {fault[0]}", f"re-scored: {fault[1]}"), scored
        return None, scored

    async def _plain_fault(self, ground: Ground, body: Body, answer: Answer) -> _Fault | None:
        if ground.plain is None:
            return None
        plain = await ground.plain.ask(body)
        for place, (a, b) in enumerate(zip(answer.first.tokens, plain.first.tokens, strict=False)):
            if a.text != b.text:
                return None  # another check's business
            if fault := _difference(a, b, ground.tolerance):
                bodies = [{**answer.body, "max_tokens": place + 1}, {**plain.body, "max_tokens": place + 1}]
                return _Fault(bodies, f"token {place}: {fault[0]}", f"without speculation: {fault[1]}")
        return None


def _prefix(ground: Ground, answer: Answer, place: int) -> str | list[int]:
    ids = answer.first.token_ids
    if ground.abilities.token_ids and ids and answer.prompt_ids:
        return [*answer.prompt_ids, *ids[:place]]
    return str(answer.body.get("prompt", "")) + "".join(token.text for token in answer.first.tokens[:place])


def _is_same_prefix(answer: Answer, again: Answer, place: int) -> bool:
    if isinstance(again.body.get("prompt"), list):
        return True
    if "messages" in again.body or answer.usage is None or again.usage is None:
        return False
    return again.usage.prompt == answer.usage.prompt + place


def _law_fault(answer: Answer, tolerance: float) -> _Fault | None:
    for place, token in enumerate(answer.first.tokens):
        if not token.top:
            continue
        mass = sum(exp(logprob) for _, logprob in token.top)
        best = token.top[0][1]
        said = f"token {place}: {token.text!r} {token.logprob:.3f}"
        bodies = [{**answer.body, "max_tokens": place + 1}]
        if mass > 1 + tolerance:
            return _Fault(bodies, f"token {place}: chances of {mass:.3f} in all", "at most 1")
        if HALF not in token.text and abs(token.logprob - best) > tolerance:
            return _Fault(bodies, said, f"greedy takes the largest, {token.top[0][0]!r} {best:.3f}")
    return None


def _difference(one: Token, other: Token, tolerance: float) -> tuple[str, str] | None:
    """Where two accounts of one place differ by more than rounding explains; only likely tokens are compared."""
    known = dict(other.top)
    for text, logprob in ((one.text, one.logprob), *one.top[:3]):
        if HALF not in text and text in known and logprob > -3 and abs(known[text] - logprob) > tolerance:
            return f"{text!r} {logprob:.4f}", f"{known[text]:.4f}"
    return None
