"""Tokens and their places make the text."""

from typing import ClassVar

from foreword.proofs.server.answer import HALF, Choice
from foreword.proofs.server.client import Body
from foreword.proofs.server.ground import Ground
from foreword.proofs.server.shrink import smallest
from foreword.proofs.server.verdict import Reproduction, Verdict, held, not_tried, refuted


class Offsets:
    """Greedy and sampled answers with log probabilities."""

    name: ClassVar[str] = "offsets"
    claim: ClassVar[str] = "the listed tokens are those of the text, each at its offset"
    rests_on: ClassVar[tuple[str, ...]] = ()

    def cost(self, ground: Ground) -> int:
        return 2 * ground.plan.prompts if ground.abilities.logprobs else 0

    async def examine(self, ground: Ground) -> Verdict:
        if not ground.abilities.logprobs:
            return not_tried(self.name, "the server lists no log probabilities")
        tried = 0
        for seed, text in enumerate(ground.plan.texts):
            for body in (ground.greedy(text), ground.with_logprobs(ground.sampled(text, seed))):
                answer = await ground.server.ask(body)
                ground.judged(text, answer)
                tried += 1
                if fault := _fault(answer.first):
                    return await self._refuted(ground, body, fault, tried)
        return held(self.name, tried)

    async def _refuted(self, ground: Ground, body: Body, fault: str, tried: int) -> Verdict:
        async def shows(smaller: Body) -> bool:
            return bool(_fault((await ground.server.ask(smaller)).first))

        answer = await ground.server.ask(await smallest(body, shows))
        tokens = [token.text for token in answer.first.tokens]
        got = f"{tokens[:12]} at {answer.first.offsets[:12]} of {answer.text[:80]!r}"
        return refuted(
            self.name, tried, fault, Reproduction([answer.body], got, _fault(answer.first) or fault)
        )


def _fault(choice: Choice) -> str:
    texts = [token.text for token in choice.tokens]
    told = len(choice.offsets)
    for place in range(min(told, len(texts)) - 1):
        step = choice.offsets[place + 1] - choice.offsets[place]
        if HALF not in texts[place] and step != len(texts[place]):
            return f"token {place} has {len(texts[place])} characters, the next is {step} further"
    whole = "".join(texts)
    if HALF in whole + choice.text:
        return ""
    # A text may lack the space that it begins with; after an end there are tokens that are not shown.
    fits = (
        whole.lstrip().startswith(choice.text.strip())
        if choice.finish_reason == "stop"
        else (whole.strip() == choice.text.strip())
    )
    return "" if fits else "the listed tokens do not spell the text"
