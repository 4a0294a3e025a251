"""A server on a real port with the fake engine in the same process, for tests that look at both sides."""

import asyncio
import socket
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai

from foreword.engine.messages import AnswerDelta, EngineStats, NewRequest
from foreword.errors import CheckpointError, RequestError
from foreword.models.formats.checkpoint import open_checkpoint
from foreword.server.app import create_app, create_context
from foreword.server.connections import WebServer
from foreword.server.context import ServerContext
from foreword.server.settings import ServerSettings
from foreword.wire.link import OnLate
from foreword.wire.supervisor import EngineState
from helpers.fake_engine import FakeEngine


class LocalEngine:
    """A `Supervisor` without a process."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine
        self.state = EngineState.READY
        self.restarts = 0

    @property
    def max_model_len(self) -> int:
        return self.engine.max_model_len

    async def submit(
        self, request: NewRequest, on_late: OnLate | None = None
    ) -> AsyncGenerator[AnswerDelta, None]:
        deltas = self.engine.submit(request)
        try:
            async for delta in deltas:
                yield delta
        finally:
            await deltas.aclose()
            while deltas.has_more:  # the fake engine ends what is aborted at once
                late = deltas._arrived.get_nowait()
                if on_late is not None and (isinstance(late, Exception) or late.finish_reason is not None):
                    on_late(late)

    @property
    def speculating(self) -> bool:
        return self.engine.drafting

    def speculate(self, on: bool) -> None:
        self.engine.speculate(on)

    def move_pair(self, drafter: str, cohort: str, state: str) -> None:
        self.engine.move_pair(drafter, cohort, state)

    def learn(self, action: str, tenant: str = "") -> None:
        self.engine.learn(action, tenant)

    async def set_adapter(self, name: str, path: str | None) -> None:
        try:
            self.engine.adapters.unload(name) if path is None else self.engine.adapters.load(name, path)
        except CheckpointError as error:
            raise RequestError(str(error)) from None

    async def stats(self) -> EngineStats:
        return self.engine.stats()


@dataclass
class LocalServer:
    url: str
    engine: FakeEngine
    client: LocalEngine
    context: ServerContext
    call: Callable[[Callable[[], Any]], Any]  # runs a function on the server's event loop
    loop: asyncio.AbstractEventLoop

    def http(self, **headers: str) -> httpx.Client:
        return httpx.Client(base_url=self.url, headers=headers, timeout=60, verify=False)  # quicker to make

    def openai(self, key: str = "unused") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, http_client=self.http())


@contextmanager
def local_server(model: Path, settings: ServerSettings, engine: FakeEngine) -> Iterator[LocalServer]:
    """Serve until the block ends."""
    listening = socket.create_server(("127.0.0.1", 0))
    client = LocalEngine(engine)
    context = create_context(settings, client, open_checkpoint(model).tokenizer())
    web = WebServer(create_app(context), context.settings.limits)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_until_complete, args=(web.serve([listening]),), daemon=True)
    thread.start()

    def call(function: Callable[[], Any]) -> Any:
        async def run() -> Any:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), loop).result(30)

    try:
        yield LocalServer(
            f"http://127.0.0.1:{listening.getsockname()[1]}", engine, client, context, call, loop
        )
    finally:
        web.should_exit = True
        thread.join(30)
        context.prompts.close()
        loop.close()
