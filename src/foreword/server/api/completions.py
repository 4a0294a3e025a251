"""`POST /v1/completions`."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from msgspec import UNSET
from msgspec.structs import astuple
from msgspec.structs import replace as with_fields

from foreword.acceptance.logprobs import TokenLogprobs
from foreword.engine.messages import AnswerDelta, NewRequest
from foreword.engine.outputs import Answer, Costs
from foreword.engine.prompts import filling
from foreword.models.tokenization.tokenizer import Tokenizer
from foreword.server.api.answer_types import AnswerUsage, Choice, Completion, CompletionLogprobs
from foreword.server.api.answering import AnswerJob
from foreword.server.api.dialects import OpenAIDialect
from foreword.server.api.entry import AnswerRoute
from foreword.server.api.identity import ApiCaller, new_id
from foreword.server.api.prompts import room_for_answer
from foreword.server.api.request_types import CompletionRequest
from foreword.server.api.sampling_types import check_logprobs
from foreword.server.context import ServerContext
from foreword.server.errors import ApiError
from foreword.server.settings import ServerSettings


class Echo:
    """The prompts to echo.

    With `max_tokens` 0 only the prompt is returned, although the engine generates one token.
    """

    def __init__(self, tokenizer: Tokenizer, body: CompletionRequest) -> None:
        self.is_wanted = bool(body.echo)
        self._is_alone = body.max_tokens == 0
        self._prompts = body.prompts()
        self._tokenizer = tokenizer

    def text(self, prompt: int) -> str:
        """Return the prompt's text as given or decoded; empty without echo."""
        if not self.is_wanted:
            return ""
        given = self._prompts[prompt]
        return given if isinstance(given, str) else self._tokenizer.decode(given, skip_special_tokens=False)

    def without_answer(self, delta: AnswerDelta) -> AnswerDelta:
        """Return the delta without the generated token if `max_tokens` is 0."""
        return replace(delta, text="", token_ids=(), logprobs=()) if self._is_alone else delta

    def usage(self, counted: AnswerUsage) -> AnswerUsage:
        if not self._is_alone:
            return counted
        return with_fields(counted, completion_tokens=0, total_tokens=counted.prompt_tokens)


COMPLETION_TOKENS = 16
"""OpenAI's default of max_tokens."""


async def completion_job(
    context: ServerContext,
    body: CompletionRequest,
    caller: ApiCaller,
    default: int | None = COMPLETION_TOKENS,
) -> AnswerJob:
    """Tokenize the prompts and create the job; `default` replaces missing max_tokens, None: the remaining context."""
    limits, engine = context.settings.limits, context.engine.limits()
    answer_id = new_id("cmpl")
    speculation = context.speculation(body.speculation)
    requests = []
    for number, prompt in enumerate(body.prompts()):
        ids = await context.prompts.text(prompt, body, suffix=body.suffix)
        room = room_for_answer(ids, None, engine.max_model_len, limits.prompt_tokens)
        wanted = min(default or room, room) if body.max_tokens is None else max(body.max_tokens, 1)
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
    """Check limits; return the number of requested answers."""
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


COMPLETIONS = AnswerRoute(CompletionRequest, check_completion, completion_job)


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


class CompletionDialect(OpenAIDialect):
    """Format of `/v1/completions`."""

    kind = chunk_kind = "text_completion"

    def __init__(
        self, context: ServerContext, body: CompletionRequest, answer_id: str, requests: Sequence[NewRequest]
    ) -> None:
        super().__init__(context, body, answer_id, requests)
        self._wants_logprobs = body.logprobs is not None
        self._wants_prompt_logprobs = body.prompt_logprobs is not None
        self._echo = Echo(context.prompts.tokenizer, body)
        self._offsets: dict[int, int] = {}  # choice -> text offset of its next token
        self._known: dict[int, Sequence[TokenLogprobs]] = {}  # of prompts, from the first of n answers

    def opening(self) -> Iterable[Completion]:
        """Yield the prompts, if echoed."""
        for choice in range(len(self._tokens)) if self._echo.is_wanted else ():
            yield self._frame([Choice(choice, self._echo.text(choice // self._n))], self.chunk_kind)

    def chunk(self, choice: int, delta: AnswerDelta) -> Completion | None:
        """Return the new text, or the end."""
        is_last = self._costs.note(delta)
        delta = self._echo.without_answer(delta)
        usage = self._usage(choice, len(delta.token_ids))
        reported = delta.text or delta.finish_reason or delta.prompt_logprobs
        if not reported and not ((self._wants_logprobs or self._lists_tokens) and delta.token_ids):
            return None
        gained = self._choice(choice, delta.text, delta)
        return self._frame([gained], self.chunk_kind, self._costs if is_last else None, usage=usage)

    def whole(self, answers: Sequence[Answer], costs: Costs) -> Completion:
        choices = []
        for number, answer in enumerate(answers):
            own = self._echo.without_answer(answer.whole)
            choices.append(self._choice(number, self._echo.text(number // self._n) + own.text, own))
        return self._frame(choices, self.kind, costs, usage=self._counted(costs))

    def _counted(self, costs: Costs) -> AnswerUsage:
        return self._echo.usage(super()._counted(costs))

    def _choice(self, number: int, text: str, gained: AnswerDelta) -> Choice:
        scores = gained.prompt_logprobs
        if scores:
            self._known[number // self._n] = scores
        return Choice(
            number,
            text,
            logprobs=self._written(number, gained.logprobs),
            prompt_logprobs=self._logprobs.prompt(scores)
            if scores and self._wants_prompt_logprobs
            else UNSET,
            prompt_token_ids=self._prompt_ids(number) if self._lists_tokens else UNSET,
            **self._ending(gained),
        )

    def _written(self, choice: int, entries: Sequence[TokenLogprobs]) -> CompletionLogprobs | None:
        """Format new log-probabilities, including the prompt's with echo."""
        if not self._wants_logprobs:
            return None
        begin = self._offsets.get(choice)
        written = CompletionLogprobs([], [], [], [])
        if self._echo.is_wanted and begin is None:
            known = self._known.get(choice // self._n, ())
            written, begin = self._logprobs.echoed(self._prompt_ids(choice), known)
        more, self._offsets[choice] = self._logprobs.completion(entries, begin or 0)
        for one, other in zip(astuple(written), astuple(more), strict=True):
            one.extend(other)
        return written
