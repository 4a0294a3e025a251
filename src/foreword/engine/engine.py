"""The asynchronous engine: one thread that runs steps, and streams for callers."""

import asyncio
import atexit
import logging
import secrets
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Unpack

from foreword.acceptance.params import SamplingDefaults, SamplingParams
from foreword.drafters.config import SpeculationSetting
from foreword.engine.adapters import Adapters
from foreword.engine.assembly import load_core
from foreword.engine.config import EngineConfig
from foreword.engine.core import EngineCore
from foreword.engine.drafting.default_speculation import SpeculationOption
from foreword.engine.loader import LoadedModel, LoadOptions
from foreword.engine.messages import AnswerDelta, EngineStats, NewRequest
from foreword.engine.outputs import OutputCollector, RequestOutput
from foreword.engine.prompts import Prediction, Prompt, encode_prediction, encode_prompt
from foreword.engine.requests.request import Request
from foreword.engine.step_pipeline import StepPipeline
from foreword.engine.streams import AnswerStream, Listeners, post
from foreword.errors import EngineStopped, RequestError
from foreword.models.sources.builtin import DEFAULT_MODEL
from foreword.models.tokenization.tokenizer import Tokenizer
from foreword.progress import Progress

_log = logging.getLogger(__name__)


def stop_engine(reason: str) -> None:
    """Raise `EngineStopped`; called in the engine's thread, which then ends."""
    raise EngineStopped(reason)


DRAIN_INTERVAL = 0.01  # seconds between two checks whether a draining engine is idle
STATS_INTERVAL = 0.05  # seconds between two statistics snapshots of a busy engine


