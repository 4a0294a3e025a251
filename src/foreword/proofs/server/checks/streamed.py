"""A stream says what the whole answer says."""

from typing import ClassVar

from foreword.proofs.server.checks.seed_alone import seeded_bodies
from foreword.proofs.server.comparing import must_agree
from foreword.proofs.server.ground import Ground
from foreword.proofs.server.verdict import Verdict


class Streamed:
    """Greedy and seeded requests both ways."""

    name: ClassVar[str] = "streamed equals whole"
    claim: ClassVar[str] = "the chunks of a stream make the text and the reason of the whole answer"
    rests_on: ClassVar[tuple[str, ...]] = ("seed alone",)

    def cost(self, ground: Ground) -> int:
        return 4 * ground.plan.prompts

    async def examine(self, ground: Ground) -> Verdict:
        bodies = seeded_bodies(ground) + [ground.greedy(text) for text in ground.plan.texts]
        ways = (ground.server.ask, ground.server.stream)
        return await must_agree(self.name, ground, bodies, ways, ("whole", "streamed"))
