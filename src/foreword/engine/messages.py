"""Messages to and from an engine, for calls, threads and processes."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from foreword.acceptance.logprobs import TokenLogprobs
from foreword.acceptance.params import SamplingParams
from foreword.control.reporting.figures import ControlReport
from foreword.drafters.config import SpeculationSetting
from foreword.engine.learning import LearningReport
from foreword.speculation.drafting import NodeReport
from foreword.speculation.measured.situation import cohort_name


@dataclass(frozen=True)
class RequestLabels:
    """Properties of a request that the policy file's rules match."""

    metadata: Mapping[str, str] = field(default_factory=dict)
    priority: str = ""  # service class
    stream: bool = False
    model: str = ""  # model name in the request; empty: the engine's
    adapter: str = ""
    json_schema: bool = False  # whether the request prescribes structured output


@dataclass(frozen=True)
class NewRequest:
    """A prompt to answer, and how."""

    request_id: str  # unique among active requests
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    tenant: str = ""  # owner; nothing is cached or learned across tenants
    speculation: SpeculationSetting = None  # None: the engine's default
    progress: bool = False  # whether every delta includes statistics
    prediction: tuple[int, ...] = ()  # the answer that the user expects, for drafters that use it
    labels: RequestLabels = RequestLabels()
    priority: int = 0  # within its service class; lower starts first, as in vLLM
    deadline_ms: float | None = None  # milliseconds from arrival; None: no deadline
    adapter: str = ""  # adapter name; empty: the base model
    # "end": return the tokens that exist at the deadline; "refuse": fail once the answer cannot finish in time
    on_deadline: str = "end"


def cohort_of(method: str, params: SamplingParams) -> str:
    """Return the cohort of requests with this drafter and kind of sampling."""
    return cohort_name(method, sampling_kind(params))


def sampling_kind(params: SamplingParams) -> str:
    """Return "greedy" or "sampled"."""
    return "greedy" if params.temperature == 0 else "sampled"


