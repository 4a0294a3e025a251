"""Interface of response formats (dialects), and the common part of OpenAI's two older ones."""

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
    """Formats the answers of a route."""

    def opening(self) -> Iterable[object]:
        """Events before the first text."""
        ...

    def chunk(self, choice: int, delta: AnswerDelta) -> object | None:
        """Return the event, or list of events, for a delta; None: nothing to send."""
        ...

    def closing(self) -> Iterable[object]:
        """Events after the last text."""
        ...

    def whole(self, answers: Sequence[Answer], costs: Costs) -> object:
        """Return the body of a response that is not streamed."""
        ...


class OpenAIDialect:
    """Common fields around choices: token counts and costs."""

    kind: str  # `object` of complete responses
    chunk_kind: str  # `object` of stream chunks

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
        self._tokens = [0] * (len(requests) * self._n)  # tokens sent, by choice
        self._costs = Costs(len(self._tokens))
        self._id = answer_id
        self._created = int(time())

    def closing(self) -> Iterable[Completion]:
        """Yield a chunk without choices that has the token counts, if requested."""
        if self._wants_usage:
            yield self._frame([], self.chunk_kind, usage=self._counted(self._costs))

    def _counted(self, costs: Costs) -> AnswerUsage:
        return usage_of(costs.total())

    def _frame(self, choices: list[Choice], kind: str, costs: Costs | None = None, **more: Any) -> Completion:  # noqa: ANN401 - fields of `Completion`
        """Return a response around the choices; `costs` with the last of them."""
        extras = {} if costs is None else extras_of(costs, self._settings.show_speculation)
        return Completion(
            self._id, self._created, self._model, choices, kind, self._settings.fingerprint, **extras, **more
        )

    def _prompt_ids(self, choice: int) -> list[int]:
        return list(self._requests[choice // self._n].prompt_token_ids)

    def _ending(self, delta: AnswerDelta) -> dict[str, Any]:
        """Return the fields of a choice's end, and its token ids if requested."""
        return {
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
            "seed": UNSET if delta.finish_reason is None else delta.seed,
            "token_ids": list(delta.token_ids) if self._lists_tokens else UNSET,
        }

    def _usage(self, choice: int, tokens: int = 0) -> AnswerUsage | UnsetType | None:
        """Count a choice's new tokens, and return the `usage` field of their chunk.

        As in vLLM: the choice's counts so far if every chunk is to have them, otherwise null before the last chunk.
        """
        self._tokens[choice] += tokens
        if not self._wants_usage:
            return UNSET
        if not self._wants_usage_always:
            return None
        prompt, written = len(self._requests[choice // self._n].prompt_token_ids), self._tokens[choice]
        return AnswerUsage(prompt, written, prompt + written)
