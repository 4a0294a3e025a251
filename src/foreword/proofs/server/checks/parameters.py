"""Checks that `n`, penalties and `logit_bias` take effect."""

from math import exp

from foreword.proofs.server.client import HALF, ReceivedChoice, ServerAnswer
from foreword.proofs.server.comparing import brief
from foreword.proofs.server.context import (
    LOGPROBS,
    ClaimStatus,
    ClaimVerdict,
    ProofContext,
    Reproduction,
    check,
    held,
    not_tried,
    refuted,
)
from foreword.proofs.server.evidence import COPIES

N = 4


@check(
    "n",
    f"a request with n = {N} gets {N} answers that are drawn each by itself",
    lambda context: context.plan.prompts,
    ("logprobs",),
)
async def several(context: ProofContext) -> ClaimVerdict:
    """Count the answers and check that they are sampled independently."""
    alarm = COPIES / (context.plan.prompts * (N - 1))
    judged = 0
    for seed, text in enumerate(context.plan.texts):
        answer = await context.server.ask(context.with_logprobs(context.sampled(text, seed, n=N)))
        context.judged(text, answer)
        found = sorted(answer.choices)
        if found != list(range(N)):
            shown = Reproduction([answer.body], f"choices {found}", f"choices 0 to {N - 1}")
            return refuted(seed + 1, f"{len(found)} answers of {N}", shown)
        chance = _text_chance(answer)
        judged += chance < alarm
        copies = [k for k in range(1, N) if answer.choices[k].text == answer.text]
        if copies and chance < alarm:
            fault = f"choice {copies[0]} is a copy of choice 0, which had a chance of {chance:.1g}"
            shown = Reproduction([answer.body], brief(answer), "texts drawn each by itself")
            return refuted(seed + 1, fault, shown)
    if not context.abilities.logprobs:
        return not_tried("the number is right; whether they are copies needs log probabilities")
    visible = f"copies in one of {judged} requests"
    return ClaimVerdict(ClaimStatus.NOT_REFUTED, context.plan.prompts, visible=visible)


def _text_chance(answer: ServerAnswer) -> float:
    """Return the first choice's probability by the server's log-probabilities; 1 if unknown."""
    tokens = answer.first.tokens
    return exp(sum(token.logprob for token in tokens)) if tokens else 1.0


PENALTY = 2.0
MARGIN = 0.2  # minimum lead of the other token in nats


@check(
    "penalties",
    "presence_penalty changes a greedy text where it must",
    lambda context: 2 * context.plan.prompts,
    ("seed alone", "logprobs"),
    LOGPROBS,
)
async def penalties(context: ProofContext) -> ClaimVerdict:
    """Penalise a greedy text at a repeated token with a close alternative: it must change."""
    tried = 0
    for text in context.plan.texts:
        body = context.greedy(text)
        plain = await context.server.ask(body)
        place = _turning(plain, text)
        context.judged(text, plain)
        if place is None:
            continue
        tried += 1
        answer = await context.server.ask({**body, "max_tokens": place + 1, "presence_penalty": PENALTY})
        before = [token.text for token in plain.first.tokens[: place + 1]]
        if [token.text for token in answer.first.tokens] == before:
            fault = f"token {place} repeats {before[-1]!r} though another is within {PENALTY} nats"
            return refuted(tried, fault, Reproduction([answer.body], brief(answer), "another text"))
    return held(tried, "" if tried else "no answer repeats a token that another is nearly as likely as")


def _turning(plain: ServerAnswer, prompt: str) -> int | None:
    """Return the first token that a penalty must replace.

    The alternative must be new to the answer and to the prompt, which some servers penalise too.
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
"""Ids of ordinary tokens in most vocabularies."""
BIASED_LENGTH = 4


@check(
    "logit_bias",
    "logit_bias of +100 makes an answer of that token alone",
    lambda context: 1 + len(BIASED_TOKENS),
    ("seed alone",),
)
async def bias(context: ProofContext) -> ClaimVerdict:
    body = context.greedy(context.plan.texts[0], max_tokens=BIASED_LENGTH)
    if context.abilities.token_ids:
        body["return_token_ids"] = True
    plain = await context.server.ask(body)
    context.judged(body["prompt"], plain)
    for tried, token in enumerate(BIASED_TOKENS, 1):
        answer = await context.server.ask({**body, "logit_bias": {str(token): 100}})
        if _is_ignored(answer.first, plain.first, token):
            shown = Reproduction([answer.body], brief(answer), f"token {token} again and again")
            return refuted(tried, f"token {token} was not decided for", shown)
    return held(len(BIASED_TOKENS))


def _is_ignored(answer: ReceivedChoice, plain: ReceivedChoice, token: int) -> bool:
    """Decide by token ids if listed, otherwise by text: several distinct ones, or an unchanged answer."""
    if answer.token_ids:
        return any(found != token for found in answer.token_ids)
    kinds = {entry.text for entry in answer.tokens}
    return len(kinds) > 1 if kinds else answer.text == plain.text and not _repeats(answer.text)


def _repeats(text: str) -> bool:
    return len(text) % BIASED_LENGTH == 0 and text == text[: len(text) // BIASED_LENGTH] * BIASED_LENGTH
