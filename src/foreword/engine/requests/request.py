"""A request while it is being answered: its answer, its sampler, its accounting and its place in the queue."""

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
    """Whose answer it is, and how it is to be made."""

    name: str = ""  # the request's id, as its user knows it
    index: int = 0  # which of the n answers to the same prompt
    tenant: str = ""  # nothing is cached or learned across tenants
    reports_progress: bool = False  # every delta says what the answer has cost so far
    prediction: Sequence[int] = ()  # what its user expects as the answer
    adapter: LoadedAdapter | None = None
    assigned: Assignment = field(default_factory=Assignment)  # what the operator's rules say


@dataclass(frozen=True)
class Deadline:
    """When an answer has to be complete."""

    at: float  # by the engine's clock
    milliseconds: float  # after its arrival
    must_be_whole: bool = False  # it ends as soon as it cannot be complete by then; else it ends then


@dataclass
class Queued:
    """What the scheduler notes about a request."""

    leader: "Request | None" = None  # the first answer to the same prompt, whose prompt rows can be copied
    deadline: Deadline | None = None
    served: int = 0  # the newest pass that it took part in
    is_aged: bool = False  # it runs, or may run, because it has waited too long


class Request:
    """One answer with all that belongs to it; the step sees it as a `StepRequest`."""

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
        self.tokens = self.answer.tokens  # the same list
        # Called for every request of every step.
        self.kept, self.commit = self.answer.kept, self.answer.commit
        self.params = params
        self.sampler = sampler
        self.accounting = Accounting()
        self.acceptance = self.accounting.acceptance
        self.queued = Queued()
        self.kv = KvSequence()
        self.speculation = identity.assigned.plan
        # What the step and policies read of its identity.
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
        """The request's id, as its user knows it; all n answers have the same."""
        return self.identity.name

    @property
    def tenant(self) -> str:
        """Whose request it is."""
        return self.drafter_view.tenant

    @property
    def owner_of_pages(self) -> str:
        """Whose published KV pages it may share: another adapter's hold other numbers for the same tokens."""
        adapter = self.identity.adapter
        return self.tenant if adapter is None else adapter.owner_of_pages(self.tenant)

    @property
    def prompt_logprobs(self) -> int | None:
        """Alternatives per prompt token that are wanted; only the first of n answers reports them."""
        return self.params.prompt_logprobs if self.identity.index == 0 else None

    @property
    def scored(self) -> int:
        """Leading prompt tokens whose successors' log probabilities are known."""
        return len(self.answer.prompt_logprobs)

    @property
    def finish_reason(self) -> str | None:
        """Why the answer has ended; None: it has not."""
        return self.answer.finish_reason

    @property
    def output_ids(self) -> list[int]:
        """The generated tokens so far."""
        return self.answer.output_ids

    @property
    def room(self) -> int:
        """Tokens that may still be committed."""
        return self.answer.room

    @property
    def lag(self) -> int:
        """Tokens for the next passes: one for a decoding request, which may be a pending one, more for a prompt."""
        return max(len(self.tokens) - self.kv.begin, 1)

    @property
    def can_be_followed(self) -> bool:
        """Whether its next pass can be laid out before the token of the pass in flight is known."""
        draws = self.kv.begin == len(self.tokens)
        return not draws or (self.room > 1 and self.sampler.can_be_followed)

    def fail(self, error: str) -> None:
        """End the answer with an error."""
        self.answer.end("error", error)

    def preempt(self) -> None:
        """Give up its KV; drafts for the old state become stale."""
        self.drafter_view.epoch += 1
        self.kv = KvSequence()
        self.accounting.preemptions += 1

    def take_delta(self) -> AnswerDelta:
        """Return what the answer has gained since the last call; call it again only when there is more."""
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
        """Return what answering has cost so far."""
        method = "" if self.speculation is None else self.speculation.method
        return self.accounting.stats(self.answer, method, self.cohort, self.service.name, self.prediction)
