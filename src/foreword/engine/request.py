"""A request and its state while it is being answered."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter

from foreword.acceptance.logprobs import TokenLogprobs
from foreword.acceptance.params import SamplingParams
from foreword.acceptance.request import RequestSampler
from foreword.kv.paged_cache import KvSequence


@dataclass
class RequestClock:
    """When things happened to a request, in seconds of one monotonic clock."""

    arrived: float = field(default_factory=perf_counter)
    started: float | None = None  # its first pass began
    first_token: float | None = None  # its first token was committed
    finished: float | None = None
    passes: int = 0  # target passes that it took part in
    drafted: int = 0  # guessed tokens that were judged
    accepted: int = 0  # guessed tokens that were committed


class Request:
    """Committed tokens, KV rows and end conditions of one answer."""

    def __init__(
        self,
        request_id: int,
        prompt: Sequence[int],
        params: SamplingParams,
        sampler: RequestSampler,
        limits: "RequestLimits",
    ) -> None:
        self.request_id = request_id
        self.tenant = ""
        self.tokens = list(prompt)
        self.prompt_len = len(prompt)
        self.params = params
        self.sampler = sampler
        self.limits = limits
        self.kv = KvSequence()
        self.epoch = 0
        self.finish_reason: str | None = None
        self.error: str | None = None
        self.logprobs: list[TokenLogprobs] = []
        self.clock = RequestClock()

    @property
    def output_ids(self) -> list[int]:
        """The generated tokens so far."""
        return self.tokens[self.prompt_len :]

    @property
    def final_len(self) -> int:
        """Most tokens that the request can ever have, prompt included."""
        return min(self.prompt_len + self.params.max_tokens, self.limits.context_length)

    @property
    def room(self) -> int:
        """Tokens that may still be committed."""
        return self.final_len - len(self.tokens)

    def kept(self, tokens: Sequence[int]) -> int:
        """How many of these next tokens belong to the answer."""
        return self._end(tokens)[0]

    def extend(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs] = ()) -> None:
        """Commit tokens to the answer and note whether it has ended."""
        kept, self.finish_reason = self._end(tokens)
        if kept != len(tokens):
            raise ValueError(f"{len(tokens)} tokens to commit, but the answer ends after {kept}")
        self.tokens += tokens
        self.logprobs += logprobs
        self.sampler.commit(tokens)

    def fail(self, error: str) -> None:
        """End the answer with an error."""
        self.finish_reason, self.error = "error", error

    def _end(self, tokens: Sequence[int]) -> tuple[int, str | None]:
        """Where in these next tokens the answer ends, and why; a stop beats a length at the same token."""
        for count, token in enumerate(tokens, start=1):
            if token in self.limits.stop_ids:
                return count, "stop"
            if count == self.room:
                return count, "length"
        return len(tokens), None


@dataclass(frozen=True)
class RequestLimits:
    """What ends an answer besides its own parameters."""

    context_length: int  # most positions
    stop_ids: frozenset[int]  # tokens after which it ends
