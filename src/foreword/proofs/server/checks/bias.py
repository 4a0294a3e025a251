"""A bias on a token decides for it."""

from typing import ClassVar

from foreword.proofs.server.answer import Choice
from foreword.proofs.server.comparing import brief
from foreword.proofs.server.ground import Ground
from foreword.proofs.server.verdict import Reproduction, Verdict, held, refuted

TOKENS = (40, 45, 50)
"""Ids that are ordinary tokens of most vocabularies."""
LENGTH = 4


class Bias:
    """With +100 on one token, a greedy answer has no other."""

    name: ClassVar[str] = "logit_bias"
    claim: ClassVar[str] = "logit_bias of +100 makes an answer of that token alone"
    rests_on: ClassVar[tuple[str, ...]] = ("seed alone",)

    def cost(self, ground: Ground) -> int:
        return 1 + len(TOKENS)

    async def examine(self, ground: Ground) -> Verdict:
        body = ground.greedy(ground.plan.texts[0], max_tokens=LENGTH)
        if ground.abilities.token_ids:
            body["return_token_ids"] = True
        plain = await ground.server.ask(body)
        ground.judged(body["prompt"], plain)
        for tried, token in enumerate(TOKENS, 1):
            answer = await ground.server.ask({**body, "logit_bias": {str(token): 100}})
            if _is_ignored(answer.first, plain.first, token):
                shown = Reproduction([answer.body], brief(answer), f"token {token} again and again")
                return refuted(self.name, tried, f"token {token} was not decided for", shown)
        return held(self.name, len(TOKENS))


def _is_ignored(answer: Choice, plain: Choice, token: int) -> bool:
    """By the ids if they are told, else by texts: more than one kind, or an unchanged answer of more than one."""
    if answer.token_ids:
        return any(found != token for found in answer.token_ids)
    kinds = {entry.text for entry in answer.tokens}
    return len(kinds) > 1 if kinds else answer.text == plain.text and not _repeats(answer.text)


def _repeats(text: str) -> bool:
    return len(text) % LENGTH == 0 and text == text[: len(text) // LENGTH] * LENGTH
