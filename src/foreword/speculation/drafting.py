"""Drafter interface: the traits that a drafter declares, and the requests and commits that it receives."""

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
    """A fixed-length prefix view of an append-only token list, without a copy."""

    __slots__ = ("_length", "_tokens")

    def __init__(self, tokens: list[int], length: int | None = None) -> None:
        self._tokens = tokens
        self._length = len(tokens) if length is None else length

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice):
            start, stop, step = index.indices(self._length)
            # With a negative step, `indices` returns the stop −1 for the start of the list.
            return self._tokens[start : stop if stop >= 0 else None : step]
        if not -self._length <= index < self._length:
            raise IndexError(index)
        return self._tokens[index % self._length]


# Every step creates some of these per request. A named tuple is created five times as fast as a frozen dataclass.
class DraftRequest(NamedTuple):
    """A request as drafters see it: an immutable value that can be sent to another machine."""

    request_id: int  # unique within the process
    tokens: Sequence[int]  # committed tokens: the prompt, then the generated ones
    sampling: DraftSampling
    prompt_len: int = 0  # number of leading prompt tokens
    tenant: str = ""  # owner of the request; drafters never use one tenant's text for another
    epoch: int = 0  # incremented when the request's state is rebuilt, which makes older drafts stale
    prediction: Sequence[int] = ()  # the answer that the user expects (OpenAI's `prediction`)

    def without_text(self) -> "DraftRequest":
        """Return the request without the user's tokens, for a drafter that must not read them."""
        return self._replace(tokens=(), prompt_len=0, prediction=())


class RequestRows(NamedTuple):
    """A request's KV pages, for a drafter that writes its own KV rows into them."""

    kv: KvSequence
    cache: PagedCache  # maps rows to pages
    store: KvStore  # holds the pages' bytes


@dataclass(frozen=True)
class KvMemory:
    """The engine's KV pages: bookkeeping and storage."""

    cache: PagedCache
    store: KvStore

    def of(self, kv: KvSequence) -> RequestRows:
        return RequestRows(kv, self.cache, self.store)


class DraftTask(NamedTuple):
    """The draft that a drafter should return: the text to continue, and limits."""

    request: DraftRequest
    max_nodes: int
    max_depth: int
    # The drafter may write rows up to `kv.reserved`; None: it has no rows in the pages.
    pages: RequestRows | None = None
    stop: Stop | None = None  # only for drafters with `stops_itself`; None: draft to the full depth


@dataclass(frozen=True)
class DrafterNeeds:
    """Inputs that a drafter needs besides tokens."""

    taps: tuple[Tap, ...] = ()  # layers whose hidden states every `Commit` must contain
    rows: tuple[RowSpec, ...] = ()  # the drafter's KV rows in the target's pages
    target_rows: bool = False  # whether it reads the target's own KV rows, and writes those of draft tokens
    # Whether every `Commit` must have the token that the target samples after each verified node
    draws: bool = False
    # Number of rows after the text that the drafter overwrites while drafting; 0: as many as the draft has nodes.
    scratch: int = 0

    def __or__(self, other: "DrafterNeeds") -> "DrafterNeeds":
        taps = tuple(dict.fromkeys((*self.taps, *other.taps)))
        rows = tuple(dict.fromkeys((*self.rows, *other.rows)))
        return DrafterNeeds(
            taps,
            rows,
            self.target_rows or other.target_rows,
            self.draws or other.draws,
            max(self.scratch, other.scratch),
        )

    def __bool__(self) -> bool:
        return bool(self.taps or self.uses_pages or self.draws)

    @property
    def uses_pages(self) -> bool:
        """Whether the drafter writes KV rows in the target's pages."""
        return bool(self.rows) or self.target_rows


NO_NEEDS = DrafterNeeds()


NO_STATES: Mapping[Tap, Tensor] = MappingProxyType({})  # no hidden states


class Commit(NamedTuple):
    """What a pass did for a request: the tokens whose KV rows are now final, and the inputs that a drafter needs."""

    request: DraftRequest  # state after the commit
    first: int  # position of the first token whose KV row and hidden states this pass computed
    rows: int  # number of consecutive tokens with new rows; the newest token is not among them
    hidden: Mapping[Tap, Tensor] = NO_STATES  # [rows, hidden size] for each tap that the drafter needs
    draft: Draft = NO_DRAFT  # the verified draft
    draws: tuple[int, ...] = ()  # if needed: the target's sampled token after the text, then after every node
    pages: RequestRows | None = None  # set for a drafter that has rows in the pages
    # Rows before this index are in their final slots, so the drafter may write its KV rows there
    settled: int = 0
    is_on: bool = True  # whether the plan of this step requested a draft from this drafter


class InFlight(NamedTuple):
    """A request in a pass in flight, with a chain of draft tokens that are still on the device."""

    task: DraftTask  # the next draft request; its text ends before the tokens that the pass adds
    draft: Draft  # the chain that the pass verifies, on the device
    states_at: int  # row of the text's newest token in the pass's hidden states; the chain's rows follow
    drawn_at: int  # row of the text's newest token among the rows after which the pass samples a token

    @property
    def tokens(self) -> DeviceTokens:
        """The chain's tokens."""
        assert self.draft.device is not None
        return self.draft.device


class DraftSource(Enum):
    """Kinds of drafters, by the source of their tokens."""

    LOOKUP = auto()  # text of the request, of past answers, or of a datastore
    MODEL = auto()  # a decoder with its own KV cache
    HEAD = auto()  # a network that reads the target's hidden states
    REMOTE = auto()  # draft nodes


