"""The same request gets the same text: again, streamed, in a batch, after other traffic, without speculation."""

from typing import ClassVar

from foreword.proofs.server.client import Body, ServerAnswer
from foreword.proofs.server.comparing import Call, brief, must_agree, send_together
from foreword.proofs.server.ground import ClaimVerdict, Ground, Reproduction, held, not_tried, refuted


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

    async def examine(self, ground: Ground) -> ClaimVerdict:
        bodies = seeded_bodies(ground) + [ground.greedy(text) for text in ground.plan.texts]
        ways = (ground.server.ask, ground.server.ask)
        return await must_agree(self.name, ground, bodies, ways, ("the first", "the second"))


class Streamed:
    """Greedy and seeded requests both ways."""

    name: ClassVar[str] = "streamed equals whole"
    claim: ClassVar[str] = "the chunks of a stream make the text and the reason of the whole answer"
    rests_on: ClassVar[tuple[str, ...]] = ("seed alone",)

    def cost(self, ground: Ground) -> int:
        return 4 * ground.plan.prompts

    async def examine(self, ground: Ground) -> ClaimVerdict:
        bodies = seeded_bodies(ground) + [ground.greedy(text) for text in ground.plan.texts]
        ways = (ground.server.ask, ground.server.stream)
        return await must_agree(self.name, ground, bodies, ways, ("whole", "streamed"))


class GreedySpeculation:
    """Greedy requests with and without it."""

    name: ClassVar[str] = "greedy with and without speculation"
    claim: ClassVar[str] = "a greedy text is the same with speculation and without"
    rests_on: ClassVar[tuple[str, ...]] = ("seed alone",)

    def cost(self, ground: Ground) -> int:
        return 2 * ground.plan.prompts if ground.plain else 0

    async def examine(self, ground: Ground) -> ClaimVerdict:
        if ground.plain is None:
            return not_tried(self.name, "needs --plain-url, or --plain-body with what turns speculation off")
        bodies = [ground.greedy(text) for text in ground.plan.texts]
        ways = (ground.plain.ask, ground.server.ask)
        return await must_agree(self.name, ground, bodies, ways, ("without", "with"))


class SeedBatch:
    """Seeded requests one after the other, then at once with others of the same prompt."""

    name: ClassVar[str] = "seed in a batch"
    claim: ClassVar[str] = "a seeded request gets the same text alone and beside others"
    rests_on: ClassVar[tuple[str, ...]] = ("seed alone",)

    def cost(self, ground: Ground) -> int:
        return ground.plan.prompts * (1 + ground.plan.at_once)

    async def examine(self, ground: Ground) -> ClaimVerdict:
        for tried, body in enumerate(seeded_bodies(ground), 1):
            alone = await ground.server.ask(body)
            beside = await self._beside_others(ground, body, ground.plan.at_once)
            ground.judged(body["prompt"], alone, *beside)
            if any(answer.said != alone.said for answer in beside):
                return await self._refuted(ground, body, alone, tried)
        return held(self.name, ground.plan.prompts, f"{ground.plan.at_once} at once")

    async def _beside_others(self, ground: Ground, body: Body, size: int) -> list[ServerAnswer]:
        """Return the body's answers as the first and as the last of `size` requests sent at once."""
        answers = await send_together(ground.server, _calls(body, size))
        return [answers[0], answers[-1]]

    async def _refuted(self, ground: Ground, body: Body, alone: ServerAnswer, tried: int) -> ClaimVerdict:
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


class SeedTraffic:
    """Between two equal requests, others that share the beginning of their prompts: caches and stores fill up."""

    name: ClassVar[str] = "seed after other traffic"
    claim: ClassVar[str] = "a seeded request gets the same text before and after other requests"
    rests_on: ClassVar[tuple[str, ...]] = ("seed alone",)

    def cost(self, ground: Ground) -> int:
        return ground.plan.prompts * 4

    async def examine(self, ground: Ground) -> ClaimVerdict:
        async def after_traffic(body: Body) -> ServerAnswer:
            for more in (" and", " and then"):
                await ground.server.ask({**body, "prompt": body["prompt"] + more, "seed": body["seed"] + 1})
            return await ground.server.ask(body)

        ways = (ground.server.ask, after_traffic)
        return await must_agree(self.name, ground, seeded_bodies(ground), ways, ("before", "after"))
