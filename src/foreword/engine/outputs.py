"""Collects an engine's deltas into results with vLLM's names and llama.cpp's timings."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, TypeVar

from foreword.acceptance.logprobs import TokenLogprobs
from foreword.acceptance.params import SamplingParams
from foreword.control.reporting.figures import counts_of
from foreword.engine.messages import AnswerDelta, OpenAnswers, RequestStats
from foreword.engine.text import token_text
from foreword.models.tokenization.tokenizer import Tokenizer


@dataclass(frozen=True)
class Timings:
    """Durations and counts of one request; names follow llama.cpp."""

    prompt_n: int  # computed prompt tokens, without cache_n
    prompt_ms: float  # first pass to the first generated token
    prompt_per_second: float
    predicted_n: int  # generated tokens of all answers
    predicted_ms: float  # first generated token to the last one of all answers
    predicted_per_second: float  # tokens after each answer's first pass, per second of predicted_ms
    queue_ms: float  # arrival to first pass
    cache_n: int  # prompt tokens found in the prefix cache
    passes: int  # target passes, including prefill
    draft_n: int  # verified draft tokens
    draft_n_accepted: int  # committed draft tokens

    @staticmethod
    def of(by_answer: Sequence[tuple[int, RequestStats]]) -> "Timings":
        """Combine (index, statistics) of all answers of a request.

        The answer with index 0 computed the prompt. The tokens of a first pass arrive at the end of `prompt_ms`, so
        `predicted_per_second` does not count them.
        """
        answers = [stats for _, stats in by_answer]
        first_answers = [stats for index, stats in by_answer if index == 0]  # one per prompt of the request
        began = min(stats.queue_seconds for stats in first_answers)  # seconds from arrival
        prompt_seconds = max(map(_first_token_at, first_answers)) - began
        last_token_at = max(_first_token_at(stats) + stats.decode_seconds for stats in answers)
        seconds = last_token_at - min(map(_first_token_at, answers))
        generated = sum(stats.output_tokens for stats in answers)
        cached = sum(stats.cached_tokens for stats in first_answers)
        processed = sum(stats.prompt_tokens for stats in first_answers) - cached
        return Timings(
            prompt_n=processed,
            prompt_ms=1e3 * prompt_seconds,
            prompt_per_second=_rate(processed, prompt_seconds),
            predicted_n=generated,
            predicted_ms=1e3 * seconds,
            predicted_per_second=_rate(generated - sum(stats.first_tokens for stats in answers), seconds),
            queue_ms=1e3 * began,
            cache_n=cached,
            passes=sum(stats.passes for stats in answers),
            draft_n=sum(stats.drafted for stats in answers),
            draft_n_accepted=sum(stats.accepted for stats in answers),
        )


def _first_token_at(stats: RequestStats) -> float:
    """Return the seconds from arrival to the first token."""
    return stats.queue_seconds + stats.prefill_seconds


def _rate(count: int, seconds: float) -> float:
    """Return `count` per second; 0 if either is not positive."""
    return count / seconds if count > 0 and seconds > 0 else 0.0


@dataclass(frozen=True)
class Logprob:
    """Log-probability of a token under the model, before temperature and other sampling parameters."""

    logprob: float
    rank: int  # 1: the most likely token
    decoded_token: str


TokenAlternatives = dict[int, Logprob]
"""The log-probabilities of a token and of its most likely alternatives, by token id."""


@dataclass(frozen=True)
class CompletionOutput:
    """One answer."""

    index: int
    text: str  # without the stop string, unless requested
    token_ids: list[int]  # including a stop token that ended the answer
    finish_reason: str | None  # "stop", "length", "deadline", "abort" or "error"; None: the answer continues
    seed: int  # the seed in use
    logprobs: list[TokenAlternatives] | None = None  # per token, if requested
    error: str | None = None  # error message, if finish_reason is "error" or "deadline"
    # The stop token or stop string that matched; None: the model's end-of-sequence token.
    stop_reason: int | str | None = None
    stats: RequestStats | None = field(default=None, compare=False)  # set when the answer has ended


@dataclass(frozen=True)
class RequestOutput:
    """A prompt with its answers, finished or as far as they are generated."""

    prompt: str | None  # None if token ids were given
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    request_id: str = ""
    # One per prompt token, if requested; the first token has None.
    prompt_logprobs: list[TokenAlternatives | None] | None = None

    @property
    def finished(self) -> bool:
        return all(answer.finish_reason is not None for answer in self.outputs)

    @property
    def timings(self) -> Timings:
        """Durations of the answers that have ended."""
        return Timings.of([(answer.index, answer.stats or RequestStats()) for answer in self.outputs])

    def as_json(self) -> dict[str, Any]:
        """Return a JSON object with the first answer's fields; several answers are also listed under `outputs`."""
        flat: dict[str, Any] = {
            **_answer_json(self.outputs[0]),
            "prompt_token_ids": self.prompt_token_ids,
            "timings": asdict(self.timings),
        }
        if len(self.outputs) > 1:
            flat["outputs"] = [{"index": answer.index, **_answer_json(answer)} for answer in self.outputs]
        if self.prompt_logprobs is not None:
            flat["prompt_logprobs"] = [
                None if entry is None else _alternatives_json(entry) for entry in self.prompt_logprobs
            ]
        return flat


