"""Log probabilities in the forms that OpenAI's two routes and vLLM have."""

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from foreword.acceptance.logprobs import TokenLogprobs
from foreword.engine.outputs import alternatives
from foreword.engine.text import token_text
from foreword.models.tokenization.tokenizer import Tokenizer
from foreword.server.api.types.answer_types import (
    ChatLogprobs,
    ChatTokenLogprob,
    CompletionLogprobs,
    PromptLogprobs,
    TopLogprob,
)

_NEVER = -9999.0
"""What OpenAI says instead of minus infinity, which JSON does not have."""


class LogprobWriter:
    """Writes token ids as text beside their numbers."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def _text(self, token: int) -> str:
        return token_text(self._tokenizer, token)

    def _bytes(self, token: int) -> list[int]:
        return list(self._tokenizer.token_bytes(token, skip_special_tokens=False))

    def completion(self, entries: Sequence[TokenLogprobs], offset: int) -> tuple[CompletionLogprobs, int]:
        """For the older route; `offset` is where the first token's text starts, the next offset is returned too."""
        written = CompletionLogprobs([], [], [], [])
        for entry in entries:
            text = self._text(entry.token)
            written.tokens.append(text)
            written.token_logprobs.append(_finite(entry.logprob))
            written.top_logprobs.append({self._text(token): value for token, value in _top(entry)})
            written.text_offset.append(offset)
            offset += len(text)
        return written, offset

    def echoed(
        self, prompt: Sequence[int], entries: Sequence[TokenLogprobs]
    ) -> tuple[CompletionLogprobs, int]:
        """Of a prompt that stands before its answer: nothing is known of its first token."""
        first = self._text(prompt[0])
        rest, offset = self.completion(entries, len(first))
        written = CompletionLogprobs(
            [first, *rest.tokens],
            [None, *rest.token_logprobs],
            [None, *rest.top_logprobs],
            [0, *rest.text_offset],
        )
        return written, offset

    def chat(self, entries: Sequence[TokenLogprobs]) -> ChatLogprobs:
        return ChatLogprobs(
            [
                ChatTokenLogprob(
                    self._text(entry.token),
                    _finite(entry.logprob),
                    self._bytes(entry.token),
                    [TopLogprob(self._text(t), value, self._bytes(t)) for t, value in _top(entry)],
                )
                for entry in entries
            ]
        )

    def prompt(self, entries: Sequence[TokenLogprobs]) -> PromptLogprobs:
        """Of a prompt, as vLLM has them: nothing for its first token, which nothing precedes."""
        return [None, *(self._ranked(entry) for entry in entries)]

    def _ranked(self, entry: TokenLogprobs) -> dict[str, dict[str, Any]]:
        found = alternatives(entry, self._tokenizer)
        return {
            str(token): asdict(replace(one, logprob=_finite(one.logprob))) for token, one in found.items()
        }


def _top(entry: TokenLogprobs) -> list[tuple[int, float]]:
    pairs = zip(entry.top_ids.tolist(), entry.top_logprobs.tolist(), strict=True)
    return [(token, _finite(value)) for token, value in pairs]


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _NEVER