@dataclass(frozen=True)
class RequestStats:
    """Cost of one answer.

    The time of a pass is divided between its requests by rows, the time of a drafter call equally.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens whose KV was found in the prefix cache
    output_tokens: int = 0
    first_tokens: int = 0  # tokens committed by the pass of the first token
    first_passes: int = 0  # target passes up to the first token
    queue_seconds: float = 0.0  # arrival to first pass
    prefill_seconds: float = 0.0  # first pass to the first tokens
    decode_seconds: float = 0.0  # the first tokens to the last
    draft_seconds: float = 0.0  # its share of drafter calls
    verify_seconds: float = 0.0  # its share of target passes
    accept_seconds: float = 0.0  # its share of acceptance and commit
    passes: int = 0  # target passes
    asks: int = 0  # passes with a drafter call
    drafts: int = 0  # passes with verified draft tokens
    drafted: int = 0  # verified draft tokens
    accepted: int = 0  # committed draft tokens
    drafted_per_position: tuple[int, ...] = ()  # number of drafts that have this position
    accepted_per_position: tuple[int, ...] = ()  # drafts whose token at the position was committed
    rejected_per_position: tuple[int, ...] = ()  # drafts whose first rejected token is at the position
    rollback_tokens: int = 0  # draft tokens that were computed and discarded
    rejected_kv_bytes: int = 0  # KV bytes written for discarded draft tokens
    accepted_prediction_tokens: int = 0  # tokens of the prediction that occur in the answer
    rejected_prediction_tokens: int = 0  # tokens of the prediction that do not
    preemptions: int = 0  # number of times its KV was released and recomputed
    method: str = ""  # the drafter; empty: none
    cohort: str = ""  # the cohort in which the answer is counted
    service: str = ""  # service class of the request


@dataclass(frozen=True)
class DraftShown:
    """The draft tree that one pass verified, and the number of committed tokens."""

    tokens: tuple[int, ...]  # [nodes]; empty: no draft
    parents: tuple[int, ...]  # [nodes], index of an earlier node, or -1 after the text
    accepted: tuple[int, ...]  # committed nodes, in order
    gained: int  # committed tokens: accepted ones plus the target's own unless the answer ended before it


@dataclass(slots=True)
class AnswerDelta:
    """New tokens and text of an answer.

    Deltas are treated as immutable. The class is not frozen, since creating one would take three times as long.
    """

    request_id: str
    index: int  # index of the answer among the request's n answers
    text: str  # final text; a possible start of a stop string is held back
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per token, if requested
    drafts: tuple[DraftShown, ...] = ()  # one per pass of these tokens, if progress is requested
    drafted: int = 0  # draft tokens verified for these tokens
    from_draft: int = 0  # number of tokens that were draft tokens; they come first in each pass
    finish_reason: str | None = None  # "stop", "length", "deadline", "abort" or "error"
    # The stop token or stop string that matched; None: the model's end-of-sequence token.
    stop_reason: int | str | None = None
    error: str | None = None  # error message, if finish_reason is "error" or "deadline"
    is_request_error: bool = False  # the request's own parameters cause the error
    error_param: str | None = None  # first parameter that forbids tokens, if the parameters cause the error
    seed: int = 0  # the seed in use
    stats: RequestStats | None = None  # set in the last delta of an answer
    progress: RequestStats | None = None  # statistics so far, in every delta, if requested
    # In the first delta: entry i belongs to prompt token i + 1.
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass
class CohortTotals:
    """Totals over all requests of a cohort; times as in `RequestStats`."""

    passes: int = 0  # sum over requests, including prefill
    asks: int = 0  # passes with a drafter call
    tokens: int = 0  # committed tokens
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    accept_seconds: float = 0.0


@dataclass(frozen=True)
class EngineStats:
    """Statistics of an engine; counters start with it."""

    running: int = 0  # answers in progress
    waiting: int = 0  # answers waiting for pages or their turn
    kv_pages: int = 0
    kv_pages_used: int = 0  # pages that requests use; those that only the prefix cache uses count as free
    prefix_queries: int = 0  # prompt tokens looked up in the prefix cache
    prefix_hits: int = 0  # prompt tokens found there
    preemptions: int = 0
    steps: int = 0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    accept_seconds: float = 0.0
    step_seconds: float = 0.0  # total: the three stages, planning and bookkeeping
    speculating: bool = True  # the engine-wide switch
    drafter_memory_bytes: int | None = None  # sum over the drafters that report their memory; None: none does
    drafter_faults: Mapping[str, int] = field(default_factory=dict)  # recovered faults by drafter and kind
    step_faults: Mapping[str, int] = field(default_factory=dict)  # recovered faults by stage
    # By cohort: drafts, verified draft tokens, committed draft tokens.
    acceptance: Mapping[str, tuple[int, int, int]] = field(default_factory=dict)
    # By cohort, including requests without drafts and running ones.
    cohorts: Mapping[str, CohortTotals] = field(default_factory=dict)
    # By service class: running answers, waiting answers.
    services: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    control: ControlReport | None = None  # state of speculation by drafter and cohort
    learning: LearningReport | None = None  # None: the head is not trained while serving
    draft_nodes: tuple[NodeReport, ...] = ()
    kernels_loaded: int = 0  # compiled GPU kernels
    kernels_pending: int = 0  # GPU kernels that are being compiled
    passes_captured: int = 0  # passes captured as GPU graphs
    passes_eager: int = 0  # passes without a graph although they could have one
    passes_cold: int = 0  # passes that were captured or were the first of their shape
    states: int = 0  # allocated states of recurrent layers
    states_used: int = 0  # states that requests or the prefix cache use
    state_checkpoints: int = 0  # states in the prefix cache
    state_hits: int = 0  # requests that began with a state of the prefix cache
    state_evictions: int = 0  # states dropped from the prefix cache to make room

    def later(self, seconds: float, speculating: bool) -> "EngineStats":
        """Return these statistics `seconds` of wall time later, with the current engine-wide switch."""
        control = None if self.control is None else self.control.aged(seconds)
        return replace(self, speculating=speculating, control=control)

    @property
    def kv_usage(self) -> float:
        return self.kv_pages_used / self.kv_pages if self.kv_pages else 0.0


class OpenAnswers:
    """Counts the unfinished answers of one or several requests."""

    def __init__(self, answers: int) -> None:
        self.left = answers  # number of unfinished answers

    def note(self, item: AnswerDelta | Exception) -> bool:
        """Subtract an answer that this delta ends, or all after an exception; return whether none is left."""
        if isinstance(item, Exception):
            self.left = 0
        elif item.finish_reason is not None:
            self.left -= 1
        return not self.left
