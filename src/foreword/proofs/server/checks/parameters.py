"""Sampling parameters have their effect: `n`, penalties and `logit_bias`."""

from math import exp
from typing import ClassVar

from foreword.proofs.server.client import HALF, Choice, ServerAnswer
from foreword.proofs.server.comparing import brief
from foreword.proofs.server.evidence import COPIES
from foreword.proofs.server.ground import (
    ClaimStatus,
    ClaimVerdict,
    Ground,
    Reproduction,
    held,
    not_tried,
    refuted,
)

N = 4


class Several:
    """As many as were asked for, each drawn by itself: equal ones must be likely enough to be equal."""

    name: ClassVar[str] = "n"
    claim: ClassVar[str] = f"a request with n = {N} gets {N} answers that are drawn each by itself"
    rests_on: ClassVar[tuple[str, ...]] = ("logprobs",)

    def cost(self, ground: Ground) -> int:
        return ground.plan.prompts

    async def examine(self, ground: Ground) -> ClaimVerdict:
        alarm = COPIES / (ground.plan.prompts * (N - 1))
        judged = 0
        for tried, (seed, text) in enumerate(enumerate(ground.plan.texts), 1):
            answer = await ground.server.ask(ground.with_logprobs(ground.sampled(text, seed, n=N)))
            ground.judged(text, answer)
            if sorted(answer.choices) != list(range(N)):
                shown = Reproduction(
                    [answer.body], f"choices {sorted(answer.choices)}", f"choices 0 to {N - 1}"
                )
                return refuted(self.name, tried, f"{len(answer.choices)} answers of {N}", shown)
            judged += _text_chance(answer) < alarm
            copies = [k for k in range(1, N) if answer.choices[k].text == answer.text]
            if copies and _text_chance(answer) < alarm:
                fault = f"choice {copies[0]} is a copy of choice 0, which had a chance of {_text_chance(answer):.1g}"
                shown = Reproduction([answer.body], brief(answer), "texts drawn each by itself")
                return refuted(self.name, tried, fault, shown)
        if not ground.abilities.logprobs:
            return not_tried(
                self.name, "the number is right; whether they are copies needs log probabilities"
            )
        return ClaimVerdict(
            self.name,
            ClaimStatus.NOT_REFUTED,
            ground.plan.prompts,
            visible=f"copies in one of {judged} requests",
        )


def _text_chance(answer: ServerAnswer) -> float:
    """Of the first choice, by the server's own log probabilities; 1 if it tells none."""
    tokens = answer.first.tokens
    return exp(sum(token.logprob for token in tokens)) if tokens else 1.0


PENALTY = 2.0
MARGIN = 0.2  # nats that the other token must be ahead by


class Penalties:
    """Where a greedy text repeats a token that another is nearly as likely as, a penalty must change it."""

    name: ClassVar[str] = "penalties"
    claim: ClassVar[str] = "presence_penalty changes a greedy text where it must"
    rests_on: ClassVar[tuple[str, ...]] = ("seed alone", "logprobs")

    def cost(self, ground: Ground) -> int:
        return 2 * ground.plan.prompts if ground.abilities.logprobs else 0

    async def examine(self, ground: Ground) -> ClaimVerdict:
        if not ground.abilities.logprobs:
            return not_tried(self.name, "the server lists no log probabilities")
        tried = 0
        for text in ground.plan.texts:
            body = ground.greedy(text)
            plain = await ground.server.ask(body)
            place = _turning(plain, text)
            ground.judged(text, plain)
            if place is None:
                continue
            tried += 1
            answer = await ground.server.ask({**body, "max_tokens": place + 1, "presence_penalty": PENALTY})
            before = [token.text for token in plain.first.tokens[: place + 1]]
            if [token.text for token in answer.first.tokens] == before:
                fault = f"token {place} repeats {before[-1]!r} though another is within {PENALTY} nats"
                return refuted(
                    self.name, tried, fault, Reproduction([answer.body], brief(answer), "another text")
                )
        return held(
            self.name, tried, "" if tried else "no answer repeats a token that another is nearly as likely as"
        )


def _turning(plain: ServerAnswer, prompt: str) -> int | None:
    """The first token that a penalty on what was written must replace.

    The other must be new to the answer and to the prompt, which some servers penalise too.
    """
    written: set[str] = set()
    for place, token in enumerate(plain.first.tokens):
        new = [
            p for text, p in token.top if text not in written and text.strip() and text.strip() not in prompt
        ]
        repeats = token.text in written and HALF not in token.text
        if repeats and new and max(new) > token.logprob - PENALTY + MARGIN:
            return place
        written.add(token.text)
    return None


BIASED_TOKENS = (40, 45, 50)
"""Ids that are ordinary tokens of most vocabularies."""
BIASED_LENGTH = 4


class Bias:
    """With +100 on one token, a greedy answer has no other."""

    name: ClassVar[str] = "logit_bias"
    claim: ClassVar[str] = "logit_bias of +100 makes an answer of that token alone"
    rests_on: ClassVar[tuple[str, ...]] = ("seed alone",)

    def cost(self, ground: Ground) -> int:
        return 1 + len(BIASED_TOKENS)

    async def examine(self, ground: Ground) -> ClaimVerdict:
        body = ground.greedy(ground.plan.texts[0], max_tokens=BIASED_LENGTH)
        if ground.abilities.token_ids:
            body["return_token_ids"] = True
        plain = await ground.server.ask(body)
        ground.judged(body["prompt"], plain)
        for tried, token in enumerate(BIASED_TOKENS, 1):
            answer = await ground.server.ask({**body, "logit_bias": {str(token): 100}})
            if _is_ignored(answer.first, plain.first, token):
                shown = Reproduction([answer.body], brief(answer), f"token {token} again and again")
                return refuted(self.name, tried, f"token {token} was not decided for", shown)
        return held(self.name, len(BIASED_TOKENS))


def _is_ignored(answer: Choice, plain: Choice, token: int) -> bool:
    """Decide by the ids if they are listed, else by texts: more than one, or an unchanged answer of more than one."""
    if answer.token_ids:
        return any(found != token for found in answer.token_ids)
    kinds = {entry.text for entry in answer.tokens}
    return len(kinds) > 1 if kinds else answer.text == plain.text and not _repeats(answer.text)


def _repeats(text: str) -> bool:
    return len(text) % BIASED_LENGTH == 0 and text == text[: len(text) // BIASED_LENGTH] * BIASED_LENGTH
