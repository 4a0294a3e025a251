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
        """Yield the role of every choice."""
        for choice in range(self._n):
            opened = Choice(choice, delta=ChatDelta(role="assistant", content=""))
            listed = self._prompt_ids(0) if self._lists_tokens and choice == 0 else UNSET
            yield self._frame([opened], self.chunk_kind, usage=self._usage(choice), prompt_token_ids=listed)

    def chunk(self, choice: int, delta: AnswerDelta) -> Completion | None:
        is_last = self._costs.note(delta)
        usage = self._usage(choice, len(delta.token_ids))
        gained = self._gained(choice, delta)
        is_reported = gained != ChatDelta() or delta.finish_reason or delta.prompt_logprobs
        if not is_reported and not ((self._wants_logprobs or self._lists_tokens) and delta.token_ids):
            return None
        return self._frame(
            [self._choice(choice, delta, delta=gained)],
            self.chunk_kind,
            self._costs if is_last else None,
            usage=usage,
            prompt_logprobs=self._of_prompt(delta),
        )

    def whole(self, answers: Sequence[Answer], costs: Costs) -> Completion:
        wholes = [answer.whole for answer in answers]
        return self._frame(
            [self._choice(n, one, message=self._message(n, one.text)) for n, one in enumerate(wholes)],
            self.kind,
            costs,
            usage=usage_of(costs.total()),
            prompt_logprobs=self._of_prompt(wholes[0]),
            prompt_token_ids=self._prompt_ids(0) if self._lists_tokens else UNSET,
        )

    def _choice(self, number: int, gained: AnswerDelta, **content: ChatMessage | ChatDelta) -> Choice:
        logprobs = self._logprobs.chat(gained.logprobs) if self._wants_logprobs else None
        reason = self._readers[number].finish_reason(gained.finish_reason)
        ending = self._ending(gained) | {"finish_reason": reason}
        return Choice(number, logprobs=logprobs, **content, **ending)  # type: ignore[arg-type]

    def _of_prompt(self, delta: AnswerDelta) -> PromptLogprobs | UnsetType:
        return self._logprobs.prompt(delta.prompt_logprobs) if delta.prompt_logprobs else UNSET

    def _gained(self, choice: int, delta: AnswerDelta) -> ChatDelta:
        read = self._readers[choice].feed(delta.text, delta.finish_reason is not None)
        return ChatDelta(
            reasoning_content=read.reasoning or UNSET,
            content=read.text or UNSET,
            tool_calls=read.calls or UNSET,
        )

    def _message(self, choice: int, text: str) -> ChatMessage:
        read = self._readers[choice].whole(text)
        return ChatMessage(
            read.text, reasoning_content=read.reasoning or UNSET, tool_calls=read.calls or UNSET
        )
