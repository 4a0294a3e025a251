"""Same seed, same text, whatever the server has read in the meantime."""

from typing import ClassVar

from foreword.proofs.server.answer import Answer
from foreword.proofs.server.checks.seed_alone import seeded_bodies
from foreword.proofs.server.client import Body
from foreword.proofs.server.comparing import must_agree
from foreword.proofs.server.ground import Ground
from foreword.proofs.server.verdict import Verdict


class SeedTraffic:
    """Between two equal requests, others that share the beginning of their prompts: caches and stores fill up."""

    name: ClassVar[str] = "seed after other traffic"
    claim: ClassVar[str] = "a seeded request gets the same text before and after other requests"
    rests_on: ClassVar[tuple[str, ...]] = ("seed alone",)

    def cost(self, ground: Ground) -> int:
        return ground.plan.prompts * 4

    async def examine(self, ground: Ground) -> Verdict:
        async def after_traffic(body: Body) -> Answer:
            for more in (" and", " and then"):
                await ground.server.ask({**body, "prompt": body["prompt"] + more, "seed": body["seed"] + 1})
            return await ground.server.ask(body)

        ways = (ground.server.ask, after_traffic)
        return await must_agree(self.name, ground, seeded_bodies(ground), ways, ("before", "after"))
