"""A request as the step sees it, and its part of a pass."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from foreword.acceptance.request import RequestSampler
from foreword.kv.sequence import KvSequence
from foreword.speculation.confidence import Stop
from foreword.speculation.draft import Draft
from foreword.speculation.drafting import Drafter, DraftRequest, Text
from foreword.speculation.measured.acceptance_stats import AcceptanceStats
from foreword.speculation.verdict import Verdict


class DraftGate(Protocol):
    """Whether a drafter may be used for a request now."""

    @property
    def is_open(self) -> bool:
        """Whether its drafts may be verified."""
        ...

    @property
    def lets_look(self) -> bool:
        """Whether its drafts may be compared with the text."""
        ...


@dataclass(frozen=True)
class ShadowDraft:
    """A shadow draft: made beside the one that is verified, and only given to `keep`."""

    plan: "DraftPlan"
    keep: Callable[[Draft], None]


@dataclass(frozen=True)
class DraftPlan:
    """Who drafts for a request and how much at most; None stands for plain decoding.

    Without nodes no draft is requested; the drafter only observes commits.
    """

    method: str  # the drafter's name, for people
    drafter: Drafter
    max_nodes: int
    max_depth: int
    max_batch: int | None = None  # it drafts while fewer than this many requests run; None: always
    is_fixed: bool = False  # just so at every step, whatever it brings; else it is the most that may be done
    # By the name of a drafter, those that are not simply asked.
    gates: Mapping[str, DraftGate] = field(default_factory=dict)
    lag: int = 0  # tokens that were committed since this drafter was last called
    shadow: ShadowDraft | None = None  # of a drafter that needs nothing but the text
    stop: Stop | None = None  # from where on going on is not worth it, for a drafter that `stops`

    def allows(self, running: int) -> bool:
        """Whether it drafts while so many requests run."""
        gate = self.gates.get(self.method)
        return (gate is None or gate.is_open) and (self.max_batch is None or running < self.max_batch)

    @property
    def may_be_tried(self) -> bool:
        """Whether it may be asked for drafts that are only compared with the text."""
        gate = self.gates.get(self.method)
        return gate is None or gate.lets_look


@dataclass
class DrafterView:
    """What drafters see of a request besides its tokens, and which of them know the request."""

    prompt_len: int  # how many of the tokens are the prompt
    tenant: str = ""  # whose request it is; nothing is learned from one tenant for another
    prediction: Sequence[int] = ()  # what its user expects as the answer; empty: unknown
    epoch: int = 0  # advances when the request's state is rebuilt, so that older drafts show as stale
    notified: dict[int, Drafter] = field(default_factory=dict)  # by id(): they are notified of its end, too
    _newest: tuple[tuple[int, int, int], DraftRequest] | None = None

    def now(self, request: "StepRequest") -> DraftRequest:
        """Return the request as it is now; it is made once a step, for all drafters."""
        state = len(request.tokens), self.epoch, request.sampler.nonce
        if self._newest is None or self._newest[0] != state:
            found = DraftRequest(
                request.request_id,
                Text(request.tokens),
                request.sampler.drafting(),
                self.prompt_len,
                self.tenant,
                self.epoch,
                self.prediction,
            )
            self._newest = state, found
        return self._newest[1]


class StepRequest(Protocol):
    """A request as the step sees it."""

    request_id: int  # no other request ever has the same
    tokens: list[int]  # committed: the prompt, then what was generated; only ever grows
    kv: KvSequence  # its computed rows chase its tokens; the newest token has none yet
    sampler: RequestSampler  # its parameters, and what its committed tokens mean to them
    adapter_slot: int  # of the decoder; 0: the model itself
    speculation: DraftPlan | None  # the drafter that was requested for it; None: speculation is off
    drafter_view: DrafterView
    acceptance: AcceptanceStats  # of its drafts

    @property
    def cohort(self) -> str:
        """Requests of the same cohort are counted together."""
        ...

    @property
    def prompt_logprobs(self) -> int | None:
        """Alternatives per prompt token that are wanted; None: no log probabilities of the prompt."""
        ...

    @property
    def scored(self) -> int:
        """Leading prompt tokens whose successors' log probabilities are known."""
        ...

    @property
    def room(self) -> int:
        """Tokens that may still be committed."""
        ...

    def kept(self, tokens: Sequence[int]) -> int:
        """Return how many of these next tokens belong to the answer: it may end inside them."""
        ...

    def commit(self, verdict: Verdict) -> None:
        """Take the verdict's tokens and all that belongs to them, or raise and change nothing."""
        ...

    def fail(self, error: str) -> None:
        """End the answer with an error; other requests continue."""
        ...


def as_drafter_sees(request: StepRequest) -> DraftRequest:
    """Return the request as drafters see it now."""
    return request.drafter_view.now(request)


class PassEntry(NamedTuple):
    """A request's part of a pass, as things are when the pass begins: it may be cancelled before the pass ends."""

    request: StepRequest
    kv: KvSequence
    computed: int  # KV rows that are there already
    run: int  # tokens that get their KV: committed, but for the pending ones
    scored: int  # of these, the ones that tell how likely the next prompt token was, before the newest token
    draws: bool  # whether the newest token is among them, so that the next one can be drawn
    pending: int = 0  # 1: the last of the run is drawn by a pass that is still in flight
    losses: int = 0  # the sequence's when the entry was made: if it has more, an earlier pass has failed

    @staticmethod
    def of(request: StepRequest, run: int) -> "PassEntry":
        """The request's next `run` tokens that have no KV yet and get none by a pass in flight.

        Nothing is generated until all prompt tokens are scored, so that scored rows end the run.
        """
        kv = request.kv
        first, scored, length = kv.begin, 0, len(request.tokens)
        if request.prompt_logprobs is not None:
            scored = max(
                0, min(first + run, request.drafter_view.prompt_len - 1) - max(first, request.scored)
            )
        pending = 1 if first == length else 0  # a pass in flight has the newest token that is known
        return PassEntry(request, kv, first, run, scored, first + run == length + pending, pending, kv.losses)

    @property
    def is_present(self) -> bool:
        """Whether the sequence is open still and no pass has failed that this one counted on."""
        return self.kv.losses == self.losses

    def again(self) -> "PassEntry":
        """The same for another try: a pass that failed may have lost rows."""
        return PassEntry.of(self.request, self.run)
