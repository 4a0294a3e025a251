"""Same request, same text."""

from typing import ClassVar

from foreword.proofs.server.client import Body
from foreword.proofs.server.comparing import must_agree
from foreword.proofs.server.ground import Ground
from foreword.proofs.server.verdict import Verdict


def seeded_bodies(ground: Ground) -> list[Body]:
    """One request per prompt, with a seed of its own."""
    return [ground.sampled(text, seed) for seed, text in enumerate(ground.plan.texts)]


class SeedAlone:
    """Every seeded request is asked twice, and every greedy one."""

    name: ClassVar[str] = "seed alone"
    claim: ClassVar[str] = "the same request with the same seed gets the same text, and so does a greedy one"
    rests_on: ClassVar[tuple[str, ...]] = ()

    def cost(self, ground: Ground) -> int:
        return 4 * ground.plan.prompts

    async def examine(self, ground: Ground) -> Verdict:
        bodies = seeded_bodies(ground) + [ground.greedy(text) for text in ground.plan.texts]
        ways = (ground.server.ask, ground.server.ask)
        return await must_agree(self.name, ground, bodies, ways, ("the first", "the second"))
