"""Same seed, same text, in company too."""

import asyncio
from typing import ClassVar

from foreword.proofs.server.answer import Answer
from foreword.proofs.server.checks.seed_alone import seeded_bodies
from foreword.proofs.server.client import Body
from foreword.proofs.server.comparing import brief
from foreword.proofs.server.ground import Ground
from foreword.proofs.server.verdict import Reproduction, Verdict, proven, refuted


class SeedBatch:
    """Seeded requests one after the other, then together with their like."""

    name: ClassVar[str] = "seed in a batch"
    claim: ClassVar[str] = "a seeded request gets the same text alone and beside others"
    rests_on: ClassVar[tuple[str, ...]] = ("seed alone",)

    def cost(self, ground: Ground) -> int:
        return ground.plan.prompts * (1 + ground.plan.at_once)

    async def examine(self, ground: Ground) -> Verdict:
        for tried, body in enumerate(seeded_bodies(ground), 1):
            alone = await ground.server.ask(body)
            together = await self._in_company(ground, body, ground.plan.at_once)
            ground.on_asked()
            if any(answer.said != alone.said for answer in together):
                return await self._refuted(ground, body, alone, tried)
        return proven(self.name, ground.plan.prompts, f"{ground.plan.at_once} at once")

    async def _in_company(self, ground: Ground, body: Body, size: int) -> list[Answer]:
        """The body's answers as the first and as the last of many; half of the others are streamed."""
        asked = [ground.server.ask(body)]
        for k in range(size - 2):
            other = {**body, "seed": body["seed"] + 1000 + k}
            asked.append(ground.server.stream(other) if k % 2 else ground.server.ask(other))
        answers = await asyncio.gather(*asked, ground.server.ask(body))
        return [answers[0], answers[-1]]

    async def _refuted(self, ground: Ground, body: Body, alone: Answer, tried: int) -> Verdict:
        for size in range(2, ground.plan.at_once + 1):
            differing = [a for a in await self._in_company(ground, body, size) if a.said != alone.said]
            if differing:
                break
        others = [{**alone.body, "seed": body["seed"] + 1000 + k} for k in range(size - 2)]
        got = f"one of {size} at once: {brief(differing[0])}" if differing else "another text, once"
        shown = Reproduction([alone.body, *others, alone.body], got, f"alone: {brief(alone)}", at_once=True)
        return refuted(self.name, tried, f"another text beside {size - 1} others", shown)
