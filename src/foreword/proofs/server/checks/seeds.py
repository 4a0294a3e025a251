"""Checks that a request gets the same text again, streamed, in a batch, after traffic, and without speculation."""

from foreword.proofs.server.client import Body, ServerAnswer
from foreword.proofs.server.comparing import Call, brief, must_agree, send_together
from foreword.proofs.server.ground import PLAIN, ClaimVerdict, Ground, Reproduction, check, held, refuted

ALONE = ("seed alone",)


def seeded_bodies(ground: Ground) -> list[Body]:
    """Return one request per prompt, each with its own seed."""
    return [ground.sampled(text, seed) for seed, text in enumerate(ground.plan.texts)]


def greedy_bodies(ground: Ground) -> list[Body]:
    return [ground.greedy(text) for text in ground.plan.texts]


@check(
    *ALONE,
    "the same request with the same seed gets the same text, and so does a greedy one",
    lambda ground: 4 * ground.plan.prompts,
)
async def alone(ground: Ground) -> ClaimVerdict:
    """Send every seeded and every greedy request twice."""
    bodies, ask = seeded_bodies(ground) + greedy_bodies(ground), ground.server.ask
    return await must_agree(ground, bodies, (ask, ask), ("the first", "the second"))


@check(
    "streamed equals whole",
    "the chunks of a stream add up to the text and finish reason of the whole answer",
    lambda ground: 4 * ground.plan.prompts,
    ALONE,
)
async def streamed(ground: Ground) -> ClaimVerdict:
    """Send greedy and seeded requests both ways."""
    bodies, ways = seeded_bodies(ground) + greedy_bodies(ground), (ground.server.ask, ground.server.stream)
    return await must_agree(ground, bodies, ways, ("whole", "streamed"))


@check(
    "greedy with and without speculation",
    "a greedy text is the same with speculation and without",
    lambda ground: 2 * ground.plan.prompts,
    ALONE,
    PLAIN,
)
async def greedy_speculation(ground: Ground) -> ClaimVerdict:
    assert ground.plain is not None
    ways = (ground.plain.ask, ground.server.ask)
    return await must_agree(ground, greedy_bodies(ground), ways, ("without", "with"))


@check(
    "seed in a batch",
    "a seeded request gets the same text alone and beside others",
    lambda ground: ground.plan.prompts * (1 + ground.plan.at_once),
    ALONE,
)
async def in_a_batch(ground: Ground) -> ClaimVerdict:
    """Send seeded requests one by one, then concurrently with others of the same prompt."""
    for tried, body in enumerate(seeded_bodies(ground), 1):
        single = await ground.server.ask(body)
        beside = await _beside_others(ground, body, ground.plan.at_once)
        ground.judged(body["prompt"], single, *beside)
        if any(answer.contents != single.contents for answer in beside):
            return await _refuted_in_a_batch(ground, body, single, tried)
    return held(ground.plan.prompts, f"{ground.plan.at_once} at once")


async def _beside_others(ground: Ground, body: Body, size: int) -> list[ServerAnswer]:
    """Return the body's answers as first and last of `size` concurrent requests."""
    answers = await send_together(ground.server, _calls(body, size))
    return [answers[0], answers[-1]]


async def _refuted_in_a_batch(ground: Ground, body: Body, single: ServerAnswer, tried: int) -> ClaimVerdict:
    for size in range(2, ground.plan.at_once + 1):
        differing = [a for a in await _beside_others(ground, body, size) if a.contents != single.contents]
        if differing:
            break
    sent = [ground.server.wire_body(call.body, streamed=call.streamed) for call in _calls(body, size)]
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
    lambda ground: 4 * ground.plan.prompts,
    ALONE,
)
async def after_traffic(ground: Ground) -> ClaimVerdict:
    """Between two equal requests, send others with the same prefix, which fill caches."""

    async def after(body: Body) -> ServerAnswer:
        for more in (" and", " and then"):
            await ground.server.ask({**body, "prompt": body["prompt"] + more, "seed": body["seed"] + 1})
        return await ground.server.ask(body)

    return await must_agree(ground, seeded_bodies(ground), (ground.server.ask, after), ("before", "after"))
