"""`POST /v1/chat/completions`."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from time import time

from msgspec import UNSET, UnsetType

from foreword.acceptance.logprobs import TokenLogprobs
from foreword.engine.messages import AnswerDelta, NewRequest
from foreword.engine.outputs import Answer, Costs
from foreword.server.api.answer_types import (
    AnswerUsage,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    LogprobWriter,
    extras_of,
    usage_of,
)
from foreword.server.api.answering import AnswerJob
from foreword.server.api.identity import ApiCaller, new_id
from foreword.server.api.message_types import joined
from foreword.server.api.prompts import room_for_answer
from foreword.server.api.request_types import ChatRequest
from foreword.server.api.sampling_types import check_logprobs
from foreword.server.api.streaming import StreamUsage
from foreword.server.api.tool_use import ToolUse, ToolWriter, chosen_format, shown_messages, tool_use
from foreword.server.context import ServerContext
from foreword.server.settings import ServerSettings


async def chat_job(context: ServerContext, body: ChatRequest, caller: ApiCaller) -> AnswerJob:
    """Put the conversation into the model's template and word the answer."""
    answer_id = new_id("chatcmpl")
    speculation = context.speculation(body.speculation)
    tokenizer = context.prompts.tokenizer
    form = chosen_format(context.settings.tool_call_parser, tokenizer)
    use = tool_use(body.tools, body.tool_choice, body.parallel_tool_calls, form)
    ids = await context.prompts.chat(
        shown_messages(body.messages, use, form, tokenizer.takes_tools),
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=bool(body.continue_final_message),
        tools=use.shown() if use is not None and tokenizer.takes_tools else None,
        variables=body.chat_template_kwargs,
    )
    wanted = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    engine, limits = context.engine.limits(), context.settings.limits
    max_tokens = room_for_answer(ids, wanted, engine.max_model_len, limits.prompt_tokens)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    params = body.sampling_params(max_tokens, logprobs, context.settings.sampling)
    if use is not None:
        params = replace(params, structured=use.structured(params.structured))
    expected = None if body.prediction is None else joined(body.prediction.content)
    prediction = await context.prompts.prediction(expected, engine.max_model_len)
    labels = body.labels(context.settings.model_name, bool(body.stream))
    request = NewRequest(
        answer_id, tuple(ids), params, caller.tenant, speculation, prediction=prediction, labels=labels
    )
    return AnswerJob([request], ChatDialect(context, body, request, use), bool(body.stream))


def check_chat(body: ChatRequest, settings: ServerSettings) -> int:
    """Refuse what the settings forbid; the number of answers that are asked for."""
    body.check_limits(settings.limits)
    check_logprobs(body.top_logprobs, settings.limits, "top_logprobs")
    return body.n or 1


class ChatDialect:
    """The newer of OpenAI's two forms."""

    def __init__(
        self, context: ServerContext, body: ChatRequest, request: NewRequest, use: ToolUse | None = None
    ) -> None:
        self._settings = context.settings
        self._model = body.model or context.settings.model_name
        self._logprobs = LogprobWriter(context.prompts.tokenizer)
        self._wants_logprobs = bool(body.logprobs)
        self._n = body.n or 1
        self._usage = StreamUsage(body.stream_options, [len(request.prompt_token_ids)], self._n)
        self._costs = Costs(self._n)
        self._id = request.request_id
        self._prompt_ids = list(request.prompt_token_ids) if body.return_token_ids else None
        self._writers = [] if use is None else [ToolWriter(use) for _ in range(self._n)]
        self._created = int(time())

    def _chunk(self, choices: list[ChatChunkChoice], usage: AnswerUsage | UnsetType | None) -> ChatCompletion:
        return ChatCompletion(
            self._id,
            self._created,
            self._model,
            choices,
            object="chat.completion.chunk",
            system_fingerprint=self._settings.fingerprint,
            usage=usage,
        )

    def opening(self) -> Iterable[ChatCompletion]:
        """Whose message it is, for every choice."""
        for choice in range(self._n):
            opened = ChatChunkChoice(choice, ChatDelta(role="assistant", content=""))
            frame = self._chunk([opened], self._usage.grow(choice))
            if self._prompt_ids is not None and choice == 0:
                frame.prompt_token_ids = self._prompt_ids
            yield frame

    def chunk(self, choice: int, delta: AnswerDelta) -> ChatCompletion | None:
        """New text, or an end."""
        is_last = self._costs.note(delta)
        usage = self._usage.grow(choice, len(delta.token_ids))
        message = self._gained(choice, delta)
        lists_tokens = self._wants_logprobs or self._prompt_ids is not None
        is_told = message.content or message.tool_calls or delta.finish_reason or delta.prompt_logprobs
        if not is_told and not (lists_tokens and delta.token_ids):
            return None
        gained = ChatChunkChoice(
            choice,
            message,
            self._written(delta.logprobs),
            self._finish_reason(choice, delta.finish_reason),
            delta.stop_reason,
            UNSET if delta.finish_reason is None else delta.seed,
            UNSET if self._prompt_ids is None else list(delta.token_ids),
        )
        frame = self._chunk([gained], usage)
        if delta.prompt_logprobs:
            frame.prompt_logprobs = self._logprobs.prompt(delta.prompt_logprobs)
        if is_last:
            self._add_extras(frame, self._costs)
        return frame

    def closing(self) -> Iterable[ChatCompletion]:
        """The number of tokens, in a chunk without choices, if that is wanted."""
        return (self._chunk([], usage_of(self._costs.total())),) if self._usage.is_wanted else ()

    def whole(self, answers: Sequence[Answer], costs: Costs) -> ChatCompletion:
        choices = []
        for number, answer in enumerate(answers):
            message, logprobs = self._message(number, answer.text), self._written(answer.logprobs)
            last = answer.last
            reason = self._finish_reason(number, last.finish_reason)
            choice = ChatChoice(number, message, logprobs, reason, last.stop_reason, last.seed)
            if self._prompt_ids is not None:
                choice.token_ids = answer.token_ids
            choices.append(choice)
        frame = ChatCompletion(
            self._id,
            self._created,
            self._model,
            choices,
            system_fingerprint=self._settings.fingerprint,
        )
        if answers[0].prompt_logprobs:
            frame.prompt_logprobs = self._logprobs.prompt(answers[0].prompt_logprobs)
        if self._prompt_ids is not None:
            frame.prompt_token_ids = self._prompt_ids
        frame.usage = usage_of(costs.total())
        self._add_extras(frame, costs)
        return frame

    def _gained(self, choice: int, delta: AnswerDelta) -> ChatDelta:
        """What is new of a message."""
        if not self._writers:
            return ChatDelta(content=delta.text) if delta.text else ChatDelta()
        text, calls = self._writers[choice].feed(delta.text, delta.finish_reason is not None)
        return ChatDelta(content=text or UNSET, tool_calls=calls or UNSET)

    def _message(self, choice: int, text: str) -> ChatMessage:
        if not self._writers:
            return ChatMessage(text)
        content, calls = self._writers[choice].whole(text)
        return ChatMessage(content, tool_calls=calls or UNSET)

    def _finish_reason(self, choice: int, reason: str | None) -> str | None:
        return self._writers[choice].finish_reason(reason) if self._writers else reason

    def _add_extras(self, frame: ChatCompletion, costs: Costs) -> None:
        extras = extras_of(costs, self._settings.show_speculation)
        frame.timings, frame.speculation = extras.timings, extras.speculation

    def _written(self, entries: Sequence[TokenLogprobs]) -> ChatLogprobs | None:
        return self._logprobs.chat(entries) if self._wants_logprobs else None
