"""The engine for servers and other asynchronous programs: one thread that steps, streams that listen."""

import asyncio
import atexit
import logging
import secrets
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from queue import Empty, SimpleQueue
from time import monotonic

from foreword.acceptance.params import SamplingDefaults, SamplingParams
from foreword.drafters.config import SpeculationSetting
from foreword.engine.adapters import Adapters
from foreword.engine.assembly import load_core
from foreword.engine.config import EngineConfig
from foreword.engine.core import EngineCore
from foreword.engine.drafting.default_speculation import SpeculationOption
from foreword.engine.messages import AnswerDelta, EngineStats, NewRequest
from foreword.engine.outputs import OutputCollector, RequestOutput
from foreword.engine.pipeline import StepPipeline
from foreword.engine.prompts import Prediction, Prompt, encode_prediction, encode_prompt
from foreword.engine.requests.request import Request
from foreword.engine.streams import AnswerStream, Listeners, post
from foreword.errors import EngineStopped, RequestError
from foreword.models.sources.builtin import DEFAULT_MODEL
from foreword.models.tokenization.tokenizer import Tokenizer
from foreword.progress import Progress

_log = logging.getLogger(__name__)


def give_up(reason: str) -> None:
    """End the engine's thread, in which it is called: something that it needs is gone."""
    raise EngineStopped(reason)


DRAIN_INTERVAL = 0.01
"""Seconds between two checks whether a draining engine is done."""

