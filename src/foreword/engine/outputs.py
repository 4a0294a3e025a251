"""What a user gets back, in vLLM's shape with llama.cpp's timings."""

from dataclasses import asdict, dataclass
from typing import Any

from foreword.engine.request import Request


@dataclass(frozen=True)
class Timings:
    """Where the time of one request went; names follow llama.cpp."""

    prompt_n: int  # prompt tokens
    prompt_ms: float  # first pass to first token
    prompt_per_second: float
    predicted_n: int  # generated tokens
    predicted_ms: float  # first token to last
    predicted_per_second: float  # tokens after the first, per second of predicted_ms
    queue_ms: float  # arrival to first pass
    passes: int  # target passes, prefill included
    draft_n: int  # guessed tokens that were judged
    draft_n_accepted: int  # guessed tokens that were committed

    @staticmethod
    def of(request: Request) -> "Timings":
        """Read a finished request's clock."""
        clock = request.clock
        started = clock.started or clock.arrived
        first = clock.first_token or started
        finished = clock.finished or first
        generated = len(request.output_ids)
        return Timings(
            prompt_n=request.prompt_len,
            prompt_ms=1e3 * (first - started),
            prompt_per_second=_rate(request.prompt_len, first - started),
            predicted_n=generated,
            predicted_ms=1e3 * (finished - first),
            predicted_per_second=_rate(generated - 1, finished - first),
            queue_ms=1e3 * (started - clock.arrived),
            passes=clock.passes,
            draft_n=clock.drafted,
            draft_n_accepted=clock.accepted,
        )


def _rate(count: int, seconds: float) -> float:
    return count / seconds if count > 0 and seconds > 0 else 0.0


@dataclass(frozen=True)
class Logprob:
    """How likely the raw model finds a token, before temperature and every other sampling parameter."""

    logprob: float
    rank: int  # 1: the most likely token
    decoded_token: str


@dataclass(frozen=True)
class CompletionOutput:
    """One answer."""

    index: int
    text: str
    token_ids: list[int]  # an end-of-sequence token included, its text not
    finish_reason: str | None  # "stop", "length" or "error"
    seed: int  # the seed that was used, given or fresh
    logprobs: list[dict[int, Logprob]] | None = (
        None  # per token, for it and the most likely ones, if asked for
    )
    error: str | None = None  # what went wrong, where finish_reason is "error"


@dataclass(frozen=True)
class RequestOutput:
    """A prompt and its answers."""

    prompt: str | None  # None when token ids were given
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    timings: Timings

    def as_json(self) -> dict[str, Any]:
        """The single answer as one flat object for machines."""
        answer = self.outputs[0]
        flat: dict[str, Any] = {
            "text": answer.text,
            "token_ids": answer.token_ids,
            "finish_reason": answer.finish_reason,
            "seed": answer.seed,
            "prompt_token_ids": self.prompt_token_ids,
            "timings": asdict(self.timings),
        }
        if answer.logprobs is not None:
            flat["logprobs"] = [
                {str(token): asdict(entry) for token, entry in position.items()}
                for position in answer.logprobs
            ]
        return flat if answer.error is None else flat | {"error": answer.error}
