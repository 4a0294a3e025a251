"""Messages that cross the engine's boundary, whether that is a call, a thread or a process."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from foreword.acceptance.logprobs import TokenLogprobs
from foreword.acceptance.params import SamplingParams
from foreword.control.reporting.figures import ControlReport
from foreword.drafters.config import SpeculationSetting
from foreword.speculation.drafting import NodeReport
from foreword.speculation.measured.situation import cohort_name


@dataclass(frozen=True)
class RequestLabels:
    """What a request says about itself; only the operator's rules read it."""

    metadata: Mapping[str, str] = field(default_factory=dict)
    priority: str = ""  # its class
    stream: bool = False
    model: str = ""  # as its user calls it; empty: as the engine does
    adapter: str = ""
    json_schema: bool = False  # whether the answer's form is prescribed


@dataclass(frozen=True)
class NewRequest:
    """A prompt to answer."""

    request_id: str  # no other request that runs or waits has the same
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    tenant: str = ""  # whose request it is: nothing is cached or learned across tenants
    speculation: SpeculationSetting = None
    progress: bool = False  # whether every delta says what the answer has cost so far
    prediction: tuple[int, ...] = ()  # what the user expects as the answer, for drafters that use it
    labels: RequestLabels = RequestLabels()
    priority: int = 0  # within its class: a lower value comes first, as in vLLM
    deadline_ms: float | None = None  # after its arrival; None: it has time
    adapter: str = ""  # name of the adapter that answers; empty: the model itself
    on_deadline: str = "end"  # with what it has then; or "refuse": as soon as it cannot be whole by then


def cohort_of(method: str, params: SamplingParams) -> str:
    """Return the cohort of requests with this drafter that sample in the same way."""
    return cohort_name(method, sampling_kind(params))


def sampling_kind(params: SamplingParams) -> str:
    return "greedy" if params.temperature == 0 else "sampled"


@dataclass(frozen=True)
class RequestStats:
    """What answering cost. Times are in seconds; shared passes are divided by rows, drafting by requests."""

    prompt_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens whose KV was found in the prefix cache
    output_tokens: int = 0
    first_tokens: int = 0  # of these, the ones that the pass of the first token committed
    first_passes: int = 0  # target passes over the prompt, up to and with that one
    queue_seconds: float = 0.0  # arrival to first pass
    prefill_seconds: float = 0.0  # first pass to the first tokens
    decode_seconds: float = 0.0  # the first tokens to the last
    draft_seconds: float = 0.0  # its part of the time that drafters took
    verify_seconds: float = 0.0  # its part of the target's passes
    accept_seconds: float = 0.0  # its part of judging and committing
    passes: int = 0  # target passes that it took part in
    asks: int = 0  # passes for which a drafter was called
    drafts: int = 0  # passes that verified draft tokens of it
    drafted: int = 0  # draft tokens that were verified
    accepted: int = 0  # draft tokens that were committed
    # Drafts that reached the position; the first is 1 after the text.
    drafted_per_position: tuple[int, ...] = ()
    accepted_per_position: tuple[int, ...] = ()  # drafts whose token there was committed
    rejected_per_position: tuple[int, ...] = ()  # drafts whose first rejected token is there
    rollback_tokens: int = 0  # draft tokens that were computed and discarded
    rejected_kv_bytes: int = 0  # KV memory that was written for them
    accepted_prediction_tokens: int = 0  # of the expected answer, those that the ended answer has
    rejected_prediction_tokens: int = 0  # and those that it has not
    preemptions: int = 0  # times that its KV was given up and computed again
    method: str = ""  # the drafter; empty: none drafted
    cohort: str = ""  # the class of requests that it is counted with
    service: str = ""  # its service class


@dataclass(frozen=True)
class DraftShown:
    """The draft that one pass verified, as a tree, and how many tokens the answer gained by it."""

    tokens: tuple[int, ...]  # [nodes]; none: the pass had no draft
    parents: tuple[int, ...]  # [nodes], index of an earlier node, or -1 after the text
    accepted: tuple[int, ...]  # nodes whose tokens were committed, first to last
    gained: int  # committed tokens: those, then one of the target's own unless the answer ended before it


