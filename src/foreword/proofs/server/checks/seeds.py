"""Checks that a request gets the same text again, streamed, in a batch, after traffic, and without speculation."""

from foreword.proofs.server.client import Body, ServerAnswer
from foreword.proofs.server.comparing import Call, brief, must_agree, send_together
from foreword.proofs.server.context import (
    PLAIN,
    ClaimVerdict,
    ProofContext,
    Reproduction,
    check,
    held,
    refuted,
)

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
    """Send seeded requests one by one, then concurrently with others of the same prompt."""
    for tried, body in enumerate(seeded_bodies(context), 1):
        single = await context.server.ask(body)
        beside = await _beside_others(context, body, context.plan.at_once)
        context.judged(body["prompt"], single, *beside)
        if any(answer.contents != single.contents for answer in beside):
            return await _refuted_in_a_batch(context, body, single, tried)
    return held(context.plan.prompts, f"{context.plan.at_once} at once")


async def _beside_others(context: ProofContext, body: Body, size: int) -> list[ServerAnswer]:
    """Return the body's answers as first and last of `size` concurrent requests."""
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
    """Between two equal requests, send others with the same prefix, which fill caches."""

    async def after(body: Body) -> ServerAnswer:
        for more in (" and", " and then"):
            await context.server.ask({**body, "prompt": body["prompt"] + more, "seed": body["seed"] + 1})
        return await context.server.ask(body)

    return await must_agree(context, seeded_bodies(context), (context.server.ask, after), ("before", "after"))
