"""Checks that a request gets the same text again in all circumstances, and that its parameters take effect."""

from collections.abc import AsyncIterator
from math import exp, inf
from operator import attrgetter

from foreword.proofs.server.client import HALF, Body, ReceivedChoice, ServerAnswer
from foreword.proofs.server.comparing import Ask, Call, Fault, Way, brief, send_together
from foreword.proofs.server.context import (
    ClaimStatus,
    ClaimVerdict,
    NotTried,
    ProofContext,
    Reproduction,
    refuted,
)
from foreword.proofs.server.evidence import COPIES


def seeded_bodies(context: ProofContext) -> list[Body]:
    """Return one request per prompt, each with its own seed."""
    return [context.sampled(text, seed) for seed, text in enumerate(context.plan.texts)]


def greedy_bodies(context: ProofContext) -> list[Body]:
    return [context.greedy(text) for text in context.plan.texts]


def all_bodies(context: ProofContext) -> list[Body]:
    return seeded_bodies(context) + greedy_bodies(context)


complete: Way = attrgetter("server.ask")
streamed: Way = attrgetter("server.stream")
without_speculation: Way = attrgetter("plain.ask")


def after_traffic(context: ProofContext) -> Ask:
    """Return a function that sends a request after others with the same prefix, which change the server's caches."""

    async def ask_after_others(body: Body) -> ServerAnswer:
        for suffix in (" and", " and then"):
            await context.server.ask({**body, "prompt": body["prompt"] + suffix, "seed": body["seed"] + 1})
        return await context.server.ask(body)

    return ask_after_others


async def in_a_batch(context: ProofContext) -> AsyncIterator[Fault | None]:
    """Send seeded requests alone, then concurrently with others of the same prompt."""
    for body in seeded_bodies(context):
        single = await context.server.ask(body)
        beside = await _beside_others(context, body, context.plan.at_once)
        context.judged(body["prompt"], single, *beside)
        differs = any(answer.contents != single.contents for answer in beside)
        yield await _fault_in_a_batch(context, body, single) if differs else None


async def _beside_others(context: ProofContext, body: Body, size: int) -> list[ServerAnswer]:
    """Send the body as first and last of `size` concurrent requests; return both answers."""
    answers = await send_together(context.server, _calls(body, size))
    return [answers[0], answers[-1]]


async def _fault_in_a_batch(context: ProofContext, body: Body, single: ServerAnswer) -> Fault:
    """Return the fault with the fewest concurrent requests that show it again; `single` is the answer alone."""
    for size in range(2, context.plan.at_once + 1):
        differing = [a for a in await _beside_others(context, body, size) if a.contents != single.contents]
        if differing:
            break
    sent = [context.server.wire_body(call.body, streamed=call.streamed) for call in _calls(body, size)]
    got = f"one of {size} at once: {brief(differing[0])}" if differing else "another text, once"
    shown = Reproduction(sent, got, f"alone: {brief(single)}", at_once=True)
    return f"another text beside {size - 1} others", shown


def _calls(body: Body, size: int) -> list[Call]:
    """Return the body first and last, with other seeds in between, every second one streamed."""
    others = [Call({**body, "seed": body["seed"] + 1000 + k}, streamed=k % 2 == 1) for k in range(size - 2)]
    return [Call(body), *others, Call(body)]


N = 4


