"""`POST /v1/completions`."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from time import time

from msgspec import UNSET
from msgspec.structs import replace as with_fields

from foreword.acceptance.logprobs import TokenLogprobs
from foreword.engine.messages import AnswerDelta, NewRequest
from foreword.engine.outputs import Answer, Costs
from foreword.engine.prompts import filling
from foreword.models.tokenization.tokenizer import Tokenizer
from foreword.server.api.answer_types import (
    AnswerUsage,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    LogprobWriter,
    extras_of,
    usage_of,
)
from foreword.server.api.answering import AnswerJob
from foreword.server.api.identity import ApiCaller, new_id
from foreword.server.api.prompts import room_for_answer
from foreword.server.api.request_types import CompletionRequest
from foreword.server.api.sampling_types import check_logprobs
from foreword.server.api.streaming import StreamUsage
from foreword.server.context import ServerContext
from foreword.server.errors import ApiError
from foreword.server.settings import ServerSettings


class Echo:
    """The prompts of a request. With `max_tokens` 0 nothing else is wanted: an engine draws a token all the same."""

    def __init__(self, tokenizer: Tokenizer, body: CompletionRequest, requests: Sequence[NewRequest]) -> None:
        self.is_wanted = bool(body.echo)
        self._is_alone = body.max_tokens == 0
        self._prompts = body.prompts()
        self._requests = requests
        self._tokenizer = tokenizer

    def prompt_ids(self, prompt: int) -> list[int]:
        return list(self._requests[prompt].prompt_token_ids)

    def text(self, prompt: int) -> str:
        """The prompt as it was given, or as its tokens read; nothing if it is not wanted."""
        if not self.is_wanted:
            return ""
        given = self._prompts[prompt]
        return given if isinstance(given, str) else self._tokenizer.decode(given, skip_special_tokens=False)

    def without_answer(self, delta: AnswerDelta, answer: Answer | None = None) -> AnswerDelta:
        """Return the delta, or the whole answer as one, without the token that max_tokens = 0 excludes."""
        if answer is not None:
            delta = replace(
                delta, text=answer.text, token_ids=tuple(answer.token_ids), logprobs=tuple(answer.logprobs)
            )
        return replace(delta, text="", token_ids=(), logprobs=()) if self._is_alone else delta

    def usage(self, counted: AnswerUsage) -> AnswerUsage:
        if not self._is_alone:
            return counted
        return with_fields(counted, completion_tokens=0, total_tokens=counted.prompt_tokens)


COMPLETION_TOKENS = 16
"""Longest answer of a request without max_tokens: OpenAI's default."""


async def completion_job(context: ServerContext, body: CompletionRequest, caller: ApiCaller) -> AnswerJob:
    """Encode the prompts and word the answer."""
    limits, engine = context.settings.limits, context.engine.limits()
    answer_id = new_id("cmpl")
    speculation = context.speculation(body.speculation)
    requests = []
    for number, prompt in enumerate(body.prompts()):
        ids = await context.prompts.text(prompt, body, suffix=body.suffix)
        room = room_for_answer(ids, None, engine.max_model_len, limits.prompt_tokens)
        wanted = min(COMPLETION_TOKENS, room) if body.max_tokens is None else max(body.max_tokens, 1)
        max_tokens = room_for_answer(ids, wanted, engine.max_model_len, limits.prompt_tokens)
        params = body.sampling_params(max_tokens, body.logprobs, context.settings.sampling)
        params = filling(context.prompts.tokenizer, params, body.suffix)
        if body.echo and body.logprobs is not None and params.prompt_logprobs is None:
            params = replace(params, prompt_logprobs=body.logprobs)
        name = f"{answer_id}-{number}"
        labels = body.labels(context.settings.model_name, bool(body.stream))
        requests.append(NewRequest(name, tuple(ids), params, caller.tenant, speculation, labels=labels))
    return AnswerJob(requests, CompletionDialect(context, body, answer_id, requests), bool(body.stream))


def check_completion(body: CompletionRequest, settings: ServerSettings) -> int:
    """Refuse what the settings forbid; the number of answers that are asked for."""
    body.check_limits(settings.limits)
    check_logprobs(body.logprobs, settings.limits, "logprobs")
    if body.max_tokens == 0 and not body.echo:
        raise ApiError(400, "max_tokens can be 0 only with echo", param="max_tokens")
    if body.echo and body.suffix:
        raise ApiError(
            400,
            "echo and suffix exclude each other: the prompt does not stand before the answer alone; "
            "leave echo out",
            param="echo",
        )
    _check_best_of(body.best_of, body.n or 1)
    prompts = len(body.prompts())
    if prompts > settings.limits.prompts:
        raise ApiError(400, f"this server takes at most {settings.limits.prompts} prompts", param="prompt")
    return prompts * (body.n or 1)


def _check_best_of(best_of: int | None, n: int) -> None:
    if best_of is None or best_of == n:
        return
    if best_of < n:
        raise ApiError(400, f"best_of is {best_of}, and n is {n}; it must be at least n", param="best_of")
    raise ApiError(
        400,
        "best_of above n is not supported by this server: answers that are not returned are not generated; "
        "ask for n of them with logprobs and choose",
        param="best_of",
    )


