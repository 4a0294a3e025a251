"""A request in progress: answer, sampler, accounting and scheduling state."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from foreword.acceptance.params import SamplingParams
from foreword.acceptance.request import RequestSampler
from foreword.control.service import DEFAULT_SERVICE, Service
from foreword.engine.adapters import LoadedAdapter
from foreword.engine.messages import AnswerDelta, RequestStats, sampling_kind
from foreword.engine.requests.accounting import Accounting
from foreword.engine.requests.answer import AnswerState, RequestLimits
from foreword.engine.text import AnswerText
from foreword.kv.sequence import KvSequence
from foreword.speculation.requests import DrafterView, DraftPlan


@dataclass(frozen=True)
class RolloutArm:
    """The group of a request in one roll-out: with the new drafter (canary) or without."""

    drafter: str
    cohort: str
    is_canary: bool


@dataclass(frozen=True)
class Assignment:
    """Decisions for a request: its cohort, drafter, limits and service class."""

    cohort: str = ""  # for statistics; empty: "greedy" or "sampled"
    plan: DraftPlan | None = None  # None: no drafter
    step_limit: float | None = None  # maximum seconds of a step that drafts and includes this request
    arms: Sequence[RolloutArm] = ()  # one per roll-out that the request takes part in
    service: Service = DEFAULT_SERVICE
    is_replay: bool = False  # an ended request decoded again for a roll-out; no user receives its answer


@dataclass(frozen=True)
class RequestIdentity:
    """The names by which the user knows an answer, and options that apply to it."""

    name: str = ""  # the user's request id
    index: int = 0  # of the answer among the n answers to the prompt
    tenant: str = ""  # nothing is cached or learned across tenants
    reports_progress: bool = False  # every delta includes statistics
    prediction: Sequence[int] = ()  # the answer that the user expects
    adapter: LoadedAdapter | None = None
    assigned: Assignment = field(default_factory=Assignment)  # by the policy file


@dataclass(frozen=True)
class Deadline:
    """The deadline of an answer."""

    at: float  # time of the engine's clock in seconds
    milliseconds: float  # the same, from the arrival of the request
    must_be_whole: bool = (
        False  # True: fail once the answer cannot finish in time; False: cut it at the deadline
    )


@dataclass
class SchedulingState:
    """Scheduling state of a request."""

    # The first of n answers, whose prompt KV this answer can share; None: itself
    leader: "Request | None" = None
    deadline: Deadline | None = None
    last_pass: int = 0  # sequence number of the last pass that included the request
    is_aged: bool = False  # the request was selected because it exceeded its ageing time


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
        self.name, self.tenant = identity.name, identity.tenant
        self.answer = AnswerState(prompt, params, limits, text, identity.reports_progress, sampler)
        self.tokens = self.answer.tokens  # shared, not a copy
        # Bound methods are stored, since every step calls them for every request.
        self.count_kept, self.commit = self.answer.count_kept, self.answer.commit
        self.params = params
        self.sampler = sampler
        self.accounting = Accounting()
        self.acceptance = self.accounting.acceptance
        self.scheduling = SchedulingState()
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
        self.owner_of_pages = self.tenant  # owner under which KV pages are shared
        adapter = identity.adapter
        if adapter is not None:  # KV and acceptance differ between adapters
            self.owner_of_pages = adapter.owner_of_pages(self.tenant)
            if not self.cohort.endswith(f"/{adapter.name}"):
                self.cohort += f"/{adapter.name}"

    @property
    def prompt_logprobs(self) -> int | None:
        """Number of alternatives per prompt token; only the first of n answers reports them."""
        return self.params.prompt_logprobs if self.identity.index == 0 else None

    @property
    def scored(self) -> int:
        """Number of prompt tokens with log-probabilities so far; the first prompt token never has one."""
        return len(self.answer.prompt_logprobs)

    @property
    def finish_reason(self) -> str | None:
        return self.answer.finish_reason

    @property
    def output_ids(self) -> list[int]:
        return self.answer.output_ids

    @property
    def room(self) -> int:
        return self.answer.room

    @property
    def uncomputed(self) -> int:
        """Number of tokens without KV rows that the next pass can compute: 1 while decoding, more during prefill.

        While decoding, this is the newest token, which may still be pending in the pass in flight.
        """
        return max(len(self.tokens) - self.kv.begin, 1)

    @property
    def can_pipeline(self) -> bool:
        """Whether the next pass can be laid out before the pass in flight has returned its token."""
        draws = self.kv.begin == len(self.tokens)  # whether the pass in flight draws a token of this request
        return not draws or (self.room > 1 and self.sampler.can_pipeline)

    def fail(self, error: str) -> None:
        """End the answer with an error."""
        self.answer.finish("error", error)

    def preempt(self) -> None:
        """Count a preemption and drop the KV sequence, which the caller has closed; earlier drafts become stale."""
        self.drafter_view.epoch += 1
        self.kv = KvSequence()
        self.accounting.preemptions += 1

    def take_delta(self) -> AnswerDelta:
        """Return the new tokens and text since the last call, and clear them."""
        answer, pending = self.answer, self.answer.take_pending()
        has_ended, reports_progress = answer.finish_reason is not None, self.identity.reports_progress
        stats = self.stats() if has_ended or reports_progress else None
        is_first = len(answer.tokens) - len(pending.token_ids) == answer.prompt_len
        return AnswerDelta(
            request_id=self.identity.name,
            index=self.identity.index,
            text=pending.text,
            token_ids=pending.token_ids,
            logprobs=pending.logprobs,
            drafted=pending.drafted,
            from_draft=pending.from_draft,
            drafts=pending.drafts,
            finish_reason=answer.finish_reason,
            stop_reason=answer.stop_reason,
            error=answer.error,
            is_request_error=answer.is_request_error,
            error_param=answer.error_param,
            seed=self.sampler.seed,
            stats=stats if has_ended else None,
            progress=stats if reports_progress else None,
            prompt_logprobs=tuple(answer.prompt_logprobs) if is_first else (),
        )

    def stats(self) -> RequestStats:
        method = "" if self.speculation is None else self.speculation.method
        return self.accounting.stats(self.answer, method, self.cohort, self.service.name, self.prediction)
