"""`POST /v1/chat/completions`."""

from collections.abc import Iterable, Sequence

from msgspec import UNSET, UnsetType

from foreword.engine.messages import AnswerDelta, NewRequest
from foreword.engine.outputs import Answer, Costs
from foreword.server.api.answer_types import (
    ChatDelta,
    ChatMessage,
    Choice,
    Completion,
    OpenAIDialect,
    PromptLogprobs,
    new_id,
    usage_of,
)
from foreword.server.api.answering import AnswerJob
from foreword.server.api.conversation import Conversation
from foreword.server.api.entry import AnswerRoute
from foreword.server.api.request_types import ChatRequest
from foreword.server.context import ServerContext
from foreword.server.middleware import ApiCaller


async def chat_conversation(context: ServerContext, body: ChatRequest) -> Conversation:
    return await Conversation.of(
        context,
        body,
        body.messages,
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=bool(body.continue_final_message),
        variables=body.chat_template_kwargs,
    )


async def chat_job(context: ServerContext, body: ChatRequest, caller: ApiCaller) -> AnswerJob:
    conversation = await chat_conversation(context, body)
    request = await conversation.request(context, body, caller, new_id("chatcmpl"))
    return AnswerJob([request], ChatDialect(context, body, request, conversation), bool(body.stream))


CHAT = AnswerRoute(ChatRequest, chat_job)


class ChatDialect(OpenAIDialect):
    """Format of `/v1/chat/completions`."""

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def __init__(
        self, context: ServerContext, body: ChatRequest, request: NewRequest, conversation: Conversation
    ) -> None:
        super().__init__(context, body, request.request_id, [request])
        self._wants_logprobs = bool(body.logprobs)
        self._readers = [conversation.reader() for _ in range(self._n)]

    def opening(self) -> Iterable[Completion]:
        """Yield a chunk with the role for every choice."""
        for choice in range(self._n):
            opened = Choice(choice, delta=ChatDelta(role="assistant", content=""))
            prompt_ids = self._prompt_ids(0) if self._wants_token_ids and choice == 0 else UNSET
            yield self._completion(
                [opened], self.chunk_kind, usage=self._count_chunk_usage(choice), prompt_token_ids=prompt_ids
            )

    def chunk(self, choice: int, delta: AnswerDelta) -> Completion | None:
        is_last = self._costs.note(delta)
        usage = self._count_chunk_usage(choice, len(delta.token_ids))
        chat_delta = self._chat_delta(choice, delta)
        has_content = chat_delta != ChatDelta() or delta.finish_reason or delta.prompt_logprobs
        has_token_fields = (self._wants_logprobs or self._wants_token_ids) and delta.token_ids
        if not has_content and not has_token_fields:
            return None
        return self._completion(
            [self._choice(choice, delta, delta=chat_delta)],
            self.chunk_kind,
            self._costs if is_last else None,
            usage=usage,
            prompt_logprobs=self._prompt_logprobs(delta),
        )

    def whole(self, answers: Sequence[Answer], costs: Costs) -> Completion:
        choices = []
        for number, answer in enumerate(answers):
            message = self._message(number, answer.whole.text)
            choices.append(self._choice(number, answer.whole, message=message))
        return self._completion(
            choices,
            self.kind,
            costs,
            usage=usage_of(costs.total()),
            prompt_logprobs=self._prompt_logprobs(answers[0].whole),
            prompt_token_ids=self._prompt_ids(0) if self._wants_token_ids else UNSET,
        )

    def _choice(self, number: int, answer_delta: AnswerDelta, **content: ChatMessage | ChatDelta) -> Choice:
        """Return a choice with the fields of an engine's delta; `content` is its `message` or `delta`."""
        logprobs = self._logprobs.chat(answer_delta.logprobs) if self._wants_logprobs else None
        reason = self._readers[number].finish_reason(answer_delta.finish_reason)
        end_fields = self._end_fields(answer_delta) | {"finish_reason": reason}
        return Choice(number, logprobs=logprobs, **content, **end_fields)  # type: ignore[arg-type]

    def _prompt_logprobs(self, delta: AnswerDelta) -> PromptLogprobs | UnsetType:
        return self._logprobs.prompt(delta.prompt_logprobs) if delta.prompt_logprobs else UNSET

    def _chat_delta(self, choice: int, delta: AnswerDelta) -> ChatDelta:
        part = self._readers[choice].feed(delta.text, delta.finish_reason is not None)
        return ChatDelta(
            reasoning_content=part.reasoning or UNSET,
            content=part.text or UNSET,
            tool_calls=part.calls or UNSET,
        )

    def _message(self, choice: int, text: str) -> ChatMessage:
        part = self._readers[choice].whole(text)
        return ChatMessage(
            part.text, reasoning_content=part.reasoning or UNSET, tool_calls=part.calls or UNSET
        )