class Engine:
    """Answers requests concurrently.

    >>> engine = Engine.load("smollm2-135m", speculation={"method": "ngram"})
    >>> async for output in engine.generate("Why is the sky blue?"):
    ...     print(output.outputs[0].text)
    """

    def __init__(
        self,
        core: EngineCore,
        tokenizer: Tokenizer | None = None,
        *,
        sampling: SamplingDefaults | None = None,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        """Take ownership of `core`: from now on only the engine's thread uses it. `on_close` is called at the end."""
        self._core = core
        self._tokenizer = tokenizer
        self._sampling = sampling or SamplingDefaults()
        # Tasks that the engine's thread runs between two steps; None: end the thread.
        self._mail: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._listeners = Listeners()
        self._listeners.idle.set()
        self._refusal: str | None = None  # why new requests are refused; None: they are accepted
        self._on_close = on_close
        self._on_death: Callable[[Exception], None] = lambda error: None
        self._stopped: EngineStopped | None = None  # why the thread died; None: it runs or was closed
        self._snapshot, self._snapshot_at = core.stats(), monotonic()
        self._thread = threading.Thread(target=self._run, name="foreword-engine", daemon=True)
        self._thread.start()
        # A thread inside native kernels at interpreter exit would abort the process.
        atexit.register(self.close)

    @staticmethod
    def load(
        model: str = DEFAULT_MODEL,
        *,
        speculation: SpeculationOption = "auto",
        config: EngineConfig | None = None,
        preparing: Progress | None = None,
        attach: Callable[[LoadedModel, EngineCore], None] = lambda loaded, core: None,
        **options: Unpack[LoadOptions],
    ) -> "Engine":
        """Load a model and start an engine for it; the arguments are those of `LLM`.

        `attach` is called before the engine's thread starts.
        """
        loaded, core = load_core(model, config, speculation, preparing, **options)
        try:
            attach(loaded, core)
        except BaseException:
            core.close()
            loaded.close()
            raise
        engine = Engine(core, loaded.tokenizer, sampling=loaded.sampling, on_close=loaded.close)
        loaded.when_lost(lambda reason: engine._mail.put(lambda: stop_engine(reason)))
        return engine

    def submit(self, request: NewRequest) -> AnswerStream:
        """Queue a request and return its stream, on the running event loop.

        Raise `EngineStopped` after draining or closing, and `RequestError` for an invalid request. If a drafter or a
        grammar must be created first, a thread checks the request, and the stream raises its errors.
        """
        self._check_accepting()
        prepared = self._core.prepare(request) if self._core.is_prepared_for(request) else None
        stream = AnswerStream(request.request_id, request.params.n, self._abandon)
        try:
            if not self._listeners.add(stream):
                self._check_accepting()
        except BaseException:
            self._core.discard(prepared or ())
            raise
        if prepared is not None:
            self._mail.put(lambda: self._enqueue(prepared, stream))
            return stream
        try:  # Creating a drafter may load a model, so a thread does it.
            self._core.background.start(lambda: self._prepare(request, stream))
        except BaseException:  # The thread could not be started.
            self._listeners.forget(stream)
            raise
        return stream

    def _prepare(self, request: NewRequest, stream: AnswerStream) -> None:
        """Prepare a request in a thread; its stream raises any error."""
        try:
            prepared = self._core.prepare(request)
        except BaseException as error:  # The stream raises anything that a drafter raises.
            if not isinstance(error, Exception):
                error = RequestError(f"{type(error).__name__}: {error}")
            if self._listeners.forget(stream):
                post(stream.loop, [(stream, error)])
            return
        self._mail.put(lambda: self._enqueue(prepared, stream))

    def _enqueue(self, prepared: list[Request], stream: AnswerStream) -> None:
        """Queue a prepared request unless its reader has left; abort it if that was requested meanwhile."""
        if not self._listeners.has(stream):
            self._core.discard(prepared)
            return
        self._core.enqueue(prepared)
        if stream.is_aborted:
            self._deliver(self._core.abort(stream.request_id))

    async def generate(  # noqa: PLR0913 - vLLM's names
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        tenant: str = "",
        speculation: SpeculationSetting = None,
        prediction: Prediction = None,
        adapter: str = "",
        priority: int = 0,
        deadline_ms: float | None = None,
        raw: bool = False,
        parse_special: bool = True,
    ) -> AsyncIterator[RequestOutput]:
        """Generate answers to one prompt; every output contains the texts so far, and the last output is finished.

        The arguments are those of `LLM.generate`. A slow consumer receives fewer outputs, each with more new text.
        Leaving the loop early aborts the request.
        """
        if self._tokenizer is None:
            raise RequestError("this engine has no tokenizer; submit token ids")
        chosen = params or self._sampling.params()
        ids = encode_prompt(self._tokenizer, prompt, raw, parse_special=parse_special)
        expected = encode_prediction(self._tokenizer, prediction)
        name = request_id or f"request-{secrets.token_hex(8)}"
        shown = prompt if isinstance(prompt, str) else None
        collector = OutputCollector(name, shown, ids, chosen, self._tokenizer)
        request = NewRequest(name, tuple(ids), chosen, tenant, speculation, prediction=expected)
        request = replace(request, adapter=adapter, priority=priority, deadline_ms=deadline_ms)
        stream = self.submit(request)
        try:
            async for delta in stream:
                collector.take(delta)
                if not stream.has_more:
                    yield collector.output()
        finally:
            await stream.aclose()

    def abort(self, request_id: str) -> None:
        """Abort a request; its stream ends with finish_reason "abort". Unknown ids are ignored."""
        stream = self._listeners.stream_of(request_id)
        if stream is None:
            return

        def stop() -> None:
            if self._listeners.has(stream):  # otherwise it has ended, and its id may be in use again
                deltas = self._core.abort(request_id)
                self._deliver(deltas)
                stream.is_aborted = not deltas

        self._mail.put(stop)

    async def drain(self, timeout: float | None = None) -> bool:
        """Refuse new requests and wait until all others have ended; return False on timeout (seconds)."""
        self._refusal = self._refusal or "the engine is draining and takes no more requests"
        self._listeners.close()
        deadline = None if timeout is None else monotonic() + timeout
        while not self._listeners.idle.is_set():  # polled, so that waiting can be cancelled
            if deadline is not None and monotonic() > deadline:
                return False
            await asyncio.sleep(DRAIN_INTERVAL)
        return True

    @property
    def adapters(self) -> Adapters:
        """The LoRA adapters; may be loaded and unloaded at any time, thread-safe."""
        return self._core.adapters

    def speculate(self, on: bool) -> None:
        """Switch speculation off or on for all requests, from the next step."""
        self._core.situation.speculating = on

    def move_pair(self, drafter: str, cohort: str, state: str) -> None:
        """Move the roll-out of a drafter in a cohort to the stage `state`, from the next step."""
        self._mail.put(lambda: self._core.speculation_monitor.move(drafter, cohort, state))

    def learn(self, action: str, tenant: str = "") -> None:
        """Roll the trained head back ("rollback"), or drop a tenant's texts ("forget"), between two steps."""
        if (learner := self._core.learner) is not None:
            self._mail.put(lambda: learner.act(action, tenant))

    def stats(self) -> EngineStats:
        """Return recent statistics, with the current draft nodes and whether speculation is on."""
        is_speculating = self._core.situation.speculating
        recent = self._snapshot.later(monotonic() - self._snapshot_at, is_speculating)
        return replace(recent, draft_nodes=tuple(self._core.drafters.nodes()))

    def when_dead(self, callback: Callable[[Exception], None]) -> None:
        """Call `callback` in the engine's thread when the thread dies of an error; immediately if it has died."""
        self._on_death = callback
        if self._stopped is not None:
            callback(self._stopped)

    @property
    def max_model_len(self) -> int:
        return self._core.max_model_len

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def close(self) -> None:
        """Abort all requests and stop the thread. Also called at interpreter exit; may be repeated."""
        atexit.unregister(self.close)
        self._refusal = self._refusal or "the engine is closed"
        self._mail.put(None)
        self._thread.join()
        self._core.close()
        self._on_close()

    def _abandon(self, stream: AnswerStream) -> None:
        """Abort the request of a stream whose reader has left."""

        def stop() -> None:
            if self._listeners.has(stream):
                self._deliver(self._core.abort(stream.request_id))
                # A request that waits for its drafter has no delta that would unregister the stream.
                self._listeners.forget(stream)

        self._mail.put(stop)

    def _check_accepting(self) -> None:
        if self._refusal is not None:
            raise EngineStopped(self._refusal)

    def _run(self) -> None:
        """Run steps and tasks until the engine is closed or fails; the engine's thread runs this."""
        pipeline = StepPipeline(self._core)
        try:
            while self._take_mail(pipeline.is_busy):
                self._deliver(pipeline.advance())
                if monotonic() - self._snapshot_at > STATS_INTERVAL or not self._core.has_requests:
                    self._snapshot, self._snapshot_at = self._core.stats(), monotonic()
            stopped = EngineStopped("the engine was closed")
        except BaseException as error:
            is_clear = isinstance(error, EngineStopped)  # Its message needs no traceback.
            _log.critical("the engine's thread has died: %s", error, exc_info=None if is_clear else error)
            why = str(error) if is_clear else f"{type(error).__name__}: {error}"
            stopped = self._stopped = EngineStopped(f"the engine has failed: {why}")
            self._on_death(stopped)
            self._refusal = str(stopped)
        for stream in self._listeners.take_all():
            post(stream.loop, [(stream, stopped)])

    def _take_mail(self, is_busy: bool) -> bool:
        """Run the tasks of other threads and idle work of the core; return False when the engine is closed.

        An idle engine waits for a task, at most `EngineCore.idle_seconds`. `is_busy`: a step is in flight.
        """
        self._core.use_idle_time()
        may_wait = not is_busy and not self._core.has_requests
        while True:
            try:
                task = self._mail.get(may_wait, self._core.idle_seconds)
            except Empty:
                return True
            if task is None:
                return False
            task()
            may_wait = False

    def _deliver(self, deltas: list[AnswerDelta]) -> None:
        """Deliver deltas to their streams; abort the requests of streams whose event loop is closed."""
        for stream in self._listeners.deliver(deltas):
            self._abandon(stream)
