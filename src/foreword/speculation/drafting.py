"""What drafters see, say and need."""

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, Protocol, overload, runtime_checkable

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
        """Enough to know it by."""
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


class Ask(NamedTuple):
    """How much to guess for one request."""

    request: DraftRequest
    max_nodes: int
    max_depth: int
    pages: RequestRows | None = None  # rows up to `kv.reserved` may be written; None: it keeps none
    stop: Stop | None = None  # for drafters that `stops`; None: as deep as was asked for


@dataclass(frozen=True)
class DrafterNeeds:
    """What a drafter has to be given besides the tokens."""

    taps: tuple[Tap, ...] = ()  # hidden states of the target, told with every commit
    rows: tuple[RowSpec, ...] = ()  # KV rows of its own in the target's pages
    draws: bool = False  # what the target itself draws after every node that is judged
    scratch: int = (
        0  # rows that it writes behind the text while it drafts, where these are more than its nodes
    )

    def __or__(self, other: "DrafterNeeds") -> "DrafterNeeds":
        taps = tuple(dict.fromkeys((*self.taps, *other.taps)))
        rows = tuple(dict.fromkeys((*self.rows, *other.rows)))
        return DrafterNeeds(taps, rows, self.draws or other.draws, max(self.scratch, other.scratch))

    def __bool__(self) -> bool:
        return bool(self.taps or self.rows or self.draws)


NO_NEEDS = DrafterNeeds()


NO_STATES: Mapping[Tap, Tensor] = MappingProxyType({})


class Commit(NamedTuple):
    """What a pass has made final for one request: prompt chunks, accepted guesses and corrections alike."""

    request: DraftRequest  # with what was committed
    first: int  # position of the first token that got its KV row, and so its hidden states, in this pass
    rows: int  # how many did, one after the other; the newest token is not among them
    hidden: Mapping[Tap, Tensor] = NO_STATES  # [rows, hidden size], those that it asks for among them
    draft: Draft = NO_DRAFT  # what was judged
    draws: tuple[int, ...] = ()  # what the target draws after the text, then after every node; if asked for
    pages: RequestRows | None = None  # for a drafter with rows of its own in them
    settled: int = 0  # KV rows before this one stay where they are: a drafter may fill its own there
    is_on: bool = True  # whether the drafter was meant to guess for this request in this step


class Drafter(Protocol):
    """Anything that guesses."""

    def propose(self, asks: Sequence[Ask]) -> Sequence[Draft]:
        """One draft for every ask, an empty one where there is nothing to say.

        A draft for an older, shorter text is welcome: it is rebased along what was committed since.
        """
        ...

    def forget(self, request: DraftRequest) -> None:
        """The request has ended: drop what is kept for it."""
        ...


@runtime_checkable
class Observes(Protocol):
    """A drafter that needs more than tokens, and is told what was committed together with it."""

    needs: DrafterNeeds

    def observe(self, commits: Sequence[Commit]) -> None:
        """Learn from a pass, whether or not it was asked to guess for it."""
        ...


class Unjudged(NamedTuple):
    """A request's part of a pass under way: a chain of guesses of which only the device will know how many hold."""

    ask: Ask  # for the guesses behind it; the request as it is before the pass ends
    draft: Draft  # a chain on the device
    states_at: (
        int  # the row of its newest token among the hidden states of the pass; those of its guesses follow
    )
    drawn_at: int  # and among what the pass draws

    @property
    def tokens(self) -> DeviceTokens:
        """Those of the draft."""
        assert self.draft.device is not None
        return self.draft.device


@runtime_checkable
class Anticipates(Protocol):
    """A drafter that may guess behind a pass before anybody knows what that has made final."""

    anticipates: bool  # whether it may

    def anticipate(self, unjudged: Sequence[Unjudged], hidden: Mapping[Tap, Tensor], drawn: Tensor) -> bool:
        """Begin to guess, if it can, and return whether that compiled or captured something.

        It is asked as always when the pass has been judged, or never.

        `drawn`, int64, is what the pass draws after every row that it judges; nobody waits for it, nor for the states.
        """
        ...


@runtime_checkable
class Expects(Protocol):
    """A drafter that may have a use for the time before a request's first pass."""

    expects: bool  # whether it has

    def expect(self, request: DraftRequest) -> None:
        """The request waits for its turn; `forget` comes in any case."""
        ...


@runtime_checkable
class Closes(Protocol):
    """A drafter that has something to give back."""

    def close(self) -> None:
        """Nobody asks any more."""
        ...


def needs_of(drafter: object) -> DrafterNeeds:
    """What it declares; nothing if it declares nothing."""
    # `isinstance` of a protocol costs ten times as much, and every step asks.
    needs: DrafterNeeds = getattr(drafter, "needs", NO_NEEDS)
    return needs


def expected_rates(drafter: object) -> tuple[float, ...]:
    """How often its guesses were right where it was made, by level, all above being right; empty: nobody knows."""
    rates: tuple[float, ...] = getattr(drafter, "acceptance_by_level", ())
    return rates


def expects(drafter: object) -> bool:
    """Whether it wants to know of requests before it is asked for them."""
    return isinstance(drafter, Expects) and drafter.expects


def anticipates(drafter: object) -> bool:
    """Whether it may guess behind a pass that is under way."""
    return bool(getattr(drafter, "anticipates", False))


def stops(drafter: object) -> bool:
    """Whether it ends drafts where an ask's `stop` says so, and what a call takes is by how deep they are."""
    return bool(getattr(drafter, "stops", False))


def absent_of(drafter: object) -> tuple[str, ...]:
    """The names of its parts that can say nothing at present, such as nodes that are gone."""
    absent: tuple[str, ...] = getattr(drafter, "absent", ())
    return absent


def may_be_absent(drafter: object) -> bool:
    """Whether that can happen to it: the others need not be asked again and again."""
    return bool(getattr(drafter, "may_be_absent", False))


def choices_of(drafter: object) -> Mapping[str, Drafter]:
    """The drafters that a policy may choose between instead of it, by name; none: it is asked itself."""
    choices: Mapping[str, Drafter] = getattr(drafter, "choices", {})
    return choices


def close_all(parts: Iterable[object]) -> None:
    """Close the parts that can be closed."""
    for part in parts:
        if isinstance(part, Closes):
            try:
                part.close()
            except Exception:  # the others are to be closed all the same
                _log.exception("%r could not be closed", part)


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
