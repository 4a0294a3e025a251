"""The official client, asking many things at once."""

import asyncio
from collections.abc import Sequence
from typing import Any

import httpx
import openai

from helpers.served_cases import Case, Outcome, Told


async def ask(client: openai.AsyncOpenAI, case: Case, stream: bool) -> Outcome:
    """One request, whole or in chunks put together again."""
    route: Any = client.chat.completions if case.chat else client.completions
    arguments = case.openai_arguments()
    outcome = Outcome([Told() for _ in range(case.params.get("n", 1))])
    if not stream:
        _take(outcome, await route.create(**arguments), case.chat)
        return outcome
    chunks = await route.create(**arguments, stream=True, stream_options={"include_usage": True})
    async for chunk in chunks:
        assert outcome.usage is None, "the number of tokens comes last"
        _take(outcome, chunk, case.chat)
    return outcome


def _take(outcome: Outcome, frame: Any, chat: bool) -> None:
    for choice in frame.choices:
        outcome.answers[choice.index].add(choice, chat)
    scored = frame if chat else frame.choices[0] if frame.choices else None
    found = None if scored is None else scored.model_extra.get("prompt_logprobs")
    outcome.prompt_logprobs = found if found is not None else outcome.prompt_logprobs
    if frame.usage is not None:
        usage = frame.usage
        outcome.usage = (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens)


def ask_all(url: str, cases: Sequence[Case], at_once: int) -> list[tuple[Outcome, Outcome]]:
    """Every case streamed and whole, so many requests at the same time; (streamed, whole) of each."""

    async def run() -> list[tuple[Outcome, Outcome]]:
        turns = asyncio.Semaphore(at_once)
        http = httpx.AsyncClient(timeout=300, verify=False, limits=httpx.Limits(max_connections=at_once))
        async with openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key="unused", max_retries=0, http_client=http
        ) as client:

            async def one(case: Case, stream: bool) -> Outcome:
                async with turns:
                    return await ask(client, case, stream)

            asked = [one(case, stream) for case in cases for stream in (True, False)]
            outcomes = await asyncio.gather(*asked)
        return list(zip(outcomes[::2], outcomes[1::2], strict=True))

    return asyncio.run(run())