@dataclass(slots=True)
class AnswerDelta:
    """What an answer has gained. It is never changed; a frozen class would take three times as long to make."""

    request_id: str
    index: int  # which of the request's n answers
    text: str  # certain by now; text that may turn out to be a stop string is held back
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per token, if asked for
    drafts: tuple[DraftShown, ...] = ()  # one per pass that these tokens are from, if progress is asked for
    drafted: int = 0  # draft tokens that were verified while these tokens were gained
    from_draft: int = 0  # how many of the tokens, from the first on, were accepted draft tokens
    finish_reason: str | None = None  # "stop", "length", "deadline", "abort" or "error"
    # The stop token or stop string that was met; None for the model's own end.
    stop_reason: int | str | None = None
    error: str | None = None  # what went wrong, where finish_reason is "error" or "deadline"
    asks_too_much: bool = False  # the error is what the request's own parameters lead to
    error_param: str | None = None  # of these, the first that leaves no token
    seed: int = 0  # the seed in use, given or fresh
    stats: RequestStats | None = None  # with the last delta of an answer
    progress: RequestStats | None = None  # costs so far, with every delta, if asked for
    # With the first delta, if asked for; entry i is of prompt token i + 1.
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass
class CohortTotals:
    """What all passes of a cohort's requests have brought and cost; times as in `RequestStats`."""

    passes: int = 0  # every request's own; those over prompts included
    asks: int = 0  # of these, the ones for which a drafter was called
    tokens: int = 0  # that were committed
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    accept_seconds: float = 0.0


@dataclass(frozen=True)
class EngineStats:
    """Statistics of an engine; counters run since its start."""

    running: int = 0  # answers that are worked on
    waiting: int = 0  # answers that wait for pages or their turn
    kv_pages: int = 0
    kv_pages_used: int = 0  # held by requests; pages that only the prefix cache holds count as free
    prefix_queries: int = 0  # prompt tokens that were looked up in the prefix cache
    prefix_hits: int = 0  # prompt tokens that were found there
    preemptions: int = 0
    steps: int = 0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    accept_seconds: float = 0.0
    step_seconds: float = 0.0  # all of the steps; what the other three leave is scheduling and bookkeeping
    speculating: bool = True  # the switch for the whole engine
    drafter_memory_bytes: int | None = (
        None  # that speculation adds to the target's, as far as the drafters report it
    )
    # By drafter and kind; each has cost only a draft.
    drafter_faults: Mapping[str, int] = field(default_factory=dict)
    step_faults: Mapping[str, int] = field(default_factory=dict)  # by stage; recovered from
    # By cohort: drafts, draft tokens that were verified, draft tokens that were committed.
    acceptance: Mapping[str, tuple[int, int, int]] = field(default_factory=dict)
    # By cohort, those that decode plainly included; requests that run now are counted up to here.
    cohorts: Mapping[str, CohortTotals] = field(default_factory=dict)
    # By service class: answers that are worked on, answers that wait.
    services: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    control: ControlReport | None = None  # the state of speculation, by pair of drafter and cohort
    draft_nodes: tuple[NodeReport, ...] = ()

    def later(self, seconds: float, speculating: bool) -> "EngineStats":
        """Return the same statistics, reported so many seconds later with the switch as it is then."""
        control = None if self.control is None else self.control.aged(seconds)
        return replace(self, speculating=speculating, control=control)

    @property
    def kv_usage(self) -> float:
        """Part of the KV pages that requests hold, 0 to 1."""
        return self.kv_pages_used / self.kv_pages if self.kv_pages else 0.0


class OpenAnswers:
    """Counts the answers of a request, or of several, that have not ended."""

    def __init__(self, answers: int) -> None:
        self.left = answers

    def note(self, item: AnswerDelta | Exception) -> bool:
        """Take what came; True if nothing can come after it. A failure ends all answers."""
        if isinstance(item, Exception):
            self.left = 0
        else:
            self.left -= item.finish_reason is not None
        return not self.left
