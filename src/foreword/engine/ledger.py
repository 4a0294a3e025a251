"""When things happened to a request, and what they cost."""

from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING

from foreword.engine.messages import RequestStats
from foreword.speculation.step import StepResult

if TYPE_CHECKING:
    from foreword.engine.request import Request


@dataclass
class RequestLedger:
    """Times in seconds of one monotonic clock, and counts that grow with every pass."""

    arrived: float = field(default_factory=perf_counter)
    started: float | None = None  # its first pass began
    first_token: float | None = None  # its first tokens were committed
    first_tokens: int = 0  # how many those were
    finished: float | None = None
    passes: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    accept_seconds: float = 0.0
    kv_bytes_per_row: int = 0

    def count_pass(self, result: StepResult, part: float) -> None:
        """Count a pass of which this request's rows were that part."""
        self.passes += 1
        self.draft_seconds += part * result.draft_seconds
        self.verify_seconds += part * result.verify_seconds
        self.accept_seconds += part * result.accept_seconds

    def note_tokens(self, count: int, now: float) -> None:
        """So many tokens were committed."""
        if self.first_token is None:
            self.first_token, self.first_tokens = now, count
        self.finished = now

    def stats(self, request: "Request") -> RequestStats:
        """What answering has cost so far."""
        started = self.started or self.arrived
        first = self.first_token or started
        finished = self.finished or first
        acceptance = request.acceptance
        thrown_away = acceptance.drafted - acceptance.accepted
        return RequestStats(
            prompt_tokens=request.prompt_len,
            cached_tokens=self.cached_tokens,
            output_tokens=len(request.tokens) - request.prompt_len,
            first_tokens=self.first_tokens,
            queue_seconds=started - self.arrived,
            prefill_seconds=first - started,
            decode_seconds=finished - first,
            draft_seconds=self.draft_seconds,
            verify_seconds=self.verify_seconds,
            accept_seconds=self.accept_seconds,
            passes=self.passes,
            drafts=acceptance.drafts,
            drafted=acceptance.drafted,
            accepted=acceptance.accepted,
            drafted_per_position=tuple(acceptance.drafted_per_position),
            accepted_per_position=tuple(acceptance.accepted_per_position),
            rejected_per_position=tuple(acceptance.rejected_per_position),
            rollback_tokens=thrown_away,
            rejected_kv_bytes=thrown_away * self.kv_bytes_per_row,
            preemptions=self.preemptions,
            method="" if request.speculation is None else request.speculation.method,
            cohort=request.cohort,
        )
