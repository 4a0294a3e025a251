"""Same seed, same text, beside other requests too."""

from typing import ClassVar

from foreword.proofs.server.answer import Answer
from foreword.proofs.server.checks.seed_alone import seeded_bodies
from foreword.proofs.server.client import Body
from foreword.proofs.server.comparing import brief
from foreword.proofs.server.concurrency import Call, send_together
from foreword.proofs.server.ground import Ground
from foreword.proofs.server.verdict import Reproduction, Verdict, held, refuted


class SeedBatch:
    """Seeded requests one after the other, then at once with others of the same prompt."""

    name: ClassVar[str] = "seed in a batch"
    claim: ClassVar[str] = "a seeded request gets the same text alone and beside others"
    rests_on: ClassVar[tuple[str, ...]] = ("seed alone",)

    def cost(self, ground: Ground) -> int:
        return ground.plan.prompts * (1 + ground.plan.at_once)

    async def examine(self, ground: Ground) -> Verdict:
        for tried, body in enumerate(seeded_bodies(ground), 1):
            alone = await ground.server.ask(body)
            beside = await self._beside_others(ground, body, ground.plan.at_once)
            ground.judged(body["prompt"], alone, *beside)
            if any(answer.said != alone.said for answer in beside):
                return await self._refuted(ground, body, alone, tried)
        return held(self.name, ground.plan.prompts, f"{ground.plan.at_once} at once")

    async def _beside_others(self, ground: Ground, body: Body, size: int) -> list[Answer]:
        """Return the body's answers as the first and as the last of `size` requests sent at once."""
        answers = await send_together(ground.server, _calls(body, size))
        return [answers[0], answers[-1]]

    async def _refuted(self, ground: Ground, body: Body, alone: Answer, tried: int) -> Verdict:
        for size in range(2, ground.plan.at_once + 1):
            differing = [a for a in await self._beside_others(ground, body, size) if a.said != alone.said]
            if differing:
                break
        sent = [ground.server.wire_body(call.body, streamed=call.streamed) for call in _calls(body, size)]
        got = f"one of {size} at once: {brief(differing[0])}" if differing else "another text, once"
        shown = Reproduction(sent, got, f"alone: {brief(alone)}", at_once=True)
        return refuted(self.name, tried, f"another text beside {size - 1} others", shown)


def _calls(body: Body, size: int) -> list[Call]:
    """Return the body first and last, and between them other seeds, every second one streamed."""
    others = [Call({**body, "seed": body["seed"] + 1000 + k}, streamed=k % 2 == 1) for k in range(size - 2)]
    return [Call(body), *others, Call(body)]
