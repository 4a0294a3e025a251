"""A request as the step sees it, and its entry in a pass."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from foreword.acceptance.logprobs import TokenLogprobs
from foreword.acceptance.request import RequestSampler
from foreword.kv.sequence import KvSequence
from foreword.speculation.acceptance_stats import AcceptanceStats
from foreword.speculation.confidence import Stop
from foreword.speculation.draft import NO_DRAFT, Draft
from foreword.speculation.drafting import Drafter, DraftRequest, Text


class Verdict(NamedTuple):
    """The accepted path through a draft, and the tokens to commit."""

    path: tuple[int, ...] = ()  # accepted nodes, the first level first
    # The tokens to commit: those of the path, then the target's own token unless the answer ended before it.
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per token if requested
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # of prompt tokens scored in this pass, if requested
    error: str | None = None  # why the request cannot continue after these tokens, unless they end it
    is_request_error: bool = False  # the request's own parameters cause the error, not a fault
    poisoned: bool = False  # the pass computed NaN or infinity: the KV rows it wrote must not be reused
    draft: Draft = NO_DRAFT  # the verified draft
    # The target's sampled token after the text, then after every node; empty: no drafter needs them.
    draws: tuple[int, ...] = ()

    @property
    def judged(self) -> Draft:
        """The part of the draft whose nodes were accepted or rejected.

        If the target adds no token after the path, the answer ended there or the last row is not finite. Deeper nodes
        are then neither accepted nor rejected.
        """
        if not self.draft.parents or len(self.tokens) > len(self.path):
            return self.draft
        return self.draft.within(len(self.draft), len(self.path))


NOTHING_DRAWN = (
    Verdict()
)  # of a prompt chunk before the prompt's end, and of a request that ended during the pass


class DraftGate(Protocol):
    """Roll-out state of a drafter for a request."""

    @property
    def is_open(self) -> bool:
        """Whether drafts may be verified."""

    @property
    def may_observe(self) -> bool:
        """Whether drafts may be compared with the text."""


@dataclass(frozen=True)
class ShadowDraft:
    """A draft of another drafter, requested before the planned one and compared with the text.

    `keep` receives it. If `keep` returns True, it is verified instead of the planned draft, which is not requested.
    """

    plan: "DraftPlan"
    keep: Callable[[Draft], bool | None]


@dataclass(frozen=True)
class DraftPlan:
    """The drafter of a request and the limits of its drafts. Where a plan is optional, None is plain decoding.

    With `max_nodes` 0, no draft is requested and the drafter only observes commits.
    """

    method: str  # the drafter's name
    drafter: Drafter
    max_nodes: int
    max_depth: int
    max_batch: int | None = None  # draft only while fewer requests than this run; None: always
    is_fixed: bool = False  # True: every step uses these limits; False: they are upper bounds for the policy
    gates: Mapping[str, DraftGate] = field(default_factory=dict)  # roll-out states, by drafter name
    lag: int = 0  # tokens committed since the drafter was last called for this request
    shadow: ShadowDraft | None = None  # only for a drafter that needs nothing but tokens
    stop: Stop | None = None  # when to end the chain, for a drafter with `stops_itself`

    def allows(self, running: int) -> bool:
        """Return whether the drafter may draft while `running` requests run."""
        gate = self.gates.get(self.method)
        return (gate is None or gate.is_open) and (self.max_batch is None or running < self.max_batch)

    @property
    def may_be_tried(self) -> bool:
        """Whether shadow drafts may be requested."""
        gate = self.gates.get(self.method)
        return gate is None or gate.may_observe


@dataclass
class DrafterView:
    """A request's data for drafters besides its tokens, and the drafters that have state of the request."""

    prompt_len: int  # number of prompt tokens
    tenant: str = ""  # owner of the request; drafters never use one tenant's text for another
    prediction: Sequence[int] = ()  # the answer that the user expects; empty: unknown
    epoch: int = 0  # incremented when the request's state is rebuilt, which makes older drafts stale
    notified: dict[int, Drafter] = field(default_factory=dict)  # drafters to notify of its end, by id()
    # The newest `DraftRequest` after the state that it was created for: text length, epoch and nonce.
    _newest: tuple[tuple[int, int, int], DraftRequest] | None = None

    def now(self, request: "StepRequest") -> DraftRequest:
        """Return the current `DraftRequest`, created once per step for all drafters."""
        state = len(request.tokens), self.epoch, request.sampler.nonce
        if self._newest is None or self._newest[0] != state:
            draft_request = DraftRequest(
                request.request_id,
                Text(request.tokens),
                request.sampler.drafting(),
                self.prompt_len,
                self.tenant,
                self.epoch,
                self.prediction,
            )
            self._newest = state, draft_request
        return self._newest[1]


