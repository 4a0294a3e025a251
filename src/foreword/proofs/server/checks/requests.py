"""Checks that a request gets the same text again in all circumstances, and that its parameters take effect."""

from math import exp

from foreword.proofs.server.client import HALF, Body, ReceivedChoice, ServerAnswer
from foreword.proofs.server.comparing import Call, brief, must_agree, send_together
from foreword.proofs.server.context import (
    LOGPROBS,
    PLAIN,
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

ALONE = ("seed alone",)


def seeded_bodies(context: ProofContext) -> list[Body]:
    """Return one request per prompt, each with its own seed."""
    return [context.sampled(text, seed) for seed, text in enumerate(context.plan.texts)]


def greedy_bodies(context: ProofContext) -> list[Body]:
    return [context.greedy(text) for text in context.plan.texts]


@check(
    *ALONE,
    "the same request with the same seed gets the same text, and so does a greedy one",
    lambda context: 4 * context.plan.prompts,
)
async def alone(context: ProofContext) -> ClaimVerdict:
    """Send every seeded and every greedy request twice."""
    bodies, ask = seeded_bodies(context) + greedy_bodies(context), context.server.ask
    return await must_agree(context, bodies, (ask, ask), ("the first", "the second"))


@check(
    "streamed equals whole",
    "the chunks of a stream add up to the text and finish reason of the whole answer",
    lambda context: 4 * context.plan.prompts,
    ALONE,
)
async def streamed(context: ProofContext) -> ClaimVerdict:
    """Send greedy and seeded requests both ways."""
    bodies, ways = (
        seeded_bodies(context) + greedy_bodies(context),
        (context.server.ask, context.server.stream),
    )
    return await must_agree(context, bodies, ways, ("whole", "streamed"))


@check(
    "greedy with and without speculation",
    "a greedy text is the same with speculation and without",
    lambda context: 2 * context.plan.prompts,
    ALONE,
    PLAIN,
)
async def greedy_speculation(context: ProofContext) -> ClaimVerdict:
    assert context.plain is not None
    ways = (context.plain.ask, context.server.ask)
    return await must_agree(context, greedy_bodies(context), ways, ("without", "with"))


@check(
    "seed in a batch",
    "a seeded request gets the same text alone and beside others",
    lambda context: context.plan.prompts * (1 + context.plan.at_once),
    ALONE,
)
async def in_a_batch(context: ProofContext) -> ClaimVerdict:
    """Send seeded requests alone, then concurrently with others of the same prompt."""
    for tried, body in enumerate(seeded_bodies(context), 1):
        single = await context.server.ask(body)
        beside = await _beside_others(context, body, context.plan.at_once)
        context.judged(body["prompt"], single, *beside)
        if any(answer.contents != single.contents for answer in beside):
            return await _refuted_in_a_batch(context, body, single, tried)
    return held(context.plan.prompts, f"{context.plan.at_once} at once")


async def _beside_others(context: ProofContext, body: Body, size: int) -> list[ServerAnswer]:
    """Send the body as first and last of `size` concurrent requests; return both answers."""
    answers = await send_together(context.server, _calls(body, size))
    return [answers[0], answers[-1]]


async def _refuted_in_a_batch(
    context: ProofContext, body: Body, single: ServerAnswer, tried: int
) -> ClaimVerdict:
    for size in range(2, context.plan.at_once + 1):
        differing = [a for a in await _beside_others(context, body, size) if a.contents != single.contents]
        if differing:
            break
    sent = [context.server.wire_body(call.body, streamed=call.streamed) for call in _calls(body, size)]
    got = f"one of {size} at once: {brief(differing[0])}" if differing else "another text, once"
    shown = Reproduction(sent, got, f"alone: {brief(single)}", at_once=True)
    return refuted(tried, f"another text beside {size - 1} others", shown)


def _calls(body: Body, size: int) -> list[Call]:
    """Return the body first and last, with other seeds in between, every second one streamed."""
    others = [Call({**body, "seed": body["seed"] + 1000 + k}, streamed=k % 2 == 1) for k in range(size - 2)]
    return [Call(body), *others, Call(body)]


@check(
    "seed after other traffic",
    "a seeded request gets the same text before and after other requests",
    lambda context: 4 * context.plan.prompts,
    ALONE,
)
async def after_traffic(context: ProofContext) -> ClaimVerdict:
    """Between two equal requests, send others with the same prefix, which change the server's caches."""

    async def after(body: Body) -> ServerAnswer:
        for more in (" and", " and then"):
            await context.server.ask({**body, "prompt": body["prompt"] + more, "seed": body["seed"] + 1})
        return await context.server.ask(body)

    return await must_agree(context, seeded_bodies(context), (context.server.ask, after), ("before", "after"))


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
MARGIN = 0.2  # nats by which the penalised token must be less likely than the other


@check(
    "penalties",
    "presence_penalty changes a greedy text where it must",
    lambda context: 2 * context.plan.prompts,
    ("seed alone", "logprobs"),
    LOGPROBS,
)
async def penalties(context: ProofContext) -> ClaimVerdict:
    """Repeat greedy requests with a penalty, where it must replace a repeated token by a close alternative."""
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
    """Return whether the bias had no effect, by token ids if listed, otherwise by the texts."""
    if answer.token_ids:
        return any(found != token for found in answer.token_ids)
    kinds = {entry.text for entry in answer.tokens}
    return len(kinds) > 1 if kinds else answer.text == plain.text and not _repeats(answer.text)


def _repeats(text: str) -> bool:
    return len(text) % BIASED_LENGTH == 0 and text == text[: len(text) // BIASED_LENGTH] * BIASED_LENGTH
