"""What a step needs of the parts that it is given."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from foreword.acceptance.request import RequestSampler
from foreword.backends.batch import ForwardBatch, ForwardOutput
from foreword.kv.paged_cache import KvSequence
from foreword.speculation.draft import Draft
from foreword.speculation.situation import AcceptanceStats, Situation
from foreword.speculation.verdict import Verdict


class StepRequest(Protocol):
    """A request as the step sees it."""

    request_id: int  # no other request ever has the same
    tenant: str  # whose request it is; nothing is learned from one tenant for another
    prompt_len: int  # how many of the tokens are the prompt
    tokens: list[int]  # committed: the prompt, then what was generated
    kv: KvSequence  # its computed rows chase its tokens; the newest token has none yet
    sampler: RequestSampler  # its parameters, and what its committed tokens mean to them
    epoch: int  # advances when the request's state is rebuilt, so that older drafts show as stale
    speculation: "Speculation | None"  # who drafts for it, as it was asked for; None: nobody
    acceptance: AcceptanceStats  # how its drafts have fared

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


@dataclass(frozen=True)
class Scheduled:
    """A request's share of a pass: its next `run` committed tokens that have no KV yet."""

    request: StepRequest
    run: int

    @property
    def reaches_end(self) -> bool:
        """Whether the newest committed token is among them, so that the next one can be drawn."""
        return self.request.kv.computed + self.run == len(self.request.tokens)

    @property
    def scored(self) -> int:
        """Rows that tell how likely the next prompt token was, where that is wanted and not known.

        They stand at the end of the run, before the newest token: nothing is generated until all are known.
        """
        request, first = self.request, self.request.kv.computed
        if request.prompt_logprobs is None:
            return 0
        return max(0, min(first + self.run, request.prompt_len - 1) - max(first, request.scored))


class Drafter(Protocol):
    """Anything that guesses."""

    def propose(self, asks: Sequence["Ask"]) -> Sequence[Draft]:
        """One draft for every ask, an empty one where there is nothing to say."""
        ...

    def forget(self, request: "StepRequest") -> None:
        """The request has ended: drop what is kept for it."""
        ...


@runtime_checkable
class ReportsMemory(Protocol):
    """A drafter, or what is made of drafters, that can say how much memory it adds."""

    def memory_bytes(self) -> int | None:
        """Bytes beside the target's own; None where nobody knows."""
        ...


def added_memory(parts: Iterable[object]) -> int | None:
    """Sum over the parts that can say; None if none can."""
    sizes = [part.memory_bytes() for part in parts if isinstance(part, ReportsMemory)]
    known = [size for size in sizes if size is not None]
    return sum(known) if known else None


@runtime_checkable
class ReportsFaults(Protocol):
    """A drafter, or what is made of drafters, that counts what went wrong and cost only its guesses."""

    def fault_counts(self) -> Counter[str]:
        """By drafter and kind: `ngram/timeout`."""
        ...


def all_faults(parts: Iterable[object]) -> Counter[str]:
    """Of the parts that count theirs."""
    return sum((part.fault_counts() for part in parts if isinstance(part, ReportsFaults)), Counter())


@dataclass(frozen=True)
class Speculation:
    """Who drafts for a request and how much at most."""

    method: str  # the drafter's name, for people
    drafter: Drafter
    max_nodes: int
    max_depth: int


@dataclass(frozen=True)
class Ask:
    """How much to guess for one request."""

    request: StepRequest
    max_nodes: int
    max_depth: int


@dataclass(frozen=True)
class Planned:
    """A request's share of a pass and who drafts for it; no drafter means plain decoding."""

    scheduled: Scheduled
    drafter: Drafter | None = None
    max_nodes: int = 0
    max_depth: int = 0
    method: str = ""  # the drafter's name, for the books


class Policy(Protocol):
    """Decides who drafts, with what, how deep."""

    def plan(self, scheduled: Sequence[Scheduled], situation: Situation) -> Sequence[Planned]:
        """One plan for every scheduled request, in the same order.

        `situation` has what was measured so far; each request has its own statistics and what was asked for it.
        """
        ...

    def forget(self, request: StepRequest) -> None:
        """The request has ended: let the drafters drop what they keep for it."""
        ...


class Target(Protocol):
    """The model whose output distribution is promised."""

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        """One pass over all rows of the batch."""
        ...
