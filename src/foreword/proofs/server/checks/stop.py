"""An answer ends before a stop text, with nothing missing."""

from typing import ClassVar

from foreword.proofs.server.answer import HALF
from foreword.proofs.server.client import Body
from foreword.proofs.server.comparing import brief
from foreword.proofs.server.ground import Ground
from foreword.proofs.server.verdict import Reproduction, Verdict, held, refuted

STOPS = 3
"""Places of an answer that are made stop texts."""


class Stop:
    """Pieces of a known answer become stop texts, within tokens and across them."""

    name: ClassVar[str] = "stop"
    claim: ClassVar[str] = (
        "an answer with a stop text is the answer without it, up to where the stop text begins"
    )
    rests_on: ClassVar[tuple[str, ...]] = ("seed alone", "streamed equals whole")

    def cost(self, ground: Ground) -> int:
        return ground.plan.prompts * (1 + 2 * STOPS)

    async def examine(self, ground: Ground) -> Verdict:
        tried = 0
        for seed, text in enumerate(ground.plan.texts):
            body = ground.sampled(text, seed)
            unstopped = await ground.server.ask(body)
            ground.judged(text, unstopped)
            whole = unstopped.text
            for stop, place in _stops(whole):
                for ask in (ground.server.ask, ground.server.stream):
                    answer = await ask({**body, "stop": [stop]})
                    ground.judged(text, answer)
                    tried += 1
                    if (answer.text, answer.first.finish_reason) != (whole[:place], "stop"):
                        fault = f"with the stop {stop!r} the text is not what stands before it"
                        small = await self._smaller(ground, body, stop, place)
                        shown = Reproduction(
                            [{**answer.body, **small}], brief(answer), f"{whole[:place][-120:]!r} (stop)"
                        )
                        return refuted(self.name, tried, fault, shown)
        return held(self.name, tried)

    async def _smaller(self, ground: Ground, body: Body, stop: str, place: int) -> Body:
        """Fewest tokens that still reach the stop text."""
        tokens = 1
        while tokens < body["max_tokens"]:
            if len((await ground.server.ask({**body, "max_tokens": tokens})).text) >= place + len(stop):
                return {"max_tokens": tokens}
            tokens *= 2
        return {}


def _stops(text: str) -> list[tuple[str, int]]:
    """Pieces of the text and where they first occur: of three characters, and of one."""
    found: dict[int, str] = {}
    for k in range(1, STOPS + 1):
        begin = len(text) * k // (STOPS + 1)
        piece = text[begin : begin + (1 if k == 2 else 3)]
        if piece and piece.strip() and HALF not in piece:
            found[text.index(piece)] = piece
    return [(piece, place) for place, piece in found.items() if place > 0]
