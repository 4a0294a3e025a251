"""What a user gets back, in vLLM's shape with llama.cpp's timings."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from foreword.engine.messages import RequestStats


@dataclass(frozen=True)
class Timings:
    """Where the time of one request went; names follow llama.cpp."""

    prompt_n: int  # prompt tokens that were processed; those in cache_n were not
    prompt_ms: float  # first pass to the first tokens of the last prompt
    prompt_per_second: float
    predicted_n: int  # generated tokens, of all answers
    predicted_ms: float  # the first tokens of any answer to the last of all
    predicted_per_second: float  # tokens after each answer's first pass, per second of predicted_ms
    queue_ms: float  # arrival to first pass
    cache_n: int  # prompt tokens whose KV was found in the prefix cache
    passes: int  # target passes, prefill included
    draft_n: int  # guessed tokens that were judged
    draft_n_accepted: int  # guessed tokens that were committed

    @staticmethod
    def of(ends: Sequence[tuple[int, RequestStats]]) -> "Timings":
        """From (index, statistics) of the answers of a request, which arrived together and ran at the same time.

        Of every prompt, the answer with index 0 computed it. The tokens of a first pass came with the end of
        `prompt_ms` and took no time of `predicted_ms`, however many guesses were accepted with them.
        """
        answers = [stats for _, stats in ends]
        leaders = [stats for index, stats in ends if index == 0]
        began = min(stats.queue_seconds for stats in leaders)
        prompt_seconds = max(map(_first_token_at, leaders)) - began
        seconds = max(_first_token_at(s) + s.decode_seconds for s in answers) - min(
            map(_first_token_at, answers)
        )
        generated = sum(stats.output_tokens for stats in answers)
        cached = sum(stats.cached_tokens for stats in leaders)
        processed = sum(stats.prompt_tokens for stats in leaders) - cached
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
    return stats.queue_seconds + stats.prefill_seconds


def _rate(count: int, seconds: float) -> float:
    return count / seconds if count > 0 and seconds > 0 else 0.0


@dataclass(frozen=True)
class Logprob:
    """How likely the raw model finds a token, before temperature and every other sampling parameter."""

    logprob: float
    rank: int  # 1: the most likely token
    decoded_token: str


TokenAlternatives = dict[int, Logprob]
"""A token and the most likely ones at its place, by id."""


@dataclass(frozen=True)
class CompletionOutput:
    """One answer."""

    index: int
    text: str  # without the stop text, unless that was asked for
    token_ids: list[int]  # the token that ended it included
    finish_reason: str | None  # "stop", "length", "abort" or "error"; None while it grows
    seed: int  # the seed that was used, given or fresh
    logprobs: list[TokenAlternatives] | None = None  # per token, if asked for
    error: str | None = None  # what went wrong, where finish_reason is "error"
    # The stop token or stop text that was met; None for the model's own end.
    stop_reason: int | str | None = None
    stats: RequestStats | None = field(default=None, compare=False)  # what it cost, once it has ended


@dataclass(frozen=True)
class RequestOutput:
    """A prompt and its answers so far."""

    prompt: str | None  # None when token ids were given
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    request_id: str = ""
    # Per prompt token, the first None, if asked for.
    prompt_logprobs: list[TokenAlternatives | None] | None = None

    @property
    def finished(self) -> bool:
        """Whether all answers have ended."""
        return all(answer.finish_reason is not None for answer in self.outputs)

    @property
    def timings(self) -> Timings:
        """Where the time went; of answers that have ended."""
        return Timings.of([(answer.index, answer.stats or RequestStats()) for answer in self.outputs])

    def as_json(self) -> dict[str, Any]:
        """One object for machines: the first answer's fields, and all of them under `outputs` if there are more."""
        flat: dict[str, Any] = {
            **_answer_json(self.outputs[0]),
            "prompt_token_ids": self.prompt_token_ids,
            "timings": asdict(self.timings),
        }
        if len(self.outputs) > 1:
            flat["outputs"] = [{"index": answer.index, **_answer_json(answer)} for answer in self.outputs]
        if self.prompt_logprobs is not None:
            flat["prompt_logprobs"] = [entry and _alternatives_json(entry) for entry in self.prompt_logprobs]
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
    return {str(token): asdict(found) for token, found in entry.items()}
