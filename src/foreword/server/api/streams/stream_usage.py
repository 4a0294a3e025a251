"""What the chunks of a stream say about tokens."""

from collections.abc import Sequence

from msgspec import UNSET, UnsetType

from foreword.server.api.types.answer_types import Usage
from foreword.server.api.types.openai_types import StreamOptions


class StreamUsage:
    """Counts the tokens of every choice as its chunks go out."""

    def __init__(self, options: StreamOptions | None, prompts: Sequence[int], n: int) -> None:
        """`prompts` are the prompts' numbers of tokens, each with n answers."""
        self.is_wanted = bool(options and options.include_usage)
        self._is_continuous = bool(options and options.include_usage and options.continuous_usage_stats)
        self._prompts = [tokens for tokens in prompts for _ in range(n)]
        self._tokens = [0] * len(self._prompts)

    def grow(self, choice: int, tokens: int = 0) -> Usage | UnsetType | None:
        """A choice has gained tokens; the `usage` of the chunk that tells of it, if there is one.

        As in vLLM: of this choice up to here if every chunk is to say it, else null in all chunks but the last.
        """
        self._tokens[choice] += tokens
        if not self.is_wanted:
            return UNSET
        if not self._is_continuous:
            return None
        prompt, written = self._prompts[choice], self._tokens[choice]
        return Usage(prompt, written, prompt + written)
