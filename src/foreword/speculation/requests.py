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
from foreword.speculation.service import Service
from foreword.speculation.verdict import Verdict


@dataclass
class Switch:
    """Ends the use of a drafter for all requests of a cohort at the next step."""

    is_closed: bool = False  # for good
    is_resting: bool = False  # for a while


@dataclass(frozen=True)
class Gate:
    """Whether a drafter may be asked for some requests, as whoever rolls it out says."""

    switch: Switch
    is_live: bool = True  # its guesses may be verified; else they are only compared with the text

    @property
    def is_open(self) -> bool:
        return self.is_live and not self.switch.is_closed and not self.switch.is_resting

    @property
    def lets_look(self) -> bool:
        """Whether its guesses may be compared with the text."""
        return not self.switch.is_closed and not self.switch.is_resting


@dataclass(frozen=True)
class Aside:
    """A drafter that is asked beside the one whose guesses are verified; its own are only kept for whoever asked."""

    plan: "DraftPlan"
    keep: Callable[[Draft], None]


@dataclass(frozen=True)
class DraftPlan:
    """Who drafts for a request and how much at most; None stands for plain decoding.

    Without nodes nobody is asked; the drafter only reads along what becomes final.
    """

    method: str  # the drafter's name, for people
    drafter: Drafter
    max_nodes: int
    max_depth: int
    max_batch: int | None = None  # it drafts while fewer than this many requests run; None: always
    is_fixed: bool = False  # just so at every step, whatever it brings; else it is the most that may be done
    # By the name of a drafter, those that are not simply asked.
    gates: Mapping[str, Gate] = field(default_factory=dict)
    behind: int = 0  # tokens that came while this drafter was not asked
    aside: Aside | None = None  # who is asked as well; one that needs nothing but the text
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


Seen = tuple[int, int, int]
"""When a drafter saw a request: its tokens, its epoch and its steps then."""


class StepRequest(Protocol):
    """A request as the step sees it."""

    request_id: int  # no other request ever has the same
    tenant: str  # whose request it is; nothing is learned from one tenant for another
    service: Service  # how soon it is to be served
    adapter_slot: int  # of the decoder; 0: the model itself
    prompt_len: int  # how many of the tokens are the prompt
    tokens: list[int]  # committed: the prompt, then what was generated; only ever grows
    kv: KvSequence  # its computed rows chase its tokens; the newest token has none yet
    sampler: RequestSampler  # its parameters, and what its committed tokens mean to them
    epoch: int  # advances when the request's state is rebuilt, so that older drafts show as stale
    speculation: DraftPlan | None  # who drafts for it, as it was asked for; None: nobody
    seen: tuple[Seen, DraftRequest] | None  # as drafters saw it last
    asked: dict[int, Drafter]  # the drafters that were ever asked for it or told of it, by id()
    prediction: Sequence[int]  # what its user expects as the answer; empty: nothing is known
    acceptance: AcceptanceStats  # how its drafts have fared
    step_limit: (
        float | None
    )  # seconds beyond which guesses make no step longer that serves it; None: no bound

    @property
    def cohort(self) -> str:
        """Requests with the same are counted together."""
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
        """How many of these next tokens belong to the answer: it may end inside them."""
        ...

    def commit(self, verdict: Verdict) -> None:
        """Take the verdict's tokens and all that belongs to them, or raise and change nothing."""
        ...

    def fail(self, error: str) -> None:
        """End the answer with an error; other requests go on."""
        ...


def as_drafter_sees(request: StepRequest) -> DraftRequest:
    """The request as it is now; made once a step, whoever asks."""
    now = (len(request.tokens), request.epoch, request.sampler.nonce)
    if request.seen is not None and request.seen[0] == now:
        return request.seen[1]
    found = DraftRequest(
        request.request_id,
        Text(request.tokens),
        request.sampler.drafting(),
        request.prompt_len,
        request.tenant,
        request.epoch,
        request.prediction,
    )
    request.seen = now, found
    return found


class PassEntry(NamedTuple):
    """A request's part of a pass, as things are when the pass begins: it may be cancelled before the pass ends."""

    request: StepRequest
    kv: KvSequence
    computed: int  # KV rows that are there already
    run: int  # tokens that get their KV: committed, but for the pending ones
    scored: int  # of these, the ones that tell how likely the next prompt token was, before the newest token
    draws: bool  # whether the newest token is among them, so that the next one can be drawn
    pending: int = 0  # 1: the last of the run is drawn by a pass that is still under way
    losses: int = 0  # the sequence's when the entry was made: if it has more, an earlier pass has failed

    @staticmethod
    def of(request: StepRequest, run: int) -> "PassEntry":
        """The request's next `run` tokens that have no KV yet and get none by a pass under way.

        Nothing is generated until all prompt tokens are scored, so that scored rows end the run.
        """
        kv = request.kv
        first, scored, length = kv.begin, 0, len(request.tokens)
        if request.prompt_logprobs is not None:
            scored = max(0, min(first + run, request.prompt_len - 1) - max(first, request.scored))
        pending = 1 if first == length else 0  # a pass under way has the newest token that is known
        return PassEntry(request, kv, first, run, scored, first + run == length + pending, pending, kv.losses)

    @property
    def is_present(self) -> bool:
        """Whether the sequence is open still and no pass has failed that this one counted on."""
        return self.kv.losses == self.losses

    def again(self) -> "PassEntry":
        """The same for another try: a pass that failed may have lost rows."""
        return PassEntry.of(self.request, self.run)
