"""A request in progress: answer, sampler, accounting and scheduling state."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from foreword.acceptance.params import SamplingParams
from foreword.acceptance.request import RequestSampler
from foreword.engine.adapters import LoadedAdapter
from foreword.engine.messages import AnswerDelta, RequestStats, sampling_kind
from foreword.engine.requests.accounting import Accounting
from foreword.engine.requests.answer import AnswerState, RequestLimits
from foreword.engine.requests.assignment import Assignment
from foreword.engine.text import AnswerText
from foreword.kv.sequence import KvSequence
from foreword.speculation.requests import DrafterView


@dataclass(frozen=True)
class RequestIdentity:
    """The user's names of an answer, and options that apply to it."""

    name: str = ""  # the user's request id
    index: int = 0  # among the n answers to the prompt
    tenant: str = ""  # nothing is cached or learned across tenants
    reports_progress: bool = False  # every delta includes statistics
    prediction: Sequence[int] = ()  # the answer that the user expects
    adapter: LoadedAdapter | None = None
    assigned: Assignment = field(default_factory=Assignment)  # by the policy file


@dataclass(frozen=True)
class Deadline:
    """The deadline of an answer."""

    at: float  # engine clock, seconds
    milliseconds: float  # after its arrival
    must_be_whole: bool = False  # True: fail once it cannot finish in time; False: end at the deadline


@dataclass
class SchedulingState:
    """Scheduling state of a request."""

    leader: "Request | None" = None  # the first answer to the same prompt, whose prompt rows can be copied
    deadline: Deadline | None = None
    served: int = 0  # sequence number of the last pass that served it
    is_aged: bool = False  # it runs, or may run, because it exceeded its ageing time


class Request:
    """One answer in progress; the step sees it as a `StepRequest`."""

    def __init__(
        self,
        request_id: int,
        prompt: Sequence[int],
        params: SamplingParams,
        sampler: RequestSampler,
        limits: RequestLimits,
        identity: RequestIdentity | None = None,
        text: AnswerText | None = None,
    ) -> None:
        self.identity = identity = identity or RequestIdentity()
        self.request_id = request_id
        self.answer = AnswerState(prompt, params, limits, text, identity.reports_progress, sampler)
        self.tokens = self.answer.tokens  # shared, not a copy
        # Bound once, since every step calls them for every request.
        self.kept, self.commit = self.answer.kept, self.answer.commit
        self.params = params
        self.sampler = sampler
        self.accounting = Accounting()
        self.acceptance = self.accounting.acceptance
        self.queued = SchedulingState()
        self.kv = KvSequence()
        self.speculation = identity.assigned.plan
        # Read by the step and by policies.
        self.prompt_len = len(prompt)
        self.prediction = identity.prediction
        self.service = identity.assigned.service
        self.step_limit = identity.assigned.step_limit
        self.adapter_slot = 0 if identity.adapter is None else identity.adapter.slot
        self.drafter_view = DrafterView(self.prompt_len, identity.tenant, identity.prediction)
        self.cohort = identity.assigned.cohort or sampling_kind(params)
        adapter = identity.adapter
        if adapter is not None and not self.cohort.endswith(f"/{adapter.name}"):
            self.cohort += f"/{adapter.name}"  # acceptance differs between adapters

    @property
    def name(self) -> str:
        """The user's request id, shared by all n answers."""
        return self.identity.name

    @property
    def tenant(self) -> str:
        """The owner of the request."""
        return self.drafter_view.tenant

    @property
    def owner_of_pages(self) -> str:
        """Owner under which KV pages are shared; adapters compute different KV for the same tokens."""
        adapter = self.identity.adapter
        return self.tenant if adapter is None else adapter.owner_of_pages(self.tenant)

    @property
    def prompt_logprobs(self) -> int | None:
        """Number of alternatives per prompt token; only the first of n answers reports them."""
        return self.params.prompt_logprobs if self.identity.index == 0 else None

    @property
    def scored(self) -> int:
        """Number of leading prompt tokens whose successors have log-probabilities."""
        return len(self.answer.prompt_logprobs)

    @property
    def finish_reason(self) -> str | None:
        """Why the answer has ended; None: it continues."""
        return self.answer.finish_reason

    @property
    def output_ids(self) -> list[int]:
        """The generated tokens."""
        return self.answer.output_ids

    @property
    def room(self) -> int:
        """Number of tokens that may still be committed."""
        return self.answer.room

    @property
    def lag(self) -> int:
        """Number of tokens without KV: one while decoding (it may be pending), more during prefill."""
        return max(len(self.tokens) - self.kv.begin, 1)

    @property
    def can_pipeline(self) -> bool:
        """Whether its next pass can be laid out before the token of the pass in flight is known."""
        draws = self.kv.begin == len(self.tokens)
        return not draws or (self.room > 1 and self.sampler.can_pipeline)

    def fail(self, error: str) -> None:
        """End the answer with an error."""
        self.answer.end("error", error)

    def preempt(self) -> None:
        """Release its KV; drafts for the old state become stale."""
        self.drafter_view.epoch += 1
        self.kv = KvSequence()
        self.accounting.preemptions += 1

    def take_delta(self) -> AnswerDelta:
        """Return the new tokens and text since the last call."""
        answer, gains = self.answer, self.answer.take_gains()
        has_ended, reports_progress = answer.finish_reason is not None, self.identity.reports_progress
        stats = self.stats() if has_ended or reports_progress else None
        is_first = len(answer.tokens) - len(gains.token_ids) == answer.prompt_len
        return AnswerDelta(
            request_id=self.identity.name,
            index=self.identity.index,
            text=gains.text,
            token_ids=gains.token_ids,
            logprobs=gains.logprobs,
            drafted=gains.drafted,
            from_draft=gains.from_draft,
            drafts=gains.drafts,
            finish_reason=answer.finish_reason,
            stop_reason=answer.stop_reason,
            error=answer.error,
            asks_too_much=answer.asks_too_much,
            error_param=answer.error_param,
            seed=self.sampler.seed,
            stats=stats if has_ended else None,
            progress=stats if reports_progress else None,
            prompt_logprobs=tuple(answer.prompt_logprobs) if is_first else (),
        )

    def stats(self) -> RequestStats:
        """Return the statistics so far."""
        method = "" if self.speculation is None else self.speculation.method
        return self.accounting.stats(self.answer, method, self.cohort, self.service.name, self.prediction)
