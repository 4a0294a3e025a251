"""An engine with a fixed step time, a fixed batch size and texts that are a function of the request alone.

Its vocabulary is that of the tiny tokenizer: ids 3 to 96 are the visible ASCII characters.
"""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from time import monotonic

import numpy as np

from foreword.acceptance.logprobs import TokenLogprobs
from foreword.control.reporting.figures import ControlReport
from foreword.engine.learning import LearningReport
from foreword.engine.messages import AnswerDelta, DraftShown, EngineStats, NewRequest, RequestStats
from foreword.engine.streams import AnswerStream
from foreword.errors import CheckpointError, EngineStopped, RequestError
from foreword.progress import StageProgress
from foreword.wire.frames import Start

FIRST_VISIBLE = 3
VISIBLE = 94
WRONG = FIRST_VISIBLE + 5


def token_text(token: int) -> str:
    return chr(33 + token - FIRST_VISIBLE)


def expected_tokens(request: NewRequest, index: int, count: int) -> list[int]:
    """The tokens that the fake engine answers with; the first is never cut short by a stop."""
    seed = request.params.seed or 0
    name = f"{list(request.prompt_token_ids)}|{seed}|{index}".encode()
    return [
        FIRST_VISIBLE + sha256(name + bytes([t % 256, t // 256])).digest()[0] % VISIBLE for t in range(count)
    ]


@dataclass
class FakeAnswer:
    request: NewRequest
    index: int
    inbox: AnswerStream
    tokens: list[int]
    drafts: bool
    arrived: float = field(default_factory=monotonic)
    started: float = 0.0
    first: float = 0.0  # when its first token came, and its last
    last: float = 0.0
    done: int = 0
    passes: int = 0
    told: int = 0  # characters of the text that were given out
    finished: bool = False
    lengths: list[int] = field(default_factory=list)  # accepted run of every pass that judged guesses

    def advance(self) -> None:
        """One pass: one token, or up to three when guessing."""
        deadline = self.request.deadline_ms
        if deadline is not None and self.done >= deadline // 10:  # ten milliseconds a token
            self.end("deadline")
            return
        self.started = self.started or monotonic()
        self.last = monotonic()
        self.first = self.first or self.last
        self.passes += 1
        run = (self.done % 3) if self.drafts else 0
        fresh = self.tokens[self.done : self.done + 1 + run]
        self.done += len(fresh)
        if self.drafts:
            self.lengths.append(len(fresh) - 1)
        self._tell(fresh)

    def _tell(self, fresh: list[int]) -> None:
        params = self.request.params
        text = "".join(map(token_text, self.tokens[: self.done]))
        stopped = next((stop for stop in params.stop_texts if stop in text), None)
        if stopped is not None:
            end = text.index(stopped) + (len(stopped) if params.include_stop_str_in_output else 0)
            text = text[:end]
        reason = "stop" if stopped is not None else "length" if self.done == len(self.tokens) else None
        held = max((len(stop) for stop in params.stop_texts), default=1) - 1
        upto = len(text) if reason else max(len(text) - held, self.told)
        self.finished = reason is not None
        delta = AnswerDelta(
            self.request.request_id,
            self.index,
            text[self.told : upto],
            tuple(fresh),
            tuple(_logprobs(t, params.logprobs) for t in fresh) if params.logprobs is not None else (),
            drafts=(self._draft(fresh),) if self.request.progress else (),
            from_draft=len(fresh) - 1,
            finish_reason=reason,
            stop_reason=stopped,
            seed=params.seed or 0,
            stats=self.stats() if reason else None,
            progress=self.stats() if self.request.progress else None,
            prompt_logprobs=self._prompt_logprobs(),
        )
        self.told = max(self.told, upto)
        self.inbox.deliver(delta)

    def _draft(self, fresh: list[int]) -> DraftShown:
        """Two guesses; with a depth of 8 and more they have siblings that are all wrong."""
        if not self.drafts:
            return DraftShown((), (), (), len(fresh))
        accepted = fresh[:-1]
        wrong = [FIRST_VISIBLE + k for k in range(2 - len(accepted))]
        setting = self.request.speculation
        branches = isinstance(setting, Mapping) and setting.get("num_speculative_tokens", 0) >= 8
        siblings = (WRONG, WRONG, WRONG) if branches else ()
        parents = (-1, 0, -1, 2, 0)[: 2 + len(siblings)]
        return DraftShown((*accepted, *wrong, *siblings), parents, tuple(range(len(accepted))), len(fresh))

    def _prompt_logprobs(self) -> tuple[TokenLogprobs, ...]:
        wanted = self.request.params.prompt_logprobs
        if wanted is None or self.passes > 1:
            return ()
        return tuple(_logprobs(t, wanted) for t in self.request.prompt_token_ids[1:])

    def end(self, reason: str) -> None:
        self.finished = True
        self.inbox.deliver(
            AnswerDelta(self.request.request_id, self.index, "", (), finish_reason=reason, stats=self.stats())
        )

    def stats(self) -> RequestStats:
        drafts = len(self.lengths)
        accepted = tuple(sum(length >= k for length in self.lengths) for k in (1, 2)) if drafts else ()
        return RequestStats(
            prompt_tokens=len(self.request.prompt_token_ids),
            output_tokens=self.done,
            first_tokens=min(self.done, 1),
            first_passes=min(self.passes, 1),
            queue_seconds=max(self.started - self.arrived, 0.0),
            prefill_seconds=0.001,
            decode_seconds=self.last - self.first,
            draft_seconds=0.001 * drafts,
            verify_seconds=0.01 * self.passes + 0.002 * drafts,
            passes=self.passes,
            drafts=drafts,
            drafted=2 * drafts,
            accepted=sum(accepted),
            drafted_per_position=(drafts, drafts) if drafts else (),
            accepted_per_position=accepted,
            rollback_tokens=2 * drafts - sum(accepted),
            rejected_kv_bytes=64 * (2 * drafts - sum(accepted)),
            rejected_per_position=tuple(self.lengths.count(k) for k in (0, 1)) if drafts else (),
            method="ngram" if self.drafts else "",
            cohort="ngram/greedy" if self.drafts else "plain/greedy",
        )


def _logprobs(token: int, wanted: int | None) -> TokenLogprobs:
    ids = np.array([FIRST_VISIBLE + i for i in range(wanted or 0)], dtype=np.int64)
    return TokenLogprobs(token, -0.5, 2, ids, -1.0 - np.arange(len(ids), dtype=np.float64))


class FakeEngine:
    """See the module; `drafting` is whether requests that don't say otherwise are guessed ahead for."""

    vocab_size = 360

    def __init__(
        self,
        step_seconds: float = 0.002,
        capacity: int = 8,
        max_model_len: int = 512,
        drafting: bool = True,
    ) -> None:
        self._step_seconds = step_seconds
        self._capacity = capacity
        self.max_model_len = max_model_len
        self.drafting = drafting
        self._answers: list[FakeAnswer] = []
        self._loop: asyncio.Task[None] | None = None
        self._stopped = False
        self.aborted: list[str] = []
        self.passes = 0
        self.tokens = 0  # of all answers
        self.most_answers = 0  # that it had at once
        self.is_held = False  # no pass begins
        self.requests: list[NewRequest] = []
        self.control = ControlReport()
        self.moved: list[tuple[str, str, str]] = []
        self.learning: LearningReport | None = None
        self.learned: list[tuple[str, str]] = []
        self._adapters = FakeAdapters()

    def submit(self, request: NewRequest) -> AnswerStream:
        if self._stopped:
            raise EngineStopped("the fake engine has stopped")
        if any(token >= self.vocab_size for token in request.prompt_token_ids):
            raise RequestError(f"a token id in the prompt is outside the vocabulary of {self.vocab_size}")
        self.requests.append(request)
        inbox = AnswerStream(request.request_id, request.params.n, lambda left: self.abort(left.request_id))
        drafts = self.drafting if request.speculation in (None, True) else request.speculation is not False
        for index in range(request.params.n):
            tokens = expected_tokens(request, index, request.params.max_tokens)
            self._answers.append(FakeAnswer(request, index, inbox, tokens, drafts))
        self.most_answers = max(self.most_answers, len(self._answers))
        if self._loop is None or self._loop.done():
            self._loop = asyncio.ensure_future(self._run())
        return inbox

    async def _run(self) -> None:
        while self._answers:
            await asyncio.sleep(self._step_seconds)
            if self.is_held:
                continue
            self.passes += 1
            for answer in self._answers[: self._capacity]:
                before = answer.done
                answer.advance()
                self.tokens += answer.done - before
            self._answers = [answer for answer in self._answers if not answer.finished]

    def abort(self, request_id: str) -> None:
        for answer in self._answers:
            if answer.request.request_id == request_id and not answer.finished:
                self.aborted.append(request_id)
                answer.end("abort")
        self._answers = [answer for answer in self._answers if not answer.finished]

    def speculate(self, on: bool) -> None:
        self.drafting = on

    def move_pair(self, drafter: str, cohort: str, state: str) -> None:
        self.moved.append((drafter, cohort, state))

    def learn(self, action: str, tenant: str = "") -> None:
        self.learned.append((action, tenant))

    @property
    def adapters(self) -> "FakeAdapters":
        return self._adapters

    def when_dead(self, tell: Callable[[Exception], None]) -> None:
        self.tell_of_death = tell

    def stats(self) -> EngineStats:
        count = len(self._answers)
        running = min(count, self._capacity)
        return EngineStats(
            running,
            count - running,
            100,
            5 * running,
            steps=self.passes,
            drafter_faults={"ngram": 1},
            control=self.control,
            learning=self.learning,
        )

    async def drain(self, timeout: float | None = None) -> bool:
        self._stopped = True
        if self._loop is None or self._loop.done():
            return True
        done, _ = await asyncio.wait((self._loop,), timeout=timeout)
        return bool(done)

    def close(self) -> None:
        self._stopped = True
        if self._loop is not None:
            self._loop.cancel()


class FakeAdapters:
    """Takes any folder that does not begin with /bad."""

    def __init__(self) -> None:
        self.loaded: dict[str, str] = {}

    def load(self, name: str, path: str) -> None:
        if path.startswith("/bad"):
            raise CheckpointError(f"{path} is no folder")
        self.loaded[name] = path

    def unload(self, name: str) -> None:
        del self.loaded[name]


def load_fake(start: Start, on_stage: StageProgress) -> FakeEngine:
    """For `Supervisor` and `foreword serve --engine-factory`: settings come as fields of the engine's config."""
    on_stage("loading", 1, 2)
    known = {k: v for k, v in start.config.items() if k in ("step_seconds", "capacity", "drafting")}
    return FakeEngine(max_model_len=start.config.get("max_model_len") or 512, **known)


def load_slow_fake(start: Start, on_stage: StageProgress) -> FakeEngine:
    """The same with steps long enough to be interrupted."""
    return FakeEngine(step_seconds=0.05, capacity=16)


def load_broken(start: Start, on_stage: StageProgress) -> FakeEngine:
    """An engine that cannot be loaded."""
    raise RequestError("this model is broken; get another")


def load_telling(start: Start, on_stage: StageProgress) -> FakeEngine:
    """An engine that only says what it was started with."""
    raise RequestError(json.dumps({"speculation": start.speculation} | start.config, sort_keys=True))


def load_dying(start: Start, on_stage: StageProgress) -> FakeEngine:
    """An engine that dies of its first request."""
    engine = FakeEngine()
    engine.close()
    return engine


class LostEngine(FakeEngine):
    """Dies by itself while it has nothing to do."""

    def when_dead(self, tell: Callable[[Exception], None]) -> None:
        threading.Thread(target=tell, args=(EngineStopped("rank 1 is gone"),)).start()


def load_lost(start: Start, on_stage: StageProgress) -> FakeEngine:
    return LostEngine()


HANGS, STANDS_STILL = 11, 13
"""Values of max_tokens that are fatal to an engine of `load_hanging`."""


class HangingEngine(FakeEngine):
    """Some requests stop its process from listening, others only its steps."""

    def submit(self, request: NewRequest) -> AnswerStream:
        if request.params.max_tokens == HANGS:
            time.sleep(600)
        if request.params.max_tokens == STANDS_STILL:
            self._step_seconds = 600
        return super().submit(request)


def load_hanging(start: Start, on_stage: StageProgress) -> FakeEngine:
    """An engine that some requests bring to a halt."""
    return HangingEngine()
