"""Speculation changes no greedy text."""

from typing import ClassVar

from foreword.proofs.server.comparing import must_agree
from foreword.proofs.server.ground import Ground
from foreword.proofs.server.verdict import Verdict, not_tried


class Speculation:
    """Greedy requests with and without it."""

    name: ClassVar[str] = "greedy with and without speculation"
    claim: ClassVar[str] = "a greedy text is the same with speculation and without"
    rests_on: ClassVar[tuple[str, ...]] = ("seed alone",)

    def cost(self, ground: Ground) -> int:
        return 2 * ground.plan.prompts if ground.plain else 0

    async def examine(self, ground: Ground) -> Verdict:
        if ground.plain is None:
            return not_tried(self.name, "needs --plain-url, or --plain-body with what turns speculation off")
        bodies = [ground.greedy(text) for text in ground.plan.texts]
        ways = (ground.plain.ask, ground.server.ask)
        return await must_agree(self.name, ground, bodies, ways, ("without", "with"))
