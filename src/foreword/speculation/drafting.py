"""The interface of drafters: what they declare, what they are given and what they return."""

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import reduce
from operator import or_
from types import MappingProxyType
from typing import NamedTuple, overload

from torch import Tensor

from foreword.acceptance.request import DraftSampling
from foreword.backends.batch import Tap
from foreword.backends.interface import KvStore
from foreword.kv.paged_cache import PagedCache
from foreword.kv.sequence import KvSequence
from foreword.kv.spec import RowSpec
from foreword.speculation.confidence import Stop
from foreword.speculation.draft import NO_DRAFT, DeviceTokens, Draft

_log = logging.getLogger(__name__)


class Text(Sequence[int]):
    """The first tokens of a list that only ever grows: they stay the same while it does, without a copy."""

    __slots__ = ("_length", "_tokens")

    def __init__(self, tokens: list[int], length: int | None = None) -> None:
        self._tokens = tokens
        self._length = len(tokens) if length is None else length

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, place: int) -> int: ...
    @overload
    def __getitem__(self, place: slice) -> list[int]: ...
    def __getitem__(self, place: int | slice) -> int | list[int]:
        if isinstance(place, slice):
            start, stop, step = place.indices(self._length)
            return self._tokens[start : stop if stop >= 0 else None : step]
        if not -self._length <= place < self._length:
            raise IndexError(place)
        return self._tokens[place % self._length]


# Every request of every step has some of these: named tuples are made in a fifth of the time of frozen dataclasses.
class DraftRequest(NamedTuple):
    """A request as a drafter sees it: a value, which could be sent to another machine."""

    request_id: int  # no other request ever has the same
    tokens: Sequence[int]  # committed: the prompt, then what was generated
    sampling: DraftSampling
    prompt_len: int = 0  # how many of the tokens are the prompt
    tenant: str = ""  # whose request it is; nothing is learned from one tenant for another
    epoch: int = 0  # advances when the request's state is rebuilt, so that older drafts show as stale
    prediction: Sequence[int] = ()  # what its user expects as the answer

    def without_text(self) -> "DraftRequest":
        """Return the request without its tokens."""
        return self._replace(tokens=(), prompt_len=0, prediction=())


class RequestRows(NamedTuple):
    """A request's KV pages, for a drafter with rows of its own in them."""

    kv: KvSequence
    cache: PagedCache  # where the pages are
    store: KvStore  # what is in them


@dataclass(frozen=True)
class KvMemory:
    """The KV memory of an engine."""

    cache: PagedCache
    store: KvStore

    def of(self, kv: KvSequence) -> RequestRows:
        """One request's part of it."""
        return RequestRows(kv, self.cache, self.store)


class DraftTask(NamedTuple):
    """How much to draft for one request."""

    request: DraftRequest
    max_nodes: int
    max_depth: int
    pages: RequestRows | None = None  # rows up to `kv.reserved` may be written; None: it keeps none
    stop: Stop | None = None  # for drafters with `stops_itself`; None: to the full depth


@dataclass(frozen=True)
class DrafterNeeds:
    """What a drafter has to be given besides the tokens."""

    taps: tuple[Tap, ...] = ()  # hidden states of the target, given with every commit
    rows: tuple[RowSpec, ...] = ()  # KV rows of its own in the target's pages
    draws: bool = False  # what the target itself draws after every node that is verified
    scratch: int = 0  # rows that it writes after the text while it drafts, where more than its nodes

    def __or__(self, other: "DrafterNeeds") -> "DrafterNeeds":
        taps = tuple(dict.fromkeys((*self.taps, *other.taps)))
        rows = tuple(dict.fromkeys((*self.rows, *other.rows)))
        return DrafterNeeds(taps, rows, self.draws or other.draws, max(self.scratch, other.scratch))

    def __bool__(self) -> bool:
        return bool(self.taps or self.rows or self.draws)


NO_NEEDS = DrafterNeeds()


NO_STATES: Mapping[Tap, Tensor] = MappingProxyType({})


class Commit(NamedTuple):
    """What a pass committed for one request: prompt chunks, accepted draft tokens and corrections alike."""

    request: DraftRequest  # with what was committed
    first: int  # position of the first token that got its KV row, and so its hidden states, in this pass
    rows: int  # how many did, one after the other; the newest token is not among them
    hidden: Mapping[Tap, Tensor] = NO_STATES  # [rows, hidden size], those that it needs among them
    draft: Draft = NO_DRAFT  # what was verified
    draws: tuple[int, ...] = ()  # what the target draws after the text, then after every node; if needed
    pages: RequestRows | None = None  # for a drafter with rows of its own in them
    settled: int = 0  # KV rows before this one stay where they are: a drafter may fill its own there
    is_on: bool = True  # whether the plan wanted a draft from it for this request in this step


class InFlight(NamedTuple):
    """A request's part of a pass in flight: a chain of draft tokens of which only the device knows how many hold."""

    ask: DraftTask  # for the draft after it; the request as it is before the pass ends
    draft: Draft  # a chain on the device
    states_at: int  # row of its newest token among the hidden states of the pass; its draft tokens follow
    drawn_at: int  # and among the tokens that the pass draws

    @property
    def tokens(self) -> DeviceTokens:
        """Those of the draft."""
        assert self.draft.device is not None
        return self.draft.device


