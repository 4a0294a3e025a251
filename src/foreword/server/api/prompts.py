"""Tokenizes prompts: short ones inline, long ones in threads, so that other requests do not wait."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from foreword.engine.prompts import Prediction, encode_prediction, encode_prompt
from foreword.models.tokenization.tokenizer import Tokenizer
from foreword.server.api.request_types import RawText
from foreword.server.api.sampling_types import SamplingFields
from foreword.server.errors import ApiError
from foreword.server.settings import Limits, ServerSettings

Result = TypeVar("Result")


class PromptEncoder:
    """Applies the model's tokenizer and chat template for concurrent requests."""

    def __init__(self, tokenizer: Tokenizer, settings: ServerSettings) -> None:
        self.tokenizer = tokenizer
        self._limits = settings.limits
        self._inline_characters = settings.inline_characters
        self._threads = ThreadPoolExecutor(settings.tokenize_threads, thread_name_prefix="tokenize")

    async def text(
        self, prompt: str | list[int], options: RawText, *, raw: bool = True, suffix: str | None = None
    ) -> list[int]:
        """Tokenize a prompt: with `raw` without a template, otherwise as a user's message in the chat template.

        With a `suffix`, the answer fills the gap between prompt and suffix.
        """
        return await self._run(
            len(prompt) + len(suffix or ""),
            lambda: encode_prompt(
                self.tokenizer,
                prompt,
                raw,
                parse_special=options.parse_special,
                add_special_tokens=options.add_special_tokens,
                suffix=suffix,
            ),
        )

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        **options: Any,  # noqa: ANN401 - of `Tokenizer.encode_chat`
    ) -> list[int]:
        """Tokenize a conversation in the chat template."""
        check_messages(len(messages), self._limits)
        return await self._run(
            sum(len(message["content"]) for message in messages) + len(str(tools or "")),
            lambda: self.tokenizer.encode_chat(messages, tools=tools, **options),
        )

    async def prediction(self, expected: Prediction, max_model_len: int) -> tuple[int, ...]:
        """Tokenize an expected answer, cut to the context length."""
        encoded = await self._run(len(expected or ()), lambda: encode_prediction(self.tokenizer, expected))
        return encoded[:max_model_len]

    async def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of token ids; raise 400 for an unknown id."""

        def checked_text() -> str:
            unknown = next((token for token in tokens if not self.tokenizer.has_token(token)), None)
            if unknown is not None:
                raise ApiError(400, f"the model has no token with the id {unknown}", param="tokens")
            return self.tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens)

        return await self._run(len(tokens), checked_text)

    async def _run(self, size: int, work: Callable[[], Result]) -> Result:
        """Call `work`, in a thread if its input has more than `inline_characters` characters or tokens."""
        if size <= self._inline_characters:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def check_messages(count: int, limits: Limits) -> None:
    """Raise 400 for a conversation with too many messages."""
    if count > limits.messages:
        raise ApiError(400, f"this server takes at most {limits.messages} messages", param="messages")


def room_for_answer(
    prompt: Sequence[int], body: SamplingFields, max_model_len: int, limit: int | None
) -> int:
    """Return the maximum length of the answer; raise 400 if prompt and answer do not fit into the context.

    `limit`: the maximum prompt length, if any.
    """
    longest = max_model_len - 1 if limit is None else min(limit, max_model_len - 1)
    if not prompt:
        raise ApiError(400, "the prompt has no tokens; give at least one", param=body.prompt_field)
    if len(prompt) > longest:
        raise ApiError(
            400,
            f"the prompt has {len(prompt)} tokens; this server takes at most {longest}",
            param=body.prompt_field,
            code="context_length_exceeded",
        )
    room, wanted = max_model_len - len(prompt), body.wanted_tokens
    if wanted is None:
        return room
    if wanted > room:
        raise ApiError(
            400,
            f"the prompt has {len(prompt)} tokens and the context {max_model_len}: {body.length_field} can be at most "
            f"{room}, not {wanted}",
            param=body.length_field,
            code="context_length_exceeded",
        )
    return wanted
