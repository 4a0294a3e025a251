"""An answer that ended by itself has ended; one that was cut goes on."""

from typing import ClassVar

from foreword.proofs.server.answer import HALF, Answer
from foreword.proofs.server.comparing import brief
from foreword.proofs.server.ground import Ground
from foreword.proofs.server.verdict import Reproduction, Verdict, held, refuted

MORE = 8
"""Tokens that are allowed beyond those of the first answer."""


class Ends:
    """The same seed with more room: the same text if it had ended, a longer one if it was cut."""

    name: ClassVar[str] = "ends"
    claim: ClassVar[str] = "finish_reason is right: stop texts go no further with more room, cut ones do"
    rests_on: ClassVar[tuple[str, ...]] = ("seed alone",)

    def cost(self, ground: Ground) -> int:
        return 4 * ground.plan.prompts

    async def examine(self, ground: Ground) -> Verdict:
        tried = ended = 0
        for seed, text in enumerate(ground.plan.texts):
            for tokens in (ground.plan.tokens // 2, ground.plan.tokens):
                body = ground.sampled(text, seed, max_tokens=tokens)
                answer = await ground.server.ask(body)
                longer = await ground.server.ask({**body, "max_tokens": tokens + MORE})
                ground.judged(text, answer, longer)
                tried += 1
                ended += answer.first.finish_reason == "stop"
                if fault := _fault(answer, longer):
                    bodies = [answer.body, longer.body]
                    shown = Reproduction(bodies, f"{brief(answer)}, then {brief(longer)}", fault)
                    return refuted(self.name, tried, fault, shown)
        return held(self.name, tried, f"{ended} ended by themselves")


def _fault(answer: Answer, longer: Answer) -> str:
    reason, text, more = answer.first.finish_reason, answer.text, longer.text
    if reason not in ("stop", "length"):
        return f"finish_reason must be stop or length, not {reason!r}"
    if reason == "stop" and (more, longer.first.finish_reason) != (text, "stop"):
        return "it had ended (stop), and more room must change nothing"
    # The last character of a cut text may be half of one.
    if reason == "length" and not more.startswith(text.rstrip(HALF)):
        return "it was cut (length), and with more room it must go on from there"
    counted, room = answer.usage, answer.body["max_tokens"]
    if reason == "length" and counted is not None and counted.completion < room:
        return f"it says that it was cut at {room} tokens, and has {counted.completion}"
    return ""
