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
    """Conditions that end an answer besides its sampling parameters."""

    context_length: int  # maximum positions
    stop_ids: frozenset[int]  # tokens that end the answer
    own_end_ids: frozenset[int] = frozenset()  # the stop tokens that are reported without a stop reason


class _End(NamedTuple):
    """The position in the next tokens where the answer ends, and why."""

    kept: int  # number of tokens that belong to it
    finish_reason: str | None = None
    stop_reason: int | str | None = None


_CONTINUES = _End(-1)  # the answer continues after all of the tokens


class PendingDelta:
    """Tokens and text since the last delta, usually of one pass."""

    __slots__ = ("drafted", "drafts", "from_draft", "logprobs", "text", "token_ids")

    def __init__(self) -> None:
        self.text = ""
        self.token_ids: tuple[int, ...] = ()
        self.logprobs: tuple[TokenLogprobs, ...] = ()
        self.drafted = 0  # verified draft tokens
        self.from_draft = 0  # committed draft tokens
        self.drafts: tuple[DraftShown, ...] = ()  # per pass, if requested

    def add(self, verdict: Verdict, text: str, shows: bool) -> None:
        """Add a verdict and its text; with `shows`, also its draft tree."""
        self.text += text
        self.token_ids += verdict.tokens
        self.logprobs += verdict.logprobs
        if verdict.draft.parents:
            self.drafted += len(verdict.judged.parents)
            self.from_draft += len(verdict.path)
        if shows and verdict.tokens:
            draft = verdict.draft
            self.drafts += (DraftShown(draft.tokens, draft.parents, verdict.path, len(verdict.tokens)),)


class AnswerState:
    """Committed tokens with text and log-probabilities, and the conditions that end the answer."""

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
        self.final_len = min(self.prompt_len + params.max_tokens, limits.context_length)
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.error: str | None = None
        self.asks_too_much = False  # the request's own parameters cause the error
        self.error_param: str | None = None  # the first such parameter
        self._limits = limits
        self._sampler = sampler
        self._keeps_stop = params.include_stop_str_in_output
        self._text = text
        self._watches = text is not None and text.watches  # whether a stop string can end the answer
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

    def kept(self, tokens: Sequence[int]) -> int:
        """Return how many of these next tokens belong to the answer."""
        return len(tokens) if self._surely_continues(tokens) else self._end(tokens).kept

    def commit(self, verdict: Verdict) -> None:
        """Commit a verdict's tokens here and in the sampler, and detect the end of the answer."""
        tokens = verdict.tokens
        end = _CONTINUES if self._surely_continues(tokens) else self._end(tokens)
        if end is not _CONTINUES and end.kept != len(tokens):
            raise ValueError(f"{len(tokens)} tokens to commit, but the answer ends after {end.kept}")
        restrictions = self._sampler.restrictions() if verdict.is_asked else []
        before = None if self._text is None else self._text.state()
        try:  # may fail, so it comes before any change
            written = self._text_of(tokens, end)
            if tokens:
                self._sampler.commit(tokens)
        except BaseException:
            if self._text is not None and before is not None:
                self._text.go_back(before)
            raise
        self._pending.add(verdict, written, self._shows_drafts)
        self.tokens += tokens
        self.logprobs += verdict.logprobs
        self.prompt_logprobs += verdict.prompt_logprobs
        self.finish_reason, self.stop_reason = end.finish_reason, end.stop_reason
        if verdict.error is not None and self.finish_reason is None:
            self.end("error", verdict.error)
            self.asks_too_much = verdict.is_asked
            self.error_param = restrictions[0] if restrictions else None

    def end(self, finish_reason: str, error: str | None = None) -> None:
        """End the answer with its current tokens."""
        self.finish_reason, self.error = finish_reason, error

    def take_pending(self) -> PendingDelta:
        """Return what was added since the last call; after the end, including held-back text."""
        pending, self._pending = self._pending, PendingDelta()
        if (
            self.finish_reason is not None
            and self._text is not None
            and not isinstance(self.stop_reason, str)
        ):
            pending.text += self._text.finish()
        return pending

    def _text_of(self, tokens: Sequence[int], end: _End) -> str:
        if self._text is None:
            return ""
        is_stop_token = end.finish_reason == "stop" and not isinstance(end.stop_reason, str)
        if is_stop_token and not (end.stop_reason is not None and self._keeps_stop):
            tokens = tokens[:-1]  # an end token is not part of the text
        return self._text.push_all(tokens)

    def _surely_continues(self, tokens: Sequence[int]) -> bool:
        """Return whether the answer certainly does not end within these tokens."""
        return (
            not self._watches
            and len(self.tokens) + len(tokens) < self.final_len
            and self._limits.stop_ids.isdisjoint(tokens)
        )

    def _end(self, tokens: Sequence[int]) -> _End:
        """Return where in these tokens the answer ends; a stop takes precedence over a length limit."""
        watching = self._text.copy() if self._text is not None and self._watches else None
        for count, token in enumerate(tokens, start=1):
            if token in self._limits.stop_ids:
                return _End(count, "stop", None if token in self._limits.own_end_ids else token)
            if watching is not None and (stop := watching.push(token)[1]) is not None:
                return _End(count, "stop", stop)
            if count == self.room:
                return _End(count, "length")
        return _End(len(tokens))
