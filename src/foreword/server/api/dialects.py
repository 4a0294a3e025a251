"""How routes word their answers: what every dialect offers, and what OpenAI's two older ones share."""

from collections.abc import Iterable, Sequence
from time import time
from typing import Any, Protocol

from msgspec import UNSET, UnsetType

from foreword.engine.messages import AnswerDelta, NewRequest
from foreword.engine.outputs import Answer, Costs
from foreword.server.api.answer_types import (
    AnswerUsage,
    Choice,
    Completion,
    LogprobWriter,
    extras_of,
    usage_of,
)
from foreword.server.api.request_types import OpenAIFields
from foreword.server.context import ServerContext


class Dialect(Protocol):
    """How a route words its answers."""

    def opening(self) -> Iterable[object]:
        """Events before the first text."""
        ...

    def chunk(self, choice: int, delta: AnswerDelta) -> object | None:
        """The event for a delta, or a list of them; None if there is nothing to tell."""
        ...

    def closing(self) -> Iterable[object]:
        """Events after the last text."""
        ...

    def whole(self, answers: Sequence[Answer], costs: Costs) -> object:
        """The answer of a request that is not streamed."""
        ...


class OpenAIDialect:
    """The frame around choices, with token counts and costs."""

    kind: str  # `object` of whole answers
    chunk_kind: str  # and of a stream's chunks

    def __init__(
        self, context: ServerContext, body: OpenAIFields, answer_id: str, requests: Sequence[NewRequest]
    ) -> None:
        options = body.stream_options
        self._settings = context.settings
        self._model = body.model or context.settings.model_name
        self._logprobs = LogprobWriter(context.prompts.tokenizer)
        self._n = body.n or 1
        self._wants_usage = bool(options and options.include_usage)
        self._wants_usage_always = bool(options and options.continuous_usage_stats)
        self._lists_tokens = bool(body.return_token_ids)
        self._requests = requests
        self._tokens = [0] * (len(requests) * self._n)  # by choice, as its chunks go out
        self._costs = Costs(len(self._tokens))
        self._id = answer_id
        self._created = int(time())

    def closing(self) -> Iterable[Completion]:
        """The number of tokens, in a chunk without choices, if that is wanted."""
        if self._wants_usage:
            yield self._frame([], self.chunk_kind, usage=self._counted(self._costs))

    def _counted(self, costs: Costs) -> AnswerUsage:
        return usage_of(costs.total())

    def _frame(self, choices: list[Choice], kind: str, costs: Costs | None = None, **more: Any) -> Completion:  # noqa: ANN401 - fields of `Completion`
        """Choices with what stands around them; `costs` with the last of them."""
        extras = {} if costs is None else extras_of(costs, self._settings.show_speculation)
        return Completion(
            self._id, self._created, self._model, choices, kind, self._settings.fingerprint, **extras, **more
        )

    def _prompt_ids(self, choice: int) -> list[int]:
        return list(self._requests[choice // self._n].prompt_token_ids)

    def _ending(self, delta: AnswerDelta) -> dict[str, Any]:
        """Fields of a choice that its end has, and its token ids if they are wanted."""
        return {
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
            "seed": UNSET if delta.finish_reason is None else delta.seed,
            "token_ids": list(delta.token_ids) if self._lists_tokens else UNSET,
        }

    def _usage(self, choice: int, tokens: int = 0) -> AnswerUsage | UnsetType | None:
        """A choice has gained tokens; the `usage` of the chunk that reports them, if there is one.

        As in vLLM: of this choice up to here if every chunk is to say it, else null in all chunks but the last.
        """
        self._tokens[choice] += tokens
        if not self._wants_usage:
            return UNSET
        if not self._wants_usage_always:
            return None
        prompt, written = len(self._requests[choice // self._n].prompt_token_ids), self._tokens[choice]
        return AnswerUsage(prompt, written, prompt + written)