STATS_INTERVAL = 0.05
"""Seconds between two snapshots of a busy engine's statistics."""


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
        """Take over `core`: from now on only the engine's thread touches it. `on_close` is called after its end."""
        self._core = core
        self._tokenizer = tokenizer
        self._sampling = sampling or SamplingDefaults()
        self._mail: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._listeners = Listeners()
        self._listeners.idle.set()
        self._refusal: str | None = None  # why no request is taken
        self._on_close = on_close
        self._on_death: Callable[[Exception], None] = lambda error: None
        self._stopped: EngineStopped | None = None  # why its thread has died
        self._snapshot, self._snapshot_at = core.stats(), monotonic()
        self._thread = threading.Thread(target=self._run, name="foreword-engine", daemon=True)
        self._thread.start()
        # A thread that is inside the kernels when the interpreter goes away would take the process down with it.
        atexit.register(self.close)

    @staticmethod
    def load(  # noqa: PLR0913 - vLLM's names
        model: str = DEFAULT_MODEL,
        *,
        dtype: str = "auto",
        device: str = "auto",
        backend: str = "auto",
        speculation: SpeculationOption = "auto",
        generation_config: str = "auto",
        tensor_parallel_size: int = 1,
        config: EngineConfig | None = None,
        progress: Progress | None = None,
        preparing: Progress | None = None,
    ) -> "Engine":
        """Load a model and start an engine for it; the arguments are those of `LLM`."""
        loaded, core = load_core(
            model,
            config,
            speculation,
            preparing,
            dtype=dtype,
            device=device,
            backend=backend,
            generation_config=generation_config,
            tensor_parallel_size=tensor_parallel_size,
            progress=progress,
        )
        engine = Engine(core, loaded.tokenizer, sampling=loaded.sampling, on_close=loaded.close)
        loaded.when_lost(lambda reason: engine._mail.put(lambda: give_up(reason)))
        return engine

    def submit(self, request: NewRequest) -> AnswerStream:
        """Queue a request and listen to it, on the running event loop.

        Raises `RequestError` for what cannot be answered and `EngineStopped` when nothing is taken any more. Where a
        drafter has to be made for the request, the stream raises what is wrong with it.
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
        try:  # a drafter has to be made first, which may load a model: the event loop does not wait for it
            self._core.background.start(lambda: self._prepare(request, stream))
        except BaseException:  # the system has no thread left
            self._listeners.forget(stream)
            raise
        return stream

    def _prepare(self, request: NewRequest, stream: AnswerStream) -> None:
        """Prepare a request in a thread of its own; its stream raises what is wrong with it."""
        try:
            prepared = self._core.prepare(request)
        except BaseException as error:  # whatever a drafter's code raises, the stream raises
            refusal = (
                error if isinstance(error, Exception) else RequestError(f"{type(error).__name__}: {error}")
            )
            if self._listeners.forget(stream):
                post(stream.loop, [(stream, refusal)])
            return
        self._mail.put(lambda: self._enqueue(prepared, stream))

    def _enqueue(self, prepared: list[Request], stream: AnswerStream) -> None:
        """Queue a request unless its reader has left it; end it if it was aborted while it was being prepared."""
        if not self._listeners.knows(stream):
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
        """Answer a prompt; every output holds all that is known so far, the last one is finished.

        A consumer that is slow gets fewer, longer outputs. Leaving the loop early aborts the request.
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
        """Stop working on a request; its stream ends with finish_reason "abort". Unknown ids are ignored."""
        stream = self._listeners.stream_of(request_id)
        if stream is None:
            return

        def stop() -> None:
            if not self._listeners.knows(stream):  # it has ended, and its id may be another's by now
                return
            deltas = self._core.abort(request_id)
            self._deliver(deltas)
            stream.is_aborted = not deltas

        self._mail.put(stop)

    async def drain(self, timeout: float | None = None) -> bool:
        """Take no more requests and wait until the running ones have ended; False if that took too long."""
        self._refusal = self._refusal or "the engine is draining and takes no more requests"
        self._listeners.close()
        deadline = None if timeout is None else monotonic() + timeout
        while not self._listeners.idle.is_set():  # looked at now and then, so that waiting can be cancelled
            if deadline is not None and monotonic() > deadline:
                return False
            await asyncio.sleep(DRAIN_INTERVAL)
        return True

    @property
    def adapters(self) -> Adapters:
        """The LoRA adapters that requests can ask for; loaded and unloaded while it runs, by any thread."""
        return self._core.adapters

    def speculate(self, on: bool) -> None:
        """Switch speculation off or on again for everyone, from the next step; nothing is reloaded."""
        self._core.speculating = on

    def move_pair(self, drafter: str, cohort: str, state: str) -> None:
        """Move a drafter of the policy file in a cohort, from the next step on."""
        self._mail.put(lambda: self._core.speculation_service.move(drafter, cohort, state))

    def stats(self) -> EngineStats:
        """Return recent statistics; switch and draft nodes as they are now, which an idle engine has not seen."""
        then = self._snapshot.later(monotonic() - self._snapshot_at, self._core.speculating)
        return replace(then, draft_nodes=tuple(self._core.drafters.nodes()))

    def when_dead(self, tell: Callable[[Exception], None]) -> None:
        """Call `tell`, in the engine's thread, if that dies by itself, also while idle; now if it is dead already."""
        self._on_death = tell
        if self._stopped is not None:
            tell(self._stopped)

    @property
    def max_model_len(self) -> int:
        """Most tokens of a prompt with its answer."""
        return self._core.max_model_len

    @property
    def is_alive(self) -> bool:
        """Whether the engine's thread works."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Abort everything and stop the thread. The interpreter's exit calls it, too; safe to repeat."""
        atexit.unregister(self.close)
        self._refusal = self._refusal or "the engine is closed"
        self._mail.put(None)
        self._thread.join()
        self._core.close()
        self._on_close()

    def _abandon(self, stream: AnswerStream) -> None:
        """Abort the request of a stream without reader. It may have ended, and its id may be another's by now."""

        def stop() -> None:
            if self._listeners.knows(stream):
                self._deliver(self._core.abort(stream.request_id))
                self._listeners.forget(stream)  # it may still be waiting for its drafter

        self._mail.put(stop)

    def _check_accepting(self) -> None:
        if self._refusal is not None:
            raise EngineStopped(self._refusal)

    def _run(self) -> None:
        pipeline = StepPipeline(self._core)
        try:
            while self._take_mail(pipeline.is_busy):
                self._deliver(pipeline.advance())
                if monotonic() - self._snapshot_at > STATS_INTERVAL or not self._core.has_requests:
                    self._snapshot, self._snapshot_at = self._core.stats(), monotonic()
            stopped = EngineStopped("the engine was closed")
        except BaseException as error:
            is_clear = isinstance(error, EngineStopped)  # one line says all
            _log.critical("the engine's thread has died: %s", error, exc_info=None if is_clear else error)
            why = str(error) if is_clear else f"{type(error).__name__}: {error}"
            stopped = self._stopped = EngineStopped(f"the engine has failed: {why}")
            self._on_death(stopped)
            self._refusal = str(stopped)
        for stream in self._listeners.take_all():
            post(stream.loop, [(stream, stopped)])

    def _take_mail(self, is_busy: bool) -> bool:
        """Run the tasks of other threads; False when the engine is closed.

        An idle engine waits for a task, but no longer than the core allows: its policy file is checked then.
        """
        self._core.use_idle_time()
        may_wait = not is_busy and not self._core.has_requests
        while True:
            try:
                task = self._mail.get(may_wait, self._core.speculation_service.idle_seconds)
            except Empty:
                return True
            if task is None:
                return False
            task()
            may_wait = False

    def _deliver(self, deltas: list[AnswerDelta]) -> None:
        for stream in self._listeners.deliver(deltas):
            self._abandon(stream)
