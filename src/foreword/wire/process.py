"""The engine process: loads the model, then serves the channel until it closes.

Run as `python -m foreword.wire.process FD MODULE:FUNCTION`, with a connected socket as FD.
"""

import asyncio
import gc
import importlib
import logging
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from foreword.cluster.framing import ChannelError
from foreword.engine.collection import spare_steps
from foreword.engine.messages import AnswerDelta, NewRequest
from foreword.errors import EngineStopped, ForewordError, RequestError
from foreword.progress import StageProgress
from foreword.wire import frames as wire
from foreword.wire.frames import Channel

if TYPE_CHECKING:
    from foreword.engine.engine import Engine  # other factories do not need it

log = logging.getLogger("foreword.wire.process")

EngineFactory = Callable[[wire.Start, StageProgress], "Engine"]
"""Creates the engine described by a `Start` message, and reports progress."""


def find_factory(name: str) -> EngineFactory:
    """Import the factory named `MODULE:FUNCTION`."""
    module, _, function = name.partition(":")
    factory: EngineFactory = getattr(importlib.import_module(module), function)
    return factory


class EngineHost:
    """Applies the messages of a channel to an engine, and sends the engine's answers."""

    def __init__(self, channel: Channel, engine: "Engine") -> None:
        self._channel = channel
        self._engine = engine
        self._draining: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()  # running tasks, each of which loads an adapter
        self._unsent: list[AnswerDelta] = []  # deltas to send in one message
        self._ended = asyncio.Event()  # set when the process has to exit
        self.exit_code = 0

    async def serve(self, incoming: AsyncIterator[bytes]) -> None:
        """Process messages until the channel closes, a drain ends, or the engine dies."""
        loop = asyncio.get_running_loop()

        def on_death(error: Exception) -> None:
            with suppress(RuntimeError):  # the loop is closed: the process is ending
                loop.call_soon_threadsafe(self._end_with_error, error)

        self._engine.when_dead(on_death)
        self._channel.send(wire.Ready(self._engine.max_model_len))
        listening = asyncio.ensure_future(self._listen(incoming))
        ended = asyncio.ensure_future(self._ended.wait())
        await asyncio.wait((listening, ended), return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        self._ended.set()  # from now on, `_end_with_error` has no effect
        if listening.done():
            listening.result()
        listening.cancel()

    async def _listen(self, incoming: AsyncIterator[bytes]) -> None:
        async for frame in incoming:
            self._handle(wire.decode_to_engine(frame))

    def _handle(self, message: wire.ToEngine) -> None:
        match message:
            case wire.Submit(request):
                self._submit(request)
            case wire.Abort(request_id):
                self._engine.abort(request_id)
            case wire.Speculate(on):
                self._engine.speculate(on)
            case wire.MovePair(drafter, cohort, state):
                self._engine.move_pair(drafter, cohort, state)
            case wire.LearnAction(action, tenant):
                self._engine.learn(action, tenant)
            case wire.SetAdapter(number, name, path):
                self._tasks.add(task := asyncio.create_task(self._set_adapter(number, name, path)))
                task.add_done_callback(self._tasks.discard)
            case wire.StatsWanted(number):
                self._channel.send(wire.Stats(number, self._engine.stats()))
            case wire.Drain(deadline):
                self._draining = asyncio.create_task(self._drain(deadline))
            case wire.Start():
                raise ChannelError("a second Start came over the channel")

    async def _set_adapter(self, number: int, name: str, path: str | None) -> None:
        """Load or unload an adapter in a thread, so that answers continue."""
        adapters = self._engine.adapters
        try:
            if path is None:
                adapters.unload(name)
            else:
                await asyncio.to_thread(adapters.load, name, path)
        except Exception as error:
            if not isinstance(error, ForewordError):
                log.exception("an adapter could not be loaded")
            self._channel.send(wire.AdapterSet(number, str(error) or type(error).__name__))
        else:
            self._channel.send(wire.AdapterSet(number))

    def _submit(self, request: NewRequest) -> None:
        """Submit a request to the engine, which forwards its deltas; report a refusal."""
        try:
            stream = self._engine.submit(request)
        except RequestError as error:
            self._channel.send(wire.Refused(request.request_id, str(error), error.param))
        except EngineStopped as error:
            self._end_with_error(error)
        except Exception as error:  # nothing was queued: only this request fails
            log.exception("a request could not be submitted")
            self._channel.send(wire.Refused(request.request_id, f"{type(error).__name__}: {error}"))
        else:
            stream.forward_to(partial(self._forward, request.request_id))

    def _forward(self, request_id: str, item: AnswerDelta | Exception) -> None:
        """Forward a delta or an error; one message has all deltas of a pass, so that it wakes the API process once."""
        if isinstance(item, RequestError):
            self._channel.send(wire.Refused(request_id, str(item), item.param))
        elif isinstance(item, Exception):
            self._end_with_error(item)
        elif item.prompt_logprobs:
            self._send_unsent()
            self._send_alone(item)
        else:
            if not self._unsent:
                asyncio.get_running_loop().call_soon(self._send_unsent)
            self._unsent.append(item)

    def _send_alone(self, delta: AnswerDelta) -> None:
        """Send a delta with prompt log-probabilities; refuse its request if they do not fit into a frame."""
        try:
            self._channel.send(wire.Deltas([delta]))
        except ChannelError:
            self._engine.abort(delta.request_id)
            why = f"prompt_logprobs: {len(delta.prompt_logprobs)} positions are too many; request fewer alternatives"
            self._channel.send(wire.Refused(delta.request_id, why, "prompt_logprobs"))

    def _send_unsent(self) -> None:
        deltas, self._unsent = self._unsent, []
        if deltas:
            self._channel.send(wire.Deltas(deltas))

    async def _drain(self, deadline: float) -> None:
        """Finish running answers within `deadline` seconds, then end the process."""
        if not await self._engine.drain(deadline):
            log.warning("some answers did not end within %.1f s and are aborted", deadline)
        self._send_unsent()
        self._ended.set()

    def _end_with_error(self, error: Exception) -> None:
        """Report an engine failure and end the process; the supervisor starts a new one."""
        if self._ended.is_set():
            return
        log.error("the engine has died: %s", error, exc_info=not isinstance(error, ForewordError))
        self._channel.send(wire.Fatal(str(error) or type(error).__name__))
        self.exit_code = 1
        self._ended.set()


async def run(connection: socket.socket, factory: str) -> int:
    """Wait for `Start`, load the engine and serve it; return the exit code. `factory` is `MODULE:FUNCTION`."""
    channel = Channel(*await asyncio.open_connection(sock=connection))
    incoming = channel.frames()
    try:
        first = await anext(incoming, None)
        if first is None:
            return 0
        start = wire.decode_to_engine(first)
        if not isinstance(start, wire.Start):
            raise ChannelError("the first message must be Start")
        return await _load_and_serve(channel, incoming, factory, start)
    except ChannelError as error:
        log.error("closing the channel: %s", error)
        return 1
    finally:
        channel.close()


async def _load_and_serve(
    channel: Channel, incoming: AsyncIterator[bytes], factory: str, start: wire.Start
) -> int:
    """Load the engine and serve the channel; return the exit code."""

    def on_stage(stage: str, done: int, total: int) -> None:
        channel.send(wire.Starting(stage, done, total))

    try:
        engine = find_factory(factory)(start, on_stage)
    except Exception as error:
        if not isinstance(error, ForewordError):  # the API process reports ForewordErrors
            log.exception("the engine cannot start")
        channel.send(wire.Fatal(str(error) or type(error).__name__))
        await channel.flush()
        return 1
    gc.collect()
    spare_steps()
    host = EngineHost(channel, engine)
    try:
        await host.serve(incoming)
        await channel.flush()
    except ConnectionError:
        log.warning("the API process is gone")
    finally:
        engine.close()
        gc.unfreeze()  # objects that stay frozen at exit would outlive the native module that they need
    return host.exit_code


def main() -> None:
    """Run the process. It ignores SIGINT and SIGTERM, since the API process handles them and closes the channel."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    descriptor, factory_name = sys.argv[1:]
    connection = socket.socket(fileno=int(descriptor))
    sys.exit(asyncio.run(run(connection, factory_name)))


if __name__ == "__main__":
    main()
