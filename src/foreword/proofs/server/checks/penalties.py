"""Penalties penalise."""

from typing import ClassVar

from foreword.proofs.server.answer import HALF, Answer
from foreword.proofs.server.comparing import brief
from foreword.proofs.server.ground import Ground
from foreword.proofs.server.verdict import Reproduction, Verdict, held, not_tried, refuted

PENALTY = 2.0
MARGIN = 0.2  # nats that the other token must be ahead by


class Penalties:
    """Where a greedy text repeats a token that another one is close behind, a penalty must change it."""

    name: ClassVar[str] = "penalties"
    claim: ClassVar[str] = "presence_penalty changes a greedy text where it must"
    rests_on: ClassVar[tuple[str, ...]] = ("seed alone", "logprobs")

    def cost(self, ground: Ground) -> int:
        return 2 * ground.plan.prompts if ground.abilities.logprobs else 0

    async def examine(self, ground: Ground) -> Verdict:
        if not ground.abilities.logprobs:
            return not_tried(self.name, "the server lists no log probabilities")
        tried = 0
        for text in ground.plan.texts:
            body = ground.greedy(text)
            plain = await ground.server.ask(body)
            place = _turning(plain, text)
            ground.judged(text, plain)
            if place is None:
                continue
            tried += 1
            answer = await ground.server.ask({**body, "max_tokens": place + 1, "presence_penalty": PENALTY})
            before = [token.text for token in plain.first.tokens[: place + 1]]
            if [token.text for token in answer.first.tokens] == before:
                fault = f"token {place} repeats {before[-1]!r} though another is within {PENALTY} nats"
                return refuted(
                    self.name, tried, fault, Reproduction([answer.body], brief(answer), "another text")
                )
        return held(
            self.name, tried, "" if tried else "no answer repeats a token that another is close behind"
        )


def _turning(plain: Answer, prompt: str) -> int | None:
    """The first token that a penalty on what was written must replace.

    The other must be new to the answer and to the prompt, which some servers penalise too.
    """
    written: set[str] = set()
    for place, token in enumerate(plain.first.tokens):
        new = [
            p for text, p in token.top if text not in written and text.strip() and text.strip() not in prompt
        ]
        repeats = token.text in written and HALF not in token.text
        if repeats and new and max(new) > token.logprob - PENALTY + MARGIN:
            return place
        written.add(token.text)
    return None
