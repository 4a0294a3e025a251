"""The tokens, text and end of one answer while it grows."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from foreword.acceptance.logprobs import TokenLogprobs
from foreword.acceptance.params import SamplingParams
from foreword.acceptance.request import RequestSampler
from foreword.engine.messages import DraftShown
from foreword.engine.text import AnswerText
from foreword.speculation.verdict import Verdict


@dataclass(frozen=True)
class RequestLimits:
    """What ends an answer besides its own parameters."""

    context_length: int  # most positions
    stop_ids: frozenset[int]  # tokens after which it ends
    own_end_ids: frozenset[int] = frozenset()  # of these, the model's own, which need no reason


class _End(NamedTuple):
    """Where in some next tokens the answer ends, and why."""

    kept: int  # tokens that belong to it
    finish_reason: str | None = None
    stop_reason: int | str | None = None


_GOES_ON = _End(-1)
"""The answer does not end, and all of the tokens belong to it."""


class Gains:
    """What an answer has gained since its last delta: the verdicts of some passes, nearly always of one."""

    __slots__ = ("drafted", "drafts", "from_draft", "logprobs", "text", "token_ids")

    def __init__(self) -> None:
        self.text = ""
        self.token_ids: tuple[int, ...] = ()
        self.logprobs: tuple[TokenLogprobs, ...] = ()
        self.drafted = 0  # draft tokens that were verified
        self.from_draft = 0  # draft tokens that were committed
        self.drafts: tuple[DraftShown, ...] = ()  # of every pass that committed tokens, if they are shown

    def add(self, verdict: Verdict, text: str, shows: bool) -> None:
        """Add a verdict and its text; `shows`: with its draft as a tree."""
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
    """Committed tokens with their text and log probabilities, and the conditions that end them."""

    def __init__(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        limits: RequestLimits,
        text: AnswerText | None,
        shows_drafts: bool,
        sampler: RequestSampler,
    ) -> None:
        self.tokens = list(prompt)  # committed: the prompt, then what was generated
        self.prompt_len = len(prompt)
        self.final_len = min(self.prompt_len + params.max_tokens, limits.context_length)
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.error: str | None = None
        self.asks_too_much = False  # the error is what the request's own parameters lead to
        self.error_param: str | None = None  # of these, the first
        self._limits = limits
        self._sampler = sampler
        self._keeps_stop = params.include_stop_str_in_output
        self._text = text
        self._watches = text is not None and text.watches  # whether any text can end the answer
        self._shows_drafts = shows_drafts
        self._gains = Gains()

    @property
    def output_ids(self) -> list[int]:
        """The generated tokens so far."""
        return self.tokens[self.prompt_len :]

    @property
    def room(self) -> int:
        """Tokens that may still be committed."""
        return self.final_len - len(self.tokens)

    def kept(self, tokens: Sequence[int]) -> int:
        """Return how many of these next tokens belong to the answer."""
        return len(tokens) if self._goes_on(tokens) else self._end(tokens).kept

    def commit(self, verdict: Verdict) -> None:
        """Take the tokens of a verdict, here and in the sampler, and note whether the answer has ended."""
        tokens = verdict.tokens
        end = _GOES_ON if self._goes_on(tokens) else self._end(tokens)
        if end is not _GOES_ON and end.kept != len(tokens):
            raise ValueError(f"{len(tokens)} tokens to commit, but the answer ends after {end.kept}")
        restrictions = self._sampler.restrictions() if verdict.is_asked else []
        before = None if self._text is None else self._text.state()
        try:  # what can fail comes first: if it does, nothing may have changed
            written = self._text_of(tokens, end)
            if tokens:
                self._sampler.commit(tokens)
        except BaseException:
            if self._text is not None and before is not None:
                self._text.go_back(before)
            raise
        self._gains.add(verdict, written, self._shows_drafts)
        self.tokens += tokens
        self.logprobs += verdict.logprobs
        self.prompt_logprobs += verdict.prompt_logprobs
        self.finish_reason, self.stop_reason = end.finish_reason, end.stop_reason
        if verdict.error is not None and self.finish_reason is None:
            self.end("error", verdict.error)
            self.asks_too_much = verdict.is_asked
            self.error_param = restrictions[0] if restrictions else None

    def end(self, finish_reason: str, error: str | None = None) -> None:
        """End the answer with the tokens that it has."""
        self.finish_reason, self.error = finish_reason, error

    def take_gains(self) -> Gains:
        """Return what the answer has gained since the last call; after its end, with the text that was held back."""
        gains, self._gains = self._gains, Gains()
        if (
            self.finish_reason is not None
            and self._text is not None
            and not isinstance(self.stop_reason, str)
        ):
            gains.text += self._text.finish()
        return gains

    def _text_of(self, tokens: Sequence[int], end: _End) -> str:
        if self._text is None:
            return ""
        is_stop_token = end.finish_reason == "stop" and not isinstance(end.stop_reason, str)
        if is_stop_token and not (end.stop_reason is not None and self._keeps_stop):
            tokens = tokens[:-1]  # a token that only ends the answer is not part of its text
        return self._text.push_all(tokens)

    def _goes_on(self, tokens: Sequence[int]) -> bool:
        """Return whether the answer certainly ends nowhere in these next tokens; False: `_end` has to look."""
        return (
            not self._watches
            and len(self.tokens) + len(tokens) < self.final_len
            and self._limits.stop_ids.isdisjoint(tokens)
        )

    def _end(self, tokens: Sequence[int]) -> _End:
        """Return where in these next tokens the answer ends; at the same token a stop precedes a length."""
        watching = self._text.copy() if self._text is not None and self._watches else None
        for count, token in enumerate(tokens, start=1):
            if token in self._limits.stop_ids:
                return _End(count, "stop", None if token in self._limits.own_end_ids else token)
            if watching is not None and (stop := watching.push(token)[1]) is not None:
                return _End(count, "stop", stop)
            if count == self.room:
                return _End(count, "length")
        return _End(len(tokens))
