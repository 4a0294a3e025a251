"""`n` answers are n answers."""

from math import exp
from typing import ClassVar

from foreword.proofs.server.alarms import COPIES
from foreword.proofs.server.answer import Answer
from foreword.proofs.server.comparing import brief
from foreword.proofs.server.ground import Ground
from foreword.proofs.server.verdict import Outcome, Reproduction, Verdict, not_tried, refuted

N = 4


class Several:
    """As many as were asked for, each drawn by itself: equal ones must be likely enough to be equal."""

    name: ClassVar[str] = "n"
    claim: ClassVar[str] = f"a request with n = {N} gets {N} answers that are drawn each by itself"
    rests_on: ClassVar[tuple[str, ...]] = ("logprobs",)

    def cost(self, ground: Ground) -> int:
        return ground.plan.prompts

    async def examine(self, ground: Ground) -> Verdict:
        alarm = COPIES / (ground.plan.prompts * (N - 1))
        judged = 0
        for tried, (seed, text) in enumerate(enumerate(ground.plan.texts), 1):
            answer = await ground.server.ask(ground.with_logprobs(ground.sampled(text, seed, n=N)))
            ground.judged(text, answer)
            if sorted(answer.choices) != list(range(N)):
                shown = Reproduction(
                    [answer.body], f"choices {sorted(answer.choices)}", f"choices 0 to {N - 1}"
                )
                return refuted(self.name, tried, f"{len(answer.choices)} answers of {N}", shown)
            judged += _text_chance(answer) < alarm
            copies = [k for k in range(1, N) if answer.choices[k].text == answer.text]
            if copies and _text_chance(answer) < alarm:
                fault = f"choice {copies[0]} is a copy of choice 0, which had a chance of {_text_chance(answer):.1g}"
                shown = Reproduction([answer.body], brief(answer), "texts drawn each by itself")
                return refuted(self.name, tried, fault, shown)
        if not ground.abilities.logprobs:
            return not_tried(
                self.name, "the number is right; whether they are copies needs log probabilities"
            )
        return Verdict(
            self.name, Outcome.NOT_REFUTED, ground.plan.prompts, visible=f"copies in one of {judged} requests"
        )


def _text_chance(answer: Answer) -> float:
    """Of the first choice, by the server's own log probabilities; 1 if it tells none."""
    tokens = answer.first.tokens
    return exp(sum(token.logprob for token in tokens)) if tokens else 1.0
