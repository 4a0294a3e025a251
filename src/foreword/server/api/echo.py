"""Prompts before their answers, as the older of OpenAI's routes has them."""

from collections.abc import Sequence
from dataclasses import replace

from msgspec.structs import replace as with_fields

from foreword.engine.messages import AnswerDelta, NewRequest
from foreword.engine.outputs import Answer
from foreword.models.tokenization.tokenizer import Tokenizer
from foreword.server.api.types.answer_types import Usage
from foreword.server.api.types.openai_types import CompletionRequest


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
        """The delta, or the whole answer as one, without tokens that nobody wanted."""
        if answer is not None:
            delta = replace(
                delta, text=answer.text, token_ids=tuple(answer.token_ids), logprobs=tuple(answer.logprobs)
            )
        return replace(delta, text="", token_ids=(), logprobs=()) if self._is_alone else delta

    def usage(self, counted: Usage) -> Usage:
        if not self._is_alone:
            return counted
        return with_fields(counted, completion_tokens=0, total_tokens=counted.prompt_tokens)
