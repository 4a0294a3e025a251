"""The number of tokens that is billed is the number that came."""

from typing import ClassVar

from foreword.proofs.server.answer import Answer
from foreword.proofs.server.client import Body
from foreword.proofs.server.comparing import brief
from foreword.proofs.server.ground import Ground
from foreword.proofs.server.shrink import smallest
from foreword.proofs.server.verdict import Reproduction, Verdict, held, not_tried, refuted


class UsageCounts:
    """Whole and streamed answers, cut at several lengths."""

    name: ClassVar[str] = "usage"
    claim: ClassVar[str] = "usage counts the tokens that were written, and its total is the sum"
    rests_on: ClassVar[tuple[str, ...]] = ()

    def cost(self, ground: Ground) -> int:
        return 4 * ground.plan.prompts

    async def examine(self, ground: Ground) -> Verdict:
        tried = 0
        for seed, text in enumerate(ground.plan.texts):
            for tokens in (1, ground.plan.tokens - 3):
                body = ground.with_logprobs(ground.sampled(text, seed, max_tokens=tokens))
                whole, streamed = await ground.server.ask(body), await ground.server.stream(body)
                ground.judged(text, whole, streamed)
                if whole.usage is None:
                    return not_tried(self.name, "the server tells no usage")
                tried += 2
                if fault := _fault(whole) or _fault(streamed):
                    return await self._refuted(ground, body, fault, tried)
                if streamed.usage is not None and whole.usage.prompt != streamed.usage.prompt:
                    fault = f"a prompt of {whole.usage.prompt} tokens has {streamed.usage.prompt} in a stream"
                    return await self._refuted(ground, body, fault, tried)
        return held(self.name, tried)

    async def _refuted(self, ground: Ground, body: Body, fault: str, tried: int) -> Verdict:
        async def shows(smaller: Body) -> bool:
            return bool(_fault(await ground.server.ask(smaller)))

        answer = await ground.server.ask(await smallest(body, shows))
        shown = Reproduction([answer.body], f"{answer.usage} of {brief(answer)}", _fault(answer) or fault)
        return refuted(self.name, tried, fault, shown)


def _fault(answer: Answer) -> str:
    """What is wrong with an answer's usage; empty if nothing is."""
    usage = answer.usage
    if usage is None:  # streams need not have it
        return ""
    if usage.total != usage.prompt + usage.completion:
        return f"{usage.prompt} and {usage.completion} tokens are not {usage.total}"
    most = answer.body["max_tokens"] * len(answer.choices)
    listed = sum(len(choice.tokens) for choice in answer.choices.values())
    if listed and listed != usage.completion:
        return f"{listed} tokens came, {usage.completion} are counted"
    is_cut = all(choice.finish_reason == "length" for choice in answer.choices.values())
    if usage.completion > most or (is_cut and usage.completion != most):
        return f"{usage.completion} tokens are counted of answers cut at {most}"
    return ""