class CompletionDialect:
    """The older of OpenAI's two forms."""

    def __init__(
        self, context: ServerContext, body: CompletionRequest, answer_id: str, requests: Sequence[NewRequest]
    ) -> None:
        self._settings = context.settings
        self._model = body.model or context.settings.model_name
        self._logprobs = LogprobWriter(context.prompts.tokenizer)
        self._wants_logprobs = body.logprobs is not None
        lengths = [len(request.prompt_token_ids) for request in requests]
        self._n = body.n or 1
        self._usage = StreamUsage(body.stream_options, lengths, self._n)
        self._answers = len(requests) * self._n
        self._costs = Costs(self._answers)
        self._echo = Echo(context.prompts.tokenizer, body, requests)
        self._lists_tokens = bool(body.return_token_ids)
        self._wants_prompt_logprobs = body.prompt_logprobs is not None
        self._id = answer_id
        self._created = int(time())
        self._offsets: dict[int, int] = {}  # choice -> where its next token's text starts
        self._known: dict[int, Sequence[TokenLogprobs]] = {}  # of prompts, which the first of n answers tells

    def _frame(self, choices: list[CompletionChoice]) -> Completion:
        settings = self._settings
        return Completion(
            self._id, self._created, self._model, choices, system_fingerprint=settings.fingerprint
        )

    def opening(self) -> Iterable[Completion]:
        """The prompts, if they are wanted."""
        for choice in range(self._answers) if self._echo.is_wanted else ():
            yield self._frame([CompletionChoice(choice, self._echo.text(choice // self._n))])

    def chunk(self, choice: int, delta: AnswerDelta) -> Completion | None:
        """New text, or an end."""
        is_last = self._costs.note(delta)
        delta = self._echo.without_answer(delta)
        usage = self._usage.grow(choice, len(delta.token_ids))
        reported = delta.text or delta.finish_reason or delta.prompt_logprobs
        if not reported and not ((self._wants_logprobs or self._lists_tokens) and delta.token_ids):
            return None
        if delta.prompt_logprobs:
            self._known[choice // self._n] = delta.prompt_logprobs
        gained = CompletionChoice(choice, delta.text, self._written(choice, delta.logprobs))
        _note_end(gained, delta)
        self._add_tokens(gained, delta.token_ids)
        if delta.prompt_logprobs and self._wants_prompt_logprobs:
            gained.prompt_logprobs = self._logprobs.prompt(delta.prompt_logprobs)
        frame = self._frame([gained])
        frame.usage = usage
        if is_last:
            self._add_extras(frame, self._costs)
        return frame

    def closing(self) -> Iterable[Completion]:
        """The number of tokens, in a chunk without choices, if that is wanted."""
        if not self._usage.is_wanted:
            return ()
        frame = self._frame([])
        frame.usage = self._echo.usage(usage_of(self._costs.total()))
        return (frame,)

    def whole(self, answers: Sequence[Answer], costs: Costs) -> Completion:
        choices = []
        for number, answer in enumerate(answers):
            self._known[number // self._n] = answers[number - number % self._n].prompt_logprobs
            own = self._echo.without_answer(answer.last, answer)
            text = self._echo.text(number // self._n) + own.text
            choice = CompletionChoice(number, text, self._written(number, own.logprobs))
            _note_end(choice, answer.last)
            self._add_tokens(choice, own.token_ids)
            if answer.prompt_logprobs and self._wants_prompt_logprobs:
                choice.prompt_logprobs = self._logprobs.prompt(answer.prompt_logprobs)
            choices.append(choice)
        frame = self._frame(choices)
        frame.usage = self._echo.usage(usage_of(costs.total()))
        self._add_extras(frame, costs)
        return frame

    def _add_extras(self, frame: Completion, costs: Costs) -> None:
        extras = extras_of(costs, self._settings.show_speculation)
        frame.timings, frame.speculation = extras.timings, extras.speculation

    def _add_tokens(self, choice: CompletionChoice, tokens: Sequence[int]) -> None:
        if self._lists_tokens:
            choice.token_ids = list(tokens)
            choice.prompt_token_ids = self._echo.prompt_ids(choice.index // self._n)

    def _written(self, choice: int, entries: Sequence[TokenLogprobs]) -> CompletionLogprobs | None:
        """Of what is new; with echo, of the prompt before it."""
        if not self._wants_logprobs:
            return None
        begin = self._offsets.get(choice)
        written = CompletionLogprobs([], [], [], [])
        if self._echo.is_wanted and begin is None:
            prompt = choice // self._n
            known = self._known.get(prompt, ())
            written, begin = self._logprobs.echoed(self._echo.prompt_ids(prompt), known)
        more, self._offsets[choice] = self._logprobs.completion(entries, begin or 0)
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            getattr(written, name).extend(getattr(more, name))
        return written


def _note_end(choice: CompletionChoice, delta: AnswerDelta) -> None:
    choice.finish_reason = delta.finish_reason
    choice.stop_reason = delta.stop_reason
    choice.seed = UNSET if delta.finish_reason is None else delta.seed
