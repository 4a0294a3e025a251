"""Keeps an engine process running: starts it, restarts it after a crash, and shuts it down."""

import asyncio
import logging
import socket
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from enum import StrEnum
from time import monotonic

import msgspec

from foreword.cluster.framing import ChannelError
from foreword.engine.messages import AnswerDelta, EngineStats, NewRequest
from foreword.errors import EngineUnavailable, ForewordError
from foreword.progress import StageProgress
from foreword.wire import frames as wire
from foreword.wire.link import EngineLink, OnLate, wait_until_hung

log = logging.getLogger("foreword.server")

DEFAULT_FACTORY = "foreword.wire.factory:load_engine"  # creates the real engine


class EngineState(StrEnum):
    """States of a supervised engine."""

    STARTING = "starting"  # loading the model for the first time
    READY = "ready"
    RESTARTING = "restarting"  # the engine process died and a new one is starting
    DRAINING = "draining"  # no new requests; running answers may finish
    STOPPED = "stopped"


class EngineStartError(ForewordError):
    """The engine could not be started."""


@dataclass(frozen=True)
class SupervisorSettings:
    """Settings for starting and monitoring an engine process."""

    start: wire.Start  # model and settings to load
    factory: str = DEFAULT_FACTORY  # "module:function" that creates the engine in its process
    first_pause: float = 0.2  # seconds before the first restart; the pause doubles at each further one
    longest_pause: float = 30.0  # maximum seconds before a restart
    calm_after: float = 60.0  # an engine that ran for more seconds than this resets the pause
    hang_seconds: float = 60.0  # an engine without a sign of life for this long is killed
    stats_timeout: float = 2.0  # seconds to wait for statistics
    close_timeout: float = 10.0  # seconds that the process has to exit before it is killed