def _answer_json(answer: CompletionOutput) -> dict[str, Any]:
    flat: dict[str, Any] = {
        "text": answer.text,
        "token_ids": answer.token_ids,
        "finish_reason": answer.finish_reason,
        "seed": answer.seed,
    }
    if answer.stop_reason is not None:
        flat["stop_reason"] = answer.stop_reason
    if answer.logprobs is not None:
        flat["logprobs"] = [_alternatives_json(entry) for entry in answer.logprobs]
    return flat if answer.error is None else flat | {"error": answer.error}


def _alternatives_json(entry: TokenAlternatives) -> dict[str, Any]:
    return {str(token): asdict(logprob) for token, logprob in entry.items()}


if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    Counted = TypeVar("Counted", bound=DataclassInstance)


def add_fields(left: "Counted", right: "Counted") -> "Counted":
    """Add two dataclasses field by field: numbers and tuples of numbers are added, strings are not.

    Of two strings, the sum has the first that is not empty.
    """
    sums = {
        field.name: _added(getattr(left, field.name), getattr(right, field.name)) for field in fields(left)
    }
    return replace(left, **sums)


def _added(left: Any, right: Any) -> Any:  # noqa: ANN401 - numbers, tuples of them, or texts
    if isinstance(left, tuple):
        return tuple(a + b for a, b in zip_longest(left, right, fillvalue=0))
    if isinstance(left, str):
        return left or right
    return left + right


def sum_stats(by_answer: Iterable[tuple[int, RequestStats]]) -> RequestStats:
    """Add the statistics of answers, given as (index, statistics); only index 0 adds its prompt tokens."""
    total = RequestStats()
    for index, stats in by_answer:
        added = stats if index == 0 else replace(stats, prompt_tokens=0, cached_tokens=0)
        total = add_fields(total, added)
    return total


def accepted_runs(stats: RequestStats) -> "Counter[int]":
    """Return the number of passes by the number of draft tokens that they accepted."""
    return counts_of(stats.drafts, stats.accepted_per_position)


class Costs:
    """Collects the statistics of all answers of a request."""

    def __init__(self, answers: int) -> None:
        self._open = OpenAnswers(answers)
        self._by_answer: list[tuple[int, RequestStats]] = []  # (index, statistics) of answers that have ended

    def note(self, delta: AnswerDelta) -> bool:
        """Add a delta; return True if all answers have ended."""
        if delta.stats is not None:
            self._by_answer.append((delta.index, delta.stats))
        return self._open.note(delta)

    def total(self) -> RequestStats:
        return sum_stats(self._by_answer)

    def timings(self) -> Timings:
        return Timings.of(self._by_answer)


class Answer:
    """One answer, accumulated from deltas."""

    def __init__(self, index: int = 0) -> None:
        self.index = index  # of the answer among those to its prompt
        self._texts: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: tuple[TokenLogprobs, ...] = ()
        self.last = AnswerDelta(
            "", index, "", ()
        )  # newest delta; that of an ended answer has the finish reason

    def take(self, delta: AnswerDelta) -> None:
        """Append a delta."""
        self._texts.append(delta.text)
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.prompt_logprobs = delta.prompt_logprobs or self.prompt_logprobs
        self.last = delta

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @property
    def whole(self) -> AnswerDelta:
        """All deltas merged into one."""
        return replace(
            self.last,
            text=self.text,
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            prompt_logprobs=self.prompt_logprobs,
        )


@dataclass
class OutputCollector:
    """Collects the deltas of one request."""

    request_id: str
    prompt: str | None
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    tokenizer: Tokenizer

    def __post_init__(self) -> None:
        self._answers = [Answer(index) for index in range(self.params.n)]
        self._open = OpenAnswers(self.params.n)

    @property
    def finished(self) -> bool:
        return not self._open.left

    def take(self, delta: AnswerDelta) -> None:
        """Append a delta to its answer."""
        self._answers[delta.index].take(delta)
        self._open.note(delta)

    def output(self) -> RequestOutput:
        """Return the answers so far."""
        answers = [self._completion(answer) for answer in self._answers]
        prompt_logprobs: list[TokenAlternatives | None] | None = None
        if self.params.prompt_logprobs is not None:
            prompt_logprobs = [None, *self._alternatives(self._answers[0].prompt_logprobs)]
        prompt_ids = list(self.prompt_token_ids)
        return RequestOutput(self.prompt, prompt_ids, answers, self.request_id, prompt_logprobs)

    def _completion(self, answer: Answer) -> CompletionOutput:
        last = answer.last
        return CompletionOutput(
            index=answer.index,
            text=answer.text,
            token_ids=list(answer.token_ids),
            finish_reason=last.finish_reason,
            seed=last.seed,
            logprobs=None if self.params.logprobs is None else self._alternatives(answer.logprobs),
            error=last.error,
            stop_reason=last.stop_reason,
            stats=last.stats,
        )

    def _alternatives(self, positions: Sequence[TokenLogprobs]) -> list[TokenAlternatives]:
        return [alternatives(logprobs, self.tokenizer) for logprobs in positions]


def alternatives(logprobs: TokenLogprobs, tokenizer: Tokenizer) -> TokenAlternatives:
    """Return the log-probabilities of the alternatives, most likely first, and of the token itself."""

    def with_text(token: int, logprob: float, rank: int) -> Logprob:
        return Logprob(logprob, rank, token_text(tokenizer, token))

    top = zip(logprobs.top_ids.tolist(), logprobs.top_logprobs.tolist(), strict=True)
    entries = {token: with_text(token, value, rank) for rank, (token, value) in enumerate(top, 1)}
    entries[logprobs.token] = with_text(logprobs.token, logprobs.logprob, logprobs.rank)
    return entries
