"""A conversation with a model: turns, settings and statistics, independent of the terminal."""

import itertools
from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

from foreword.acceptance.params import SamplingParams
from foreword.cli.chat.text import PieceReader, Tally, TextPiece
from foreword.drafters.config import SpeculationConfig
from foreword.engine.drafting.drafter_pool import PagesLackRows
from foreword.engine.llm import LLM
from foreword.engine.messages import AnswerDelta, DraftShown, NewRequest
from foreword.engine.text import token_text
from foreword.errors import RequestError

TENANT = "chat"
MAX_TEMPERATURE = 2  # maximum temperature, as in OpenAI's API and `foreword serve`

Message = dict[str, str]  # role and content
Show = Callable[[TextPiece], None]
Interrupted = Callable[[], bool]  # returns True to end the answer


@dataclass(frozen=True)
class Turn:
    """A question and its answer."""

    question: str
    answer: str


@dataclass(frozen=True)
class Plan:
    """A tokenized question with the newest turns that fit the context."""

    question: str
    prompt_ids: tuple[int, ...]
    dropped: int  # number of oldest turns to drop
    is_retry: bool = False  # the answer replaces the newest turn's


@dataclass(frozen=True)
class AnswerEnd:
    """A finished answer."""

    text: str
    finish_reason: str  # "stop", "length", "abort" or "error"
    error: str | None
    tally: Tally


class ChatSession:
    """Keeps the turns and settings of one conversation on one engine."""

    def __init__(self, llm: LLM, params: SamplingParams, speculation: Mapping[str, Any] | None) -> None:
        if llm.tokenizer.chat_template is None:
            raise RequestError("the model has no chat template; use `foreword generate --raw`")
        self._llm = llm
        self._numbers = itertools.count()
        self.params = params
        self.system: str | None = None
        self.turns: list[Turn] = []
        self.speculation: Mapping[str, Any] | None = None  # None: plain decoding
        self.adapter = ""  # adapter name; empty: the base model
        self.last_drafts: tuple[DraftShown, ...] = ()  # of the last answer, one per pass
        self.last = Tally()  # statistics of the last answer
        self.total = Tally()  # of all answers
        if speculation is not None:
            self.use(speculation)

    def use(self, speculation: Mapping[str, Any]) -> SpeculationConfig:
        """Set the drafter; raise `RequestError` and change nothing if it is not possible."""
        config = SpeculationConfig.parse(speculation)
        try:
            # Create the drafter now, not with the next question.
            self._llm.engine.drafters.resolve(config.as_mapping())
        except PagesLackRows:
            self._llm.offer([config])
        self.speculation = config.as_mapping()
        return config

    def set_params(self, **changes: Any) -> None:  # noqa: ANN401 - fields of SamplingParams
        """Change sampling parameters; raise `RequestError` and change nothing for invalid values."""
        changed = replace(self.params, **changes)
        check_temperature(changed.temperature)
        self.params = changed

    def set_system(self, text: str | None) -> None:
        """Set or remove the system message; raise if the model's template does not support one."""
        self._encode(text, [], "?")
        self.system = text

    def token_text(self, token: int) -> str:
        return token_text(self._llm.tokenizer, token)

    def reset(self) -> None:
        """Forget all turns, but keep settings and the system message."""
        self.turns.clear()

    @property
    def messages(self) -> list[Message]:
        """The conversation as messages."""
        return _messages(self.system, self.turns)

    def plan(self, question: str) -> Plan:
        """Tokenize the next question without the oldest turns if the context would overflow.

        Nothing is dropped yet. Raise `RequestError` if the question does not fit even alone.
        """
        return self._plan(question, self.turns)

    def plan_retry(self) -> Plan:
        """Tokenize the newest question again; its new answer replaces the old one."""
        if not self.turns:
            raise RequestError("/retry: nothing was answered yet")
        *before, newest = self.turns
        return replace(self._plan(newest.question, before), is_retry=True)

    def _plan(self, question: str, turns: list[Turn]) -> Plan:
        limit = self._llm.engine.max_model_len
        most_prompt_tokens = limit - min(self.params.max_tokens, limit // 2)
        for dropped in range(len(turns) + 1):
            ids = self._encode(self.system, turns[dropped:], question)
            if len(ids) <= most_prompt_tokens:
                return Plan(question, tuple(ids), dropped)
        if len(ids) >= limit:
            raise RequestError(f"the message has {len(ids)} tokens, the context {limit}; shorten it")
        return Plan(question, tuple(ids), len(turns))

    def answer(self, plan: Plan, show: Show, interrupted: Interrupted) -> AnswerEnd:
        """Answer a planned question, piece by piece, until it ends or is interrupted.

        An empty answer is not kept: its question is dropped, or after a retry the previous answer stays.
        """
        reader, pieces = PieceReader(self._llm.tokenizer), []
        drafts: list[DraftShown] = []
        end: AnswerDelta | None = None
        with closing(self._deltas(plan, interrupted)) as deltas:
            for delta in deltas:
                drafts += delta.drafts
                for piece in reader.read(delta):
                    pieces.append(piece.text)
                    show(piece)
                end = delta
        if end is None or end.finish_reason is None or end.stats is None:
            raise RuntimeError("the engine has left an answer without an end")
        self.last, self.last_drafts = Tally.of(end.stats), tuple(drafts)
        self.total += self.last
        del self.turns[: plan.dropped]
        text = "".join(pieces)
        if text:
            self.turns[len(self.turns) - plan.is_retry :] = [Turn(plan.question, text)]
        return AnswerEnd(text, end.finish_reason, end.error, self.last)

    def _deltas(self, plan: Plan, interrupted: Interrupted) -> Generator[AnswerDelta]:
        """Yield the parts of the answer as the engine commits them."""
        engine, name = self._llm.engine, f"chat-{next(self._numbers)}"
        setting = False if self.speculation is None else self.speculation
        new = NewRequest(
            name, plan.prompt_ids, self.params, TENANT, setting, progress=True, adapter=self.adapter
        )
        engine.add(new)
        try:
            while engine.has_requests:
                yield from (engine.abort(name) if interrupted() else engine.step())
        finally:
            engine.abort(name)  # if the generator was closed early

    def _encode(self, system: str | None, turns: list[Turn], question: str) -> list[int]:
        messages = [*_messages(system, turns), {"role": "user", "content": question}]
        return self._llm.tokenizer.encode_chat(messages)


def check_temperature(temperature: float) -> None:
    """Raise `RequestError` for a temperature above the chat API's range."""
    if temperature > MAX_TEMPERATURE:
        raise RequestError(f"temperature must be in 0 .. {MAX_TEMPERATURE}, not {temperature:g}")


def _messages(system: str | None, turns: list[Turn]) -> list[Message]:
    messages: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    for turn in turns:
        messages += [
            {"role": "user", "content": turn.question},
            {"role": "assistant", "content": turn.answer},
        ]
    return messages
