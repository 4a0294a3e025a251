"""Many sampled answers."""

from collections.abc import AsyncIterator

from foreword.proofs.server.answer import Answer, Choice
from foreword.proofs.server.client import Server
from foreword.proofs.server.concurrency import Call, send_together
from foreword.proofs.server.ground import Ground

SEEDS_APART = 1_000_003
"""Between the seeds of draws and those of other checks."""

MOST_ANSWERS = 64
"""Answers under way together: servers refuse what they have no room for (ours begins at 128)."""


def requests_for(ground: Ground) -> int:
    """Requests that all draws take."""
    return -(-ground.plan.draws // ground.abilities.n)


async def draw(
    ground: Ground, server: Server, depth: int, stream_of_seeds: int, *, logprobs: bool
) -> AsyncIterator[tuple[str, Answer, Choice]]:
    """(prompt, answer, choice) of all draws, prompts by turns, some requests at a time."""
    texts, n = ground.plan.texts, ground.abilities.n
    whole = requests_for(ground)
    at_once = max(1, min(ground.plan.at_once, MOST_ANSWERS // n))
    for begin in range(0, whole, at_once):
        bodies = []
        for k in range(begin, min(begin + at_once, whole)):
            seed = SEEDS_APART * stream_of_seeds + k
            several = {"n": n} if n > 1 else {}
            body = ground.sampled(texts[k % len(texts)], seed, max_tokens=depth, **several)
            bodies.append(ground.with_logprobs(body) if logprobs else body)
        answers = await send_together(server, [Call(body) for body in bodies])
        for body, answer in zip(bodies, answers, strict=True):
            ground.judged(body["prompt"], answer)
            for choice in answer.choices.values():
                yield body["prompt"], answer, choice
