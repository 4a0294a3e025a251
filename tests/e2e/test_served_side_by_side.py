"""A request that asks for a lot of work does not stop the others' streams."""

import asyncio
import json
from collections.abc import AsyncIterator
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest

from foreword.engine.config import EngineConfig
from helpers.serve_process import serve
from helpers.tiny_models import make_hf_model

CONTEXT = 16384
STREAMS = 4
PASSES = CONTEXT // EngineConfig().max_num_batched_tokens
"""At least so many passes it takes to read a prompt as long as the context."""


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_hf_model(tmp_path_factory.mktemp("long"), max_position_embeddings=CONTEXT)


async def events(http: httpx.AsyncClient, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    async with http.stream("POST", "/generate", json=body | {"stream": True}) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                yield json.loads(line[6:])


class Others:
    """Streams that go on for ever; counts what each of them gets."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http
        self.tokens = [0] * STREAMS
        self._tasks = [asyncio.create_task(self._read(number)) for number in range(STREAMS)]

    async def _read(self, number: int) -> None:
        for turn in count():
            body = {"prompt": f"stream {number} {turn}", "max_tokens": 2000, "ignore_eos": True}
            async for event in events(self._http, body):
                self.tokens[number] += len(event.get("token_ids", ()))

    async def all_run(self) -> None:
        before = list(self.tokens)
        while any(now < then + 5 for now, then in zip(self.tokens, before, strict=True)):
            assert not any(task.done() for task in self._tasks)
            await asyncio.sleep(0.01)

    async def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def long_requests(http: httpx.AsyncClient, others: Others) -> list[int]:
    """Ask for too much, then for as much as there can be; how much the others got while that was read."""
    too_long = await http.post("/v1/completions", json={"prompt": "x" * 10_000_000})
    assert too_long.status_code == 413
    many_tokens = await http.post("/v1/completions", json={"prompt": "the sky " * 40_000})
    assert many_tokens.status_code == 400
    await others.all_run()
    before = list(others.tokens)
    body = {"prompt": [5 + i % 300 for i in range(CONTEXT - 4)], "max_tokens": 2}
    stream = events(http, body)
    await anext(stream)
    for _ in range(50):  # what has come for the others as well is read
        await asyncio.sleep(0)
    gained = [now - then for now, then in zip(others.tokens, before, strict=True)]
    *_, end = [event async for event in stream]
    assert end["timings"]["passes"] >= PASSES
    return gained


def test_others_get_a_token_with_every_chunk_of_a_prompt_as_long_as_the_context(long_model):
    async def run(url: str) -> list[int]:
        async with httpx.AsyncClient(base_url=url, timeout=300, verify=False) as http:
            others = Others(http)
            await others.all_run()
            try:
                return await long_requests(http, others)
            finally:
                await others.end()

    with serve(long_model, factory=None) as server:
        gained = asyncio.run(run(server.url))
    # What the last passes gave may still be on its way to us.
    assert all(tokens >= PASSES - 8 for tokens in gained), gained