@dataclass(frozen=True)
class Traits:
    """Static properties of a drafter. Callers read these, never its name or class."""

    kind: DraftSource = DraftSource.LOOKUP
    needs: DrafterNeeds = NO_NEEDS
    starts_early: bool = False  # `draft_early` may start the next draft while a pass is in flight
    stops_itself: bool = False  # ends a chain as `DraftTask.stop` says, which shortens the call
    expects_requests: bool = False  # wants `expect` to announce requests that wait for their first pass
    may_be_absent: bool = False  # may be temporarily unable to draft; see `Drafter.absent`
    # Published acceptance rate by level, each given that the levels above are accepted; empty: unknown.
    acceptance_by_level: tuple[float, ...] = ()
    drafts_by_level: bool = False  # the time of a call grows with the depth of its draft
    follows: str = (
        ""  # the part of the request that it drafts from: "prediction" or "grammar"; empty: neither
    )
    learns_answers: bool = False  # its drafts depend on the tenant's earlier answers
    is_free: bool = False  # any client of a server may select it: it needs no files and almost no memory
    needs_target: str = ""  # why it cannot run on a draft node, for errors; empty: it can run there

    @staticmethod
    def combined(traits: Sequence["Traits"]) -> "Traits":
        """Return the traits of a drafter that calls all of these; its kind is that of the most expensive one."""
        by_cost = (DraftSource.HEAD, DraftSource.MODEL, DraftSource.REMOTE, DraftSource.LOOKUP)
        kinds = {part.kind for part in traits}
        return Traits(
            next(kind for kind in by_cost if kind in kinds),
            reduce(or_, [part.needs for part in traits], NO_NEEDS),
            starts_early=any(part.starts_early for part in traits),
            expects_requests=any(part.expects_requests for part in traits),
            may_be_absent=any(part.may_be_absent for part in traits),
        )


@dataclass(frozen=True)
class NodeReport:
    """State of one draft node as one target reports it."""

    address: str
    # "up", "shadow" (drafts are compared, not used), "late" (drafts are used, not awaited), "draining" or "down"
    state: str
    reason: str = ""  # why passes do not wait for the node; empty: they wait
    method: str = ""  # of its drafter; empty: unknown
    homes: int = 0  # requests assigned to it
    trips: int = 0  # number of times it was late or lost
    waits: int = 0  # number of passes that waited for it
    wait_seconds: float = 0.0  # total time of these waits
    # Recent measurements; None: none yet, or the node is down.
    first_ms: float | None = None  # from a new text to the first draft level
    level_ms: float | None = None  # from one draft level to the next
    judged: int = 0  # drafts compared with the text
    acceptance: float | None = None  # acceptance rate of first levels


class Drafter:
    """Base class of drafters. A subclass overrides `propose` and the methods that its traits declare."""

    traits = Traits()  # an instance may override this according to its settings
    # Alternatives that the policy selects from, by name; empty: the policy calls this drafter itself.
    choices: Mapping[str, "Drafter"] = MappingProxyType({})

    def propose(self, tasks: Sequence[DraftTask]) -> Sequence[Draft]:
        """Return one draft per task, possibly empty.

        A draft may follow an older, shorter text: the caller drops the tokens that were committed since.
        """
        raise NotImplementedError

    def observe(self, commits: Sequence[Commit]) -> None:
        """Receive the commits of a pass, with the inputs that `traits.needs` declares.

        Called after every pass over an observed request, also if the drafter proposed nothing for that pass.
        """

    def draft_early(self, unjudged: Sequence[InFlight], hidden: Mapping[Tap, Tensor], drawn: Tensor) -> bool:
        """Start the drafts after a pass in flight, if possible; return whether this compiled or captured a graph.

        `propose` may be called after the verdict, as usual. `drawn` (int64 [judged rows]) has the token that the pass
        samples after each row. The device may still be computing `drawn` and `hidden`.
        """
        return False

    def expect(self, request: DraftRequest) -> None:
        """Prepare for a request that waits for its first pass. `forget` is always called later."""

    def forget(self, request: DraftRequest) -> None:
        """Release the state of a request that has ended."""

    @property
    def absent(self) -> tuple[str, ...]:
        """Names of those drafters in this one that cannot draft at present, for example without a reachable node."""
        return ()

    @property
    def is_ready(self) -> bool:
        """Whether all kernels of the drafter are compiled; until then some of its drafts are empty."""
        return True

    def memory_bytes(self) -> int | None:
        """Return the bytes that the drafter needs in addition to the target; None: unknown."""
        return None

    def fault_counts(self) -> Counter[str]:
        """Count recovered faults by drafter and kind, such as `ngram/timeout`."""
        return Counter()

    def nodes(self) -> list[NodeReport]:
        """Return the state of the drafter's draft nodes; thread-safe."""
        return []

    def close(self) -> None:
        """Release all resources; no other method is called afterwards."""


def close_all(drafters: Iterable[Drafter]) -> None:
    """Close all drafters; log exceptions instead of raising them."""
    for drafter in drafters:
        try:
            drafter.close()
        except Exception:
            _log.exception("%r could not be closed", drafter)


def added_memory(drafters: Iterable[Drafter]) -> int | None:
    """Return the total memory of the drafters that report theirs, in bytes; None if none does."""
    sizes = [size for drafter in drafters if (size := drafter.memory_bytes()) is not None]
    return sum(sizes) if sizes else None


def all_faults(drafters: Iterable[Drafter]) -> Counter[str]:
    """Return the fault counts of all drafters together."""
    return sum((drafter.fault_counts() for drafter in drafters), Counter())


def all_node_reports(drafters: Iterable[Drafter]) -> list[NodeReport]:
    """Return the states of the draft nodes of all drafters."""
    return [node for drafter in drafters for node in drafter.nodes()]