class DraftSource(Enum):
    """What a drafter gets its draft tokens from."""

    LOOKUP = auto()  # texts: the request's own, past answers, a datastore
    MODEL = auto()  # a decoder with a KV cache of its own
    HEAD = auto()  # a network that reads the target's hidden states
    REMOTE = auto()  # draft nodes


@dataclass(frozen=True)
class Traits:
    """What a drafter is, as data: no caller asks for a drafter's name or class."""

    kind: DraftSource = DraftSource.LOOKUP
    needs: DrafterNeeds = NO_NEEDS
    starts_early: bool = False  # `draft_early` may start the next draft while a pass is in flight
    stops_itself: bool = False  # ends a draft where `DraftTask.stop` says; its time then depends on the depth
    expects_requests: bool = False  # `expect` announces requests that wait for their first pass
    may_be_absent: bool = False  # it may be unable to draft for a while, as `absent` says
    # Acceptance by level that was published with it, each level given that those above hold; empty: unknown.
    acceptance_by_level: tuple[float, ...] = ()
    drafts_by_level: bool = False  # the time of a call grows with the depth of its draft
    follows: str = ""  # what a request must carry for a draft: "prediction" or "grammar"; empty: nothing
    learns_answers: bool = False  # its drafts depend on the tenant's earlier answers
    is_free: bool = False  # takes no files and hardly any memory: any client of a server may select it
    needs_target: str = ""  # why it cannot run on a draft node; empty: it can

    @staticmethod
    def combined(traits: Sequence["Traits"]) -> "Traits":
        """Return the traits of several drafters that draft as one."""
        by_weight = (DraftSource.HEAD, DraftSource.MODEL, DraftSource.REMOTE, DraftSource.LOOKUP)
        return Traits(
            next(kind for kind in by_weight if any(one.kind is kind for one in traits)),
            reduce(or_, [one.needs for one in traits], NO_NEEDS),
            starts_early=any(one.starts_early for one in traits),
            expects_requests=any(one.expects_requests for one in traits),
            may_be_absent=any(one.may_be_absent for one in traits),
        )


@dataclass(frozen=True)
class NodeReport:
    """One draft node, as one target knows it."""

    address: str
    state: str  # "up", "shadow" (compared, not used yet), "late" (used, not waited for), "draining" or "down"
    reason: str = ""  # why it is not waited for; empty: it is
    method: str = ""
    homes: int = 0  # requests that it drafts for
    trips: int = 0  # times that it was found late or lost
    waits: int = 0  # passes that waited for it
    wait_seconds: float = 0.0  # of all of them
    # Measured recently; None: nothing yet, or the node is down.
    first_ms: float | None = None  # from a text to the first level after it
    level_ms: float | None = None  # from one level to the next
    judged: int = 0  # drafts that were compared with the text
    acceptance: float | None = None  # of first levels


class Drafter:
    """Base class of everything that drafts. A drafter overrides `propose` and what its traits promise."""

    traits = Traits()  # an instance may have its own, by its settings
    choices: Mapping[str, "Drafter"] = MappingProxyType({})  # drafters to choose from in its place, by name

    def propose(self, asks: Sequence[DraftTask]) -> Sequence[Draft]:
        """Return one draft for every ask, an empty one where there is nothing to draft.

        A draft for an older, shorter text is rebased along what was committed since.
        """
        raise NotImplementedError

    def observe(self, commits: Sequence[Commit]) -> None:
        """Receive what a pass committed, with what `traits.needs` names; also of passes without a draft of its own."""

    def draft_early(self, unjudged: Sequence[InFlight], hidden: Mapping[Tap, Tensor], drawn: Tensor) -> bool:
        """Start the drafts after a pass in flight, if possible; return whether that compiled or captured something.

        `propose` is called after the verdict as usual, or never.

        `drawn`, int64, has what the pass draws after each row that it verifies; like `hidden`, it is not there yet.
        """
        return False

    def expect(self, request: DraftRequest) -> None:
        """Prepare for a request that waits for its first pass; `forget` comes in any case."""

    def forget(self, request: DraftRequest) -> None:
        """Drop what is kept for a request that has ended."""

    @property
    def absent(self) -> tuple[str, ...]:
        """The names of its parts that cannot draft at present, such as nodes that are gone."""
        return ()

    def memory_bytes(self) -> int | None:
        """Return the bytes that it adds to the target's; None: unknown."""
        return None

    def fault_counts(self) -> Counter[str]:
        """Count the faults that cost only drafts, by drafter and kind: `ngram/timeout`."""
        return Counter()

    def nodes(self) -> list[NodeReport]:
        """Report the draft nodes that it uses; any thread may call this."""
        return []

    def close(self) -> None:
        """Release what it holds; nothing is called afterwards."""


def close_all(drafters: Iterable[Drafter]) -> None:
    """Close all of them, whatever one of them raises."""
    for drafter in drafters:
        try:
            drafter.close()
        except Exception:
            _log.exception("%r could not be closed", drafter)


def added_memory(drafters: Iterable[Drafter]) -> int | None:
    """Sum the memory of those that know theirs; None if none does."""
    known = [size for drafter in drafters if (size := drafter.memory_bytes()) is not None]
    return sum(known) if known else None


def all_faults(drafters: Iterable[Drafter]) -> Counter[str]:
    """Add up the faults of all of them."""
    return sum((drafter.fault_counts() for drafter in drafters), Counter())


def all_nodes(drafters: Iterable[Drafter]) -> list[NodeReport]:
    """List the draft nodes of all of them."""
    return [node for drafter in drafters for node in drafter.nodes()]
