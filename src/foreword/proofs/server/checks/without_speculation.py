"""Speculation changes no law."""

from math import log
from typing import ClassVar

from foreword.proofs.server.alarms import WITHOUT_SPECULATION
from foreword.proofs.server.client import Server
from foreword.proofs.server.drawing import draw, requests_for
from foreword.proofs.server.ground import Ground
from foreword.proofs.server.two_samples import Contrast, contrast, visible_shift
from foreword.proofs.server.verdict import CONFIDENCE, Outcome, Reproduction, Verdict, not_tried, refuted

DEPTH = 3
"""Tokens of the texts that are compared: the more, the rarer each text is."""


class WithoutSpeculation:
    """Texts of a few tokens drawn with and without speculation, prompt by prompt."""

    name: ClassVar[str] = "distribution with and without speculation"
    claim: ClassVar[str] = "texts have the same law with speculation and without"
    rests_on: ClassVar[tuple[str, ...]] = ("n",)

    def cost(self, ground: Ground) -> int:
        return 2 * requests_for(ground) if ground.plain else 0

    async def examine(self, ground: Ground) -> Verdict:
        if ground.plain is None:
            return not_tried(self.name, "needs --plain-url, or --plain-body with what turns speculation off")
        with_it = await _texts(ground, ground.server, 2)
        without = await _texts(ground, ground.plain, 3)
        alarm = WITHOUT_SPECULATION / len(with_it)
        worst: tuple[float, str, Contrast] | None = None
        for prompt, drawn in with_it.items():
            found = contrast(without[prompt], drawn)
            if worst is None or found.p < worst[0]:
                worst = found.p, prompt, found
        assert worst is not None
        draws = len(with_it[worst[1]])
        if worst[0] < alarm:
            return self._refuted(ground, worst[1], worst[2], len(with_it) * draws)
        shift = visible_shift(0.25, draws, alarm)
        visible = f"a text of a quarter's chance that is off by {shift:.1%} ({CONFIDENCE:.0%})"
        detail = f"smallest p {worst[0]:.2g} of {alarm:.1g}"
        return Verdict(self.name, Outcome.NOT_REFUTED, 2 * len(with_it) * draws, detail, visible)

    def _refuted(self, ground: Ground, prompt: str, found: Contrast, tried: int) -> Verdict:
        body = ground.server.wire_body(ground.sampled(prompt, 0, max_tokens=DEPTH, n=ground.abilities.n))
        body.pop("seed")
        without, with_it = found.counts
        shown = Reproduction(
            [body], f"{found.cell!r} {with_it} times with speculation", f"{without} times as without"
        )
        detail = f"{found.cell!r} has another chance with speculation (p = e^{log(max(found.p, 1e-300)):.0f})"
        return refuted(self.name, tried, detail, shown)


async def _texts(ground: Ground, server: Server, seeds: int) -> dict[str, list[str]]:
    drawn: dict[str, list[str]] = {text: [] for text in ground.plan.texts}
    async for prompt, _, choice in draw(ground, server, DEPTH, seeds, logprobs=False):
        drawn[prompt].append(choice.text)
    return drawn