class StepRequest(Protocol):
    """A request as the step sees it."""

    request_id: int  # unique within the process
    tokens: list[int]  # committed tokens: the prompt, then the generated ones; append-only
    kv: KvSequence  # computed rows lag the tokens by at least one: the newest token has no row yet
    sampler: RequestSampler  # sampling parameters and state
    adapter_slot: int  # 0: the base model
    speculation: DraftPlan | None  # the requested drafter; None: speculation is off
    drafter_view: DrafterView
    acceptance: AcceptanceStats  # statistics of its drafts

    @property
    def cohort(self) -> str:
        """Name of the cohort in which its drafts are counted."""

    @property
    def prompt_logprobs(self) -> int | None:
        """Number of alternatives per prompt token; None: no prompt log-probabilities."""

    @property
    def scored(self) -> int:
        """Number of leading prompt tokens whose successors have log-probabilities."""

    @property
    def room(self) -> int:
        """Number of tokens that may still be committed."""

    def count_kept(self, tokens: Sequence[int]) -> int:
        """Return how many of these next tokens belong to the answer, which may end within them."""

    def commit(self, verdict: Verdict) -> None:
        """Apply the verdict, or raise an exception and change nothing."""

    def fail(self, error: str) -> None:
        """End the answer with an error. Other requests continue."""


def draft_request_of(request: StepRequest) -> DraftRequest:
    """Return the request as drafters see it now."""
    return request.drafter_view.now(request)


class PassEntry(NamedTuple):
    """A request's part of a pass, fixed at launch. The request may be cancelled before the pass ends."""

    request: StepRequest
    kv: KvSequence
    computed: int  # KV rows computed before the pass
    # Number of tokens whose KV rows the pass computes, without draft tokens. They are in the text but have no KV row
    # yet; the last one may be pending.
    run: int
    scored: int  # rows of the run that return the log-probability of the next prompt token
    draws: bool  # whether the run includes the newest token, so that the pass samples the next one
    pending: int = 0  # 1 if the run's last token is still being sampled by a pass in flight
    losses: int = 0  # number of failed passes of the sequence when the entry was created

    @staticmethod
    def of(request: StepRequest, run: int) -> "PassEntry":
        """Return the entry of the next `run` tokens whose KV rows are neither computed nor in flight.

        Scored rows are the last ones of the run, since generation starts after all prompt tokens are scored.
        """
        kv = request.kv
        first, scored, length = kv.begin, 0, len(request.tokens)
        if request.prompt_logprobs is not None:
            end_of_scored = min(first + run, request.drafter_view.prompt_len - 1)
            scored = max(0, end_of_scored - max(first, request.scored))
        pending = (
            1 if first == length else 0
        )  # then a pass in flight is still sampling the first token of the run
        draws = first + run == length + pending
        return PassEntry(request, kv, first, run, scored, draws, pending, kv.losses)

    @property
    def is_present(self) -> bool:
        """Whether the sequence is still open and no pass that this entry depends on has failed."""
        return self.kv.losses == self.losses

    def again(self) -> "PassEntry":
        """Return the entry of as many tokens for a retry; it may begin earlier, since a failed pass may lose rows."""
        return PassEntry.of(self.request, self.run)