async def several(context: ProofContext) -> ClaimVerdict:
    """Count the answers and check that they are sampled independently."""
    alarm = COPIES / (context.plan.prompts * (N - 1))
    judged = 0
    for seed, text in enumerate(context.plan.texts):
        answer = await context.server.ask(context.with_logprobs(context.sampled(text, seed, n=N)))
        context.judged(text, answer)
        indices = sorted(answer.choices)
        if indices != list(range(N)):
            shown = Reproduction([answer.body], f"choices {indices}", f"choices 0 to {N - 1}")
            return refuted(seed + 1, f"{len(indices)} answers of {N}", shown)
        chance = _text_chance(answer)
        judged += chance < alarm
        copies = [k for k in range(1, N) if answer.choices[k].text == answer.text]
        if copies and chance < alarm:
            fault = f"choice {copies[0]} is a copy of choice 0, which had a chance of {chance:.1g}"
            shown = Reproduction([answer.body], brief(answer), "texts drawn each by itself")
            return refuted(seed + 1, fault, shown)
    if not context.abilities.logprobs:
        raise NotTried("the number is right; whether they are copies needs log probabilities")
    visible = f"copies in one of {judged} requests"
    return ClaimVerdict(ClaimStatus.NOT_REFUTED, context.plan.prompts, visible=visible)


def _text_chance(answer: ServerAnswer) -> float:
    """Return the first choice's probability by the server's log-probabilities; 1 if unknown."""
    tokens = answer.first.tokens
    return exp(sum(token.logprob for token in tokens)) if tokens else 1.0


PENALTY = 2.0
MARGIN = 0.2  # nats by which the penalised token must be less likely than the other


async def penalties(context: ProofContext) -> AsyncIterator[Fault | None]:
    """Repeat greedy requests with a penalty, where it must replace a repeated token by a close alternative."""
    for text in context.plan.texts:
        body = context.greedy(text)
        plain = await context.server.ask(body)
        index = _turning(plain, text)
        context.judged(text, plain)
        if index is None:
            continue
        answer = await context.server.ask({**body, "max_tokens": index + 1, "presence_penalty": PENALTY})
        before = [token.text for token in plain.first.tokens[: index + 1]]
        if [token.text for token in answer.first.tokens] == before:
            fault = f"token {index} repeats {before[-1]!r} though another is within {PENALTY} nats"
            yield fault, Reproduction([answer.body], brief(answer), "another text")
        yield None


def _turning(plain: ServerAnswer, prompt: str) -> int | None:
    """Return the index of the first token that a penalty must replace; None if there is none.

    The alternative must be new to the answer and to the prompt, which some servers penalise too.
    """
    written: set[str] = set()
    for index, token in enumerate(plain.first.tokens):
        alternatives = [
            logprob
            for text, logprob in token.top
            if text not in written and text.strip() and text.strip() not in prompt
        ]
        repeats = token.text in written and HALF not in token.text
        if repeats and max(alternatives, default=-inf) > token.logprob - PENALTY + MARGIN:
            return index
        written.add(token.text)
    return None


BIASED_TOKENS = (40, 45, 50)  # ids of ordinary tokens in most vocabularies
BIASED_LENGTH = 4


async def bias(context: ProofContext) -> AsyncIterator[Fault | None]:
    """Repeat a greedy request with a large bias on one token, which must then be the whole answer."""
    body = context.greedy(context.plan.texts[0], max_tokens=BIASED_LENGTH)
    if context.abilities.token_ids:
        body["return_token_ids"] = True
    plain = await context.server.ask(body)
    context.judged(body["prompt"], plain)
    for token in BIASED_TOKENS:
        answer = await context.server.ask({**body, "logit_bias": {str(token): 100}})
        if _is_ignored(answer.first, plain.first, token):
            shown = Reproduction([answer.body], brief(answer), f"token {token} again and again")
            yield f"token {token} was not decided for", shown
        yield None


def _is_ignored(answer: ReceivedChoice, plain: ReceivedChoice, token: int) -> bool:
    """Return whether the bias had no effect, by token ids if listed, otherwise by the texts."""
    if answer.token_ids:
        return any(token_id != token for token_id in answer.token_ids)
    if answer.tokens:
        return len({token.text for token in answer.tokens}) > 1
    return answer.text == plain.text and not _repeats(answer.text)


def _repeats(text: str) -> bool:
    return len(text) % BIASED_LENGTH == 0 and text == text[: len(text) // BIASED_LENGTH] * BIASED_LENGTH
