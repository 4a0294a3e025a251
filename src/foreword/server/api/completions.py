"""`POST /v1/completions`."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from msgspec import UNSET, UnsetType
from msgspec.structs import astuple
from msgspec.structs import replace as with_fields

from foreword.acceptance.logprobs import TokenLogprobs
from foreword.acceptance.params import SamplingParams
from foreword.engine.messages import AnswerDelta, NewRequest
from foreword.engine.outputs import Answer, Costs
from foreword.engine.prompts import filling
from foreword.models.tokenization.tokenizer import Tokenizer
from foreword.server.api.answer_types import (
    AnswerUsage,
    Choice,
    Completion,
    CompletionLogprobs,
    OpenAIDialect,
    new_id,
)
from foreword.server.api.answering import AnswerJob
from foreword.server.api.entry import AnswerRoute, new_request
from foreword.server.api.request_types import CompletionRequest
from foreword.server.context import ServerContext
from foreword.server.middleware import ApiCaller


class Echo:
    """The prompts that a request with `echo` returns before its answers.

    With `max_tokens` 0, the response has only the prompts: the token that the engine generates is left out.
    """

    def __init__(self, tokenizer: Tokenizer, body: CompletionRequest) -> None:
        self.is_wanted = bool(body.echo)
        self._hides_answer = body.max_tokens == 0
        self._prompts = body.prompts()
        self._tokenizer = tokenizer

    def text(self, prompt: int) -> str:
        """Return the prompt's text as given or decoded; empty without echo."""
        if not self.is_wanted:
            return ""
        given = self._prompts[prompt]  # text or token ids
        return given if isinstance(given, str) else self._tokenizer.decode(given, skip_special_tokens=False)

    def without_answer(self, delta: AnswerDelta) -> AnswerDelta:
        """Return the delta without the generated token if `max_tokens` is 0."""
        return replace(delta, text="", token_ids=(), logprobs=()) if self._hides_answer else delta

    def usage(self, usage: AnswerUsage) -> AnswerUsage:
        """Return the token counts without the generated token if `max_tokens` is 0."""
        if not self._hides_answer:
            return usage
        return with_fields(usage, completion_tokens=0, total_tokens=usage.prompt_tokens)


async def completion_job(context: ServerContext, body: CompletionRequest, caller: ApiCaller) -> AnswerJob:
    """Tokenize the prompts of a request."""

    def refine(params: SamplingParams) -> SamplingParams:
        params = filling(context.prompts.tokenizer, params, body.suffix)
        if body.echo and body.logprobs is not None and params.prompt_logprobs is None:
            return replace(params, prompt_logprobs=body.logprobs)
        return params

    answer_id = new_id("cmpl")
    requests = []
    for number, prompt in enumerate(body.prompts()):
        ids = await context.prompts.text(prompt, body, suffix=body.suffix)
        requests.append(await new_request(context, body, caller, f"{answer_id}-{number}", ids, refine))
    return AnswerJob(requests, CompletionDialect(context, body, answer_id, requests), bool(body.stream))


COMPLETIONS = AnswerRoute(CompletionRequest, completion_job)


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
        self._sent_prompts: set[int] = set()  # choices whose prompt's token ids were returned
        self._offsets: dict[int, int] = {}  # choice -> position of its next token in the text
        # prompt -> its log-probabilities, which the engine returns only with the first of n answers
        self._prompt_logprobs: dict[int, Sequence[TokenLogprobs]] = {}

    def opening(self) -> Iterable[Completion]:
        """Yield the prompts, if echoed."""
        if self._echo.is_wanted:
            for choice in range(len(self._sent_tokens)):
                yield self._completion([Choice(choice, self._echo.text(choice // self._n))], self.chunk_kind)

    def chunk(self, choice: int, delta: AnswerDelta) -> Completion | None:
        is_last = self._costs.note(delta)
        delta = self._echo.without_answer(delta)
        usage = self._count_chunk_usage(choice, len(delta.token_ids))
        is_reported = delta.text or delta.finish_reason or delta.prompt_logprobs
        if not is_reported and not ((self._wants_logprobs or self._wants_token_ids) and delta.token_ids):
            return None
        part = self._choice(choice, delta.text, delta)
        return self._completion([part], self.chunk_kind, self._costs if is_last else None, usage=usage)

    def whole(self, answers: Sequence[Answer], costs: Costs) -> Completion:
        choices = []
        for number, answer in enumerate(answers):
            delta = self._echo.without_answer(answer.whole)
            choices.append(self._choice(number, self._echo.text(number // self._n) + delta.text, delta))
        return self._completion(choices, self.kind, costs, usage=self._usage_of_costs(costs))

    def _usage_of_costs(self, costs: Costs) -> AnswerUsage:
        return self._echo.usage(super()._usage_of_costs(costs))

    def _choice(self, number: int, text: str, delta: AnswerDelta) -> Choice:
        choice = Choice(
            number, text, prompt_token_ids=self._new_prompt_ids(number), **self._end_fields(delta)
        )
        if delta.prompt_logprobs:
            self._prompt_logprobs[number // self._n] = delta.prompt_logprobs
            if self._wants_prompt_logprobs:
                choice.prompt_logprobs = self._logprobs.prompt(delta.prompt_logprobs)
        choice.logprobs = self._format_logprobs(number, delta.logprobs)
        return choice

    def _new_prompt_ids(self, choice: int) -> list[int] | UnsetType:
        """Return the prompt's token ids for a choice's first chunk, if requested; later chunks would repeat them."""
        if not self._wants_token_ids or choice in self._sent_prompts:
            return UNSET
        self._sent_prompts.add(choice)
        return self._prompt_ids(choice)

    def _format_logprobs(self, choice: int, entries: Sequence[TokenLogprobs]) -> CompletionLogprobs | None:
        """Return a choice's new log-probabilities; the first ones follow those of an echoed prompt."""
        if not self._wants_logprobs:
            return None
        offset = self._offsets.get(choice)  # None: the first ones
        logprobs = CompletionLogprobs([], [], [], [])
        if self._echo.is_wanted and offset is None:
            prompt_entries = self._prompt_logprobs.get(choice // self._n, ())
            logprobs, offset = self._logprobs.echoed(self._prompt_ids(choice), prompt_entries)
        new_logprobs, self._offsets[choice] = self._logprobs.completion(entries, offset or 0)
        for column, new_values in zip(astuple(logprobs), astuple(new_logprobs), strict=True):
            column.extend(new_values)
        return logprobs
