"""Tokens, text and end of one growing answer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from foreword.acceptance.logprobs import TokenLogprobs
from foreword.acceptance.params import SamplingParams
from foreword.acceptance.request import RequestSampler
from foreword.engine.messages import DraftShown
from foreword.engine.text import AnswerText
from foreword.speculation.requests import Verdict


@dataclass(frozen=True)
class RequestLimits:
    """The context length, and all tokens that end an answer: the model's and those of its sampling parameters."""

    context_length: int  # maximum number of prompt and answer tokens
    stop_ids: frozenset[int]  # every token that ends the answer
    eos_ids: frozenset[int] = frozenset()  # stop tokens that are reported without a stop reason


class _End(NamedTuple):
    """How many of the next tokens belong to an answer, and why it ends after them.

    If `finish_reason` is None, the answer continues after all of them.
    """

    kept: int  # number of tokens that belong to the answer, including a stop token
    finish_reason: str | None = None  # "stop" or "length"
    stop_reason: int | str | None = None  # the stop token or stop string


class PendingDelta:
    """Tokens and text since the last delta, usually of one pass."""

    __slots__ = ("drafted", "drafts", "from_draft", "logprobs", "text", "token_ids")

    def __init__(self) -> None:
        self.text = ""
        self.token_ids: tuple[int, ...] = ()
        self.logprobs: tuple[TokenLogprobs, ...] = ()
        self.drafted = 0  # verified draft tokens
        self.from_draft = 0  # committed draft tokens
        self.drafts: tuple[DraftShown, ...] = ()  # one per pass, if requested

    def add(self, verdict: Verdict, text: str, shows_draft: bool) -> None:
        """Add a verdict and its text; with `shows_draft`, also its draft tree."""
        self.text += text
        self.token_ids += verdict.tokens
        self.logprobs += verdict.logprobs
        if verdict.draft.parents:
            self.drafted += len(verdict.judged.parents)
            self.from_draft += len(verdict.path)
        if shows_draft and verdict.tokens:
            draft = verdict.draft
            self.drafts += (DraftShown(draft.tokens, draft.parents, verdict.path, len(verdict.tokens)),)


class AnswerState:
    """Committed tokens with text and log-probabilities, and the conditions that end the answer.

    The answer continues while `finish_reason` is None.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        limits: RequestLimits,
        text: AnswerText | None,
        shows_drafts: bool,
        sampler: RequestSampler,
    ) -> None:
        self.tokens = list(prompt)  # committed: the prompt, then the generated tokens
        self.prompt_len = len(prompt)
        self.final_len = min(
            self.prompt_len + params.max_tokens, limits.context_length
        )  # maximum number of tokens
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.error: str | None = None
        self.is_request_error = False  # the request's own parameters cause the error
        # First parameter that forbids tokens, if the parameters cause the error
        self.error_param: str | None = None
        self._limits = limits
        self._sampler = sampler
        self._shows_stop_token = params.include_stop_str_in_output
        self._text = text
        self._has_stop_strings = text is not None and text.has_stop_strings
        self._shows_drafts = shows_drafts
        self._pending = PendingDelta()

    @property
    def output_ids(self) -> list[int]:
        """The generated tokens."""
        return self.tokens[self.prompt_len :]

    @property
    def room(self) -> int:
        """Number of tokens that may still be committed."""
        return self.final_len - len(self.tokens)

    def count_kept(self, tokens: Sequence[int]) -> int:
        """Return how many of these next tokens belong to the answer."""
        return len(tokens) if self._surely_continues(tokens) else self._find_end(tokens).kept

    def commit(self, verdict: Verdict) -> None:
        """Commit a verdict's tokens here and in the sampler, and finish the answer if they end it.

        An exception leaves this answer and the sampler unchanged.
        """
        tokens = verdict.tokens
        end = self._find_end(tokens)
        if end.kept != len(tokens):
            raise ValueError(f"{len(tokens)} tokens to commit, but the answer ends after {end.kept}")
        restrictions = self._sampler.restrictions() if verdict.is_request_error else []
        text_state = None if self._text is None else self._text.state()
        try:  # The text is changed first: it can be restored, the sampler cannot.
            new_text = self._push_text(tokens, end)
            if tokens:
                self._sampler.commit(tokens)
        except BaseException:
            if self._text is not None and text_state is not None:
                self._text.go_back(text_state)
            raise
        self._pending.add(verdict, new_text, self._shows_drafts)
        self.tokens += tokens
        self.logprobs += verdict.logprobs
        self.prompt_logprobs += verdict.prompt_logprobs
        self.finish_reason, self.stop_reason = end.finish_reason, end.stop_reason
        if verdict.error is not None and self.finish_reason is None:
            self.finish("error", verdict.error)
            self.is_request_error = verdict.is_request_error
            self.error_param = restrictions[0] if restrictions else None

    def finish(self, finish_reason: str, error: str | None = None) -> None:
        """End the answer with its current tokens."""
        self.finish_reason, self.error = finish_reason, error

    def take_pending(self) -> PendingDelta:
        """Return and clear what was added since the last call.

        After the end this includes the text that was held back, unless a stop string ended the answer.
        """
        pending, self._pending = self._pending, PendingDelta()
        if (
            self.finish_reason is not None
            and self._text is not None
            and not isinstance(self.stop_reason, str)
        ):
            pending.text += self._text.finish()
        return pending

    def _push_text(self, tokens: Sequence[int], end: _End) -> str:
        """Add tokens to the text; return the text that is now final."""
        if self._text is None:
            return ""
        # A string is the stop reason of a stop text, None that of an end-of-sequence token, which is never shown.
        is_stop_token = end.finish_reason == "stop" and not isinstance(end.stop_reason, str)
        is_shown = self._shows_stop_token and end.stop_reason is not None
        if is_stop_token and not is_shown:
            tokens = tokens[:-1]
        return self._text.push_all(tokens)

    def _surely_continues(self, tokens: Sequence[int]) -> bool:
        """Return whether these tokens certainly do not end the answer; False if only its text can tell."""
        return (
            not self._has_stop_strings
            and len(self.tokens) + len(tokens) < self.final_len
            and self._limits.stop_ids.isdisjoint(tokens)
        )

    def _find_end(self, tokens: Sequence[int]) -> _End:
        """Return where in these tokens the answer ends, if it does; a stop takes precedence over a length limit."""
        if self._surely_continues(tokens):
            return _End(len(tokens))
        text = self._text.copy() if self._text is not None and self._has_stop_strings else None
        for count, token in enumerate(tokens, start=1):
            if token in self._limits.stop_ids:
                return _End(count, "stop", None if token in self._limits.eos_ids else token)
            if text is not None and (stop := text.push(token)[1]) is not None:
                return _End(count, "stop", stop)
            if count == self.room:
                return _End(count, "length")
        return _End(len(tokens))