class Supervisor:
    """Forwards requests to an engine in a child process, and returns its answers."""

    def __init__(self, settings: SupervisorSettings, on_stage: StageProgress = lambda *_: None) -> None:
        """`on_stage` receives the loading progress."""
        self._settings = settings
        self._on_stage = on_stage
        self.state = EngineState.STARTING
        self._link: EngineLink | None = None
        self._process: Process | None = None
        self.max_model_len: int | None = (
            None  # maximum tokens of prompt and answer; None: no engine was ready yet
        )
        self.restarts = 0  # number of restarts
        self.speculating = True  # False: speculation is switched off for all requests
        self._adapters = dict(settings.start.adapters)  # loaded LoRA adapters: name -> folder
        self._task: asyncio.Task[None] | None = None  # runs `_keep_running`

    @property
    def process_id(self) -> int | None:
        return None if self._process is None else self._process.pid

    def submit(self, request: NewRequest, on_late: OnLate | None = None) -> AsyncGenerator[AnswerDelta, None]:
        """Submit a request; return an iterator over the deltas of its n answers.

        The iterator raises `RequestError`, or `EngineUnavailable` if the engine dies. Closing it early aborts the
        request; `on_late` then receives the last deltas of its answers.
        """
        if self._link is None or self.state not in (EngineState.READY, EngineState.DRAINING):
            raise EngineUnavailable(f"the engine is {self.state}; try again")
        return self._link.answer(request, on_late)

    def speculate(self, on: bool) -> None:
        """Switch speculation on or off for all requests, also after restarts."""
        self.speculating = on
        if self._link is not None:
            self._link.send(wire.Speculate(on))

    def move_pair(self, drafter: str, cohort: str, state: str) -> None:
        """Move a drafter of the policy file to another stage in a cohort; the engine saves the stage."""
        if self._link is not None:
            self._link.send(wire.MovePair(drafter, cohort, state))

    def learn(self, action: str, tenant: str = "") -> None:
        """Roll the trained head back ("rollback"), or drop a tenant's texts and heads ("forget")."""
        if self._link is not None:
            self._link.send(wire.LearnAction(action, tenant))

    async def set_adapter(self, name: str, path: str | None) -> None:
        """Load a LoRA adapter, or unload it if `path` is None, also after restarts.

        Raise `RequestError` if it cannot be loaded, `EngineUnavailable` without a running engine.
        """
        if self._link is None or self.state is not EngineState.READY:
            raise EngineUnavailable(f"the engine is {self.state}; try again")
        await self._link.set_adapter(name, path)
        if path is None:
            self._adapters.pop(name, None)
        else:
            self._adapters[name] = path

    async def stats(self) -> EngineStats | None:
        """Return the engine's statistics; None if it is not ready or does not reply in time."""
        if self._link is None or not self._link.ready.done():
            return None
        return await self._link.stats(self._settings.stats_timeout)

    async def start(self, on_ready: Callable[[], None] = lambda: None) -> None:
        """Start and keep an engine; call `on_ready` when it is ready. Raise `EngineStartError` if it cannot start."""
        first_ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._keep_running(first_ready))
        await first_ready
        on_ready()

    async def _keep_running(self, first_ready: asyncio.Future[None]) -> None:
        """Run engine processes one after another until the supervisor stops, or the first one fails to start."""
        pause = self._settings.first_pause
        while True:
            began = monotonic()
            reason = await self._run_once(first_ready)
            if self.state in (EngineState.DRAINING, EngineState.STOPPED):
                if not first_ready.done():
                    first_ready.set_exception(EngineStartError("stopped before the engine was ready"))
                return
            if not first_ready.done():
                self.state = EngineState.STOPPED
                first_ready.set_exception(EngineStartError(reason))
                return
            self.state = EngineState.RESTARTING
            self.restarts += 1
            if monotonic() - began > self._settings.calm_after:
                pause = self._settings.first_pause
            log.error("%s; starting another in %.1f s", reason, pause)
            await asyncio.sleep(pause)
            if self.state is not EngineState.RESTARTING:
                return
            pause = min(2 * pause, self._settings.longest_pause)

    async def _run_once(self, first_ready: asyncio.Future[None]) -> str:
        """Run one engine process until it ends; return why it ended."""
        try:
            link = await self._launch()
        except OSError as error:
            return f"the engine process cannot be started: {error}"
        link.ready.add_done_callback(lambda ready: self._on_link_ready(ready, first_ready))
        watchdog = asyncio.create_task(self._kill_if_hung(link))
        reason = "the engine process is gone"
        try:
            await link.listen()
        except ChannelError as error:
            reason = f"the engine's channel is damaged: {error}"
            log.error("%s; closing it", reason)
        finally:
            watchdog.cancel()
            self._link = None
            if self.state is EngineState.READY:
                # Set the state before `break_off` notifies readers, so that none of them still sees READY.
                self.state = EngineState.RESTARTING
            link.break_off("the engine has died; try again")
            # Unless it was asked to stop, a process without a channel has crashed already, or is useless.
            timeout = self._settings.close_timeout if self.state is EngineState.STOPPED else 1.0
            code = await self._reap(timeout)
        if link.fatal:
            return link.fatal
        return reason if code is None else f"{reason}, exit code {code}"

    async def _kill_if_hung(self, link: EngineLink) -> None:
        """Kill a process that stopped responding; its requests then fail as after a crash."""
        await asyncio.wait((link.ready,))  # loading has no time limit
        await wait_until_hung(link, self._settings.hang_seconds)
        link.fatal = f"the engine gave no sign of life for {self._settings.hang_seconds:g} s and was killed"
        if self._process is not None:
            self._process.kill()

    async def _launch(self) -> EngineLink:
        """Start a process and send it `Start`; return the link to it."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-m",
                    "foreword.wire.process",
                    str(theirs.fileno()),
                    self._settings.factory,
                    pass_fds=(theirs.fileno(),),
                    stdin=asyncio.subprocess.DEVNULL,
                )
            except OSError:
                ours.close()
                raise
        link = EngineLink(wire.Channel(*await asyncio.open_connection(sock=ours)), self._on_stage)
        # Those adapters of the start that are still loaded; `_on_link_ready` adds adapters that were loaded later.
        adapters = self._settings.start.adapters.items() & self._adapters.items()
        link.send(msgspec.structs.replace(self._settings.start, adapters=dict(adapters)))
        self._link = link
        return link

    def _on_link_ready(self, ready: "asyncio.Future[wire.Ready]", first_ready: asyncio.Future[None]) -> None:
        """Bring a new engine to the current settings, and set the state."""
        if ready.cancelled():
            return
        self.max_model_len = ready.result().max_model_len
        if self.state in (EngineState.STARTING, EngineState.RESTARTING):
            self.state = EngineState.READY
        if not self.speculating:
            self.speculate(False)
        # Load adapters that were added after the start; if an adapter's files are missing, only its requests fail.
        for name, path in self._adapters.items() - self._settings.start.adapters.items():
            if self._link is not None:
                self._link.send(wire.SetAdapter(-1, name, path))  # -1: the reply is ignored
        if not first_ready.done():
            first_ready.set_result(None)
        log.info("the engine is ready")

    async def _reap(self, timeout: float) -> int | None:
        """Wait for the process, whose channel is closed, and kill it on timeout; return its exit code."""
        process, self._process = self._process, None
        if process is None:
            return None
        try:
            return await asyncio.wait_for(process.wait(), timeout)
        except TimeoutError:
            log.warning("the engine process did not exit within %.0f s: killed", timeout)
            process.kill()
            return await process.wait()

    def begin_drain(self) -> None:
        """Start draining: requests that the server has admitted may still be submitted and finish."""
        if self.state is not EngineState.STOPPED:
            self.state = EngineState.DRAINING

    def abort_all(self) -> None:
        if self._link is not None:
            self._link.abort_all()

    async def stop(self) -> None:
        """End the engine process; call this when no request is running."""
        self.state = EngineState.STOPPED
        if self._link is not None and self._link.ready.done():
            self._link.send(wire.Drain(self._settings.close_timeout / 2))
        elif self._process is not None:
            self._process.kill()  # a process that is loading a model reads no messages
        elif self._task is not None:
            self._task.cancel()  # it is pausing before a restart
        if self._task is not None:
            done, _ = await asyncio.wait((self._task,), timeout=2 * self._settings.close_timeout)
            if not done:
                self._task.cancel()
