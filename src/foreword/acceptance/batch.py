"""What one call of `accept` is asked, and what it answers."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from foreword.acceptance.request import RECORD, RequestSampler
from foreword.acceptance.rules.trees import NO_TOKEN, DraftTrees, Ints
from foreword.acceptance.transfer import uploaded
from foreword.kernels import sampler as native
from foreword.kernels.placement import placement_of
from foreword.structured.compiled import Bits
from foreword.structured.state import unpacked

Records = npt.NDArray[np.void]


class RowStatus(IntEnum):
    """Whether a token can be drawn from a row."""

    OK = 0
    NOT_FINITE = 1  # NaN or infinity where a logit should be
    ALL_MASKED = 2  # the request's bans and masks leave no token

    def message(self) -> str:
        """What a user reads when a request's taken path has such a row."""
        if self is RowStatus.NOT_FINITE:
            return "the model returned NaN or infinite logits for this request; try --dtype float32"
        return "no token is left to generate"


_OK = int(RowStatus.OK)  # members of an enumeration take longer to look up and compare, and every row is


@dataclass
class Judgement:
    """The rows to be judged in one step: logits, drafts, and every request's parameters as arrays."""

    logits: Tensor  # float32 [rows, vocab], cut to the vocabulary and what grammars allow; never written to
    trees: DraftTrees
    samplers: Sequence[RequestSampler]  # [requests], for the ragged parts (bias, bad words, seen tokens)
    records: Records  # [requests], RECORD
    wants_draws: bool = False  # whether the target's own draw after every row is wanted, whatever the rules
    sampler: native.NativeSampler = field(init=False)  # who works on these rows, for every rule; None: torch
    row_records: Records = field(init=False)  # [rows], the record of the row's request
    # [requests], how many alternatives each wants with its log probabilities; -1: it wants none
    logprobs: list[int] = field(init=False)

    def __post_init__(self) -> None:
        records, trees = self.records, self.trees
        self.sampler = native.sampler_for(self.logits)
        self.row_records = records if trees.is_plain else _repeated(records, trees.starts)
        self.logprobs = records["logprobs"].tolist()

    @staticmethod
    def of(
        logits: Tensor,
        trees: DraftTrees,
        samplers: Sequence[RequestSampler],
        wants_draws: bool = False,
        pending: Sequence[int] = (),
    ) -> "Judgement":
        """The one place where a padded vocabulary is cut, and where rows and requests must agree.

        `pending` are the tokens that each request has beyond those that its sampler knows of; empty: none.
        """
        vocab_size = max([sampler.vocab_size for sampler in samplers])
        rows = trees.starts[-1]
        if logits.ndim != 2 or logits.shape[0] != rows or logits.shape[1] < vocab_size:
            raise ValueError(f"logits {list(logits.shape)} for {rows} rows of at least {vocab_size} tokens")
        if len(samplers) != len(trees.starts) - 1:
            raise ValueError(f"{len(samplers)} samplers for {len(trees.starts) - 1} requests")
        records = np.frombuffer(bytearray().join([sampler.record_bytes for sampler in samplers]), RECORD)
        if any(pending):
            for name in ("length", "generated", "nonce"):
                records[name] += pending
        known = logits if logits.shape[1] == vocab_size else logits[:, :vocab_size]
        return Judgement(within_grammars(known, trees, samplers), trees, samplers, records, wants_draws)

    def per_row(self, field: str) -> npt.NDArray[np.float64]:
        """[rows], a field of the row's request."""
        values: npt.NDArray[np.float64] = self.row_records[field]
        return values

    @property
    def positions(self) -> Ints:
        """[rows], absolute position of the token that the row's logits are about."""
        lengths: Ints = self.row_records["length"]
        return lengths if self.trees.is_plain else lengths + self.trees.depths


def _repeated(records: Records, starts: Sequence[int]) -> Records:
    """[rows], the record of the row's request; put together from bytes: numpy's own way takes ten times as long."""
    raw, size = records.tobytes(), records.itemsize
    parts = [
        raw[at * size : (at + 1) * size] * (end - start) for at, (start, end) in enumerate(pairwise(starts))
    ]
    return np.frombuffer(bytearray().join(parts), records.dtype)


@dataclass(frozen=True)
class Verdicts:
    """What survives of every request's draft, and the token of the target's own after it."""

    paths: list[list[int]]  # per request its accepted nodes, from the first level down
    own: list[int]  # [requests], correction or bonus; NO_TOKEN where the request failed
    states: list[int]  # [requests], RowStatus of the row that the own token comes from
    draws: Sequence[int] = ()  # [rows], what the coupled rule draws after every row; empty if not wanted

    @staticmethod
    def at(
        trees: DraftTrees,
        stops: Sequence[int],
        own: Sequence[int],
        states: Sequence[int],
        draws: Sequence[int] = (),
    ) -> "Verdicts":
        """Verdicts from the last accepted row of every request, the root if no node was accepted."""
        parents = trees.parent_list
        paths = [
            list(range(stop - root))
            if parents[root + 1 : stop + 1] == list(range(root, stop))  # along a chain
            else [row - root - 1 for row in trees.path_to(stop)]
            for root, stop in zip(trees.starts, stops, strict=False)
        ]
        kept = [token if state == _OK else NO_TOKEN for token, state in zip(own, states, strict=True)]
        return Verdicts(paths, kept, list(states), draws)

    @cached_property
    def own_tokens(self) -> Ints:
        """`own` as an array."""
        return np.array(self.own, np.int64)

    @cached_property
    def status(self) -> Ints:
        """`states` as an array."""
        return np.array(self.states, np.int64)

    def path(self, request: int) -> list[int]:
        """The accepted nodes of one request, from the first level down."""
        return self.paths[request]

    def tokens(self, trees: DraftTrees, request: int) -> list[int]:
        """What one request commits: its accepted tokens, then the target's own; a failed request has none of those."""
        tokens, own = [], self.own[request]
        if path := self.paths[request]:
            first, count = trees.starts[request] + 1, len(path)
            tokens = trees.token_list[first : first + path[-1] + 1]
            if path[-1] >= count:  # nodes on other branches lie between
                tokens = [tokens[node] for node in path]
        if own != NO_TOKEN:
            tokens.append(own)
        return tokens

    def draws_of(self, trees: DraftTrees, request: int) -> tuple[int, ...]:
        """What one request's rule draws after its text and after every node of its draft, where that is known."""
        return tuple(self.draws[trees.starts[request] : trees.starts[request + 1]])

    def error(self, request: int) -> str | None:
        """Why a request cannot go on after its accepted tokens, or None."""
        state = self.states[request]
        return None if state == _OK else RowStatus(state).message()


NEVER = -float("inf")

Logits = npt.NDArray[np.float32]

_BYTES = np.arange(256, dtype=np.uint8)[:, None]
_HIGHEST: Logits = np.where(
    np.unpackbits(_BYTES, axis=1, bitorder="little"), np.float32(np.inf), np.float32(NEVER)
)
"""[256, 8], the highest logits of eight tokens by the byte that has their bits: a look into a table of 8 KiB takes the
same time for every mask, and less than finding the bits that are set, or those that are not."""


def within_grammars(logits: Tensor, trees: DraftTrees, samplers: Sequence[RequestSampler]) -> Tensor:
    """The logits [rows, vocab] with no chance for tokens that a grammar rules out; the same where there is none.

    Masks are computed on the host, without waiting for logits that a device still computes.
    On a CPU they are written into the logits: the raw logits of such requests are not read.
    """
    if all(sampler.grammar is None for sampler in samplers):
        return logits
    masks = {
        trees.starts[request]: _masks_of(trees, request, sampler)
        for request, sampler in enumerate(samplers)
        if sampler.grammar is not None
    }
    if placement_of(logits.device).is_host:
        rows, room = logits.numpy(), None
        for first, bits in masks.items():
            room = np.empty((bits.shape[1] * 4, 8), np.float32) if room is None else room
            for place, row in enumerate(bits):
                forbid(rows[first + place], row, room)
        return logits
    allowed = torch.ones(logits.shape, dtype=torch.bool)
    for first, bits in masks.items():
        allowed[first : first + len(bits)] = torch.from_numpy(unpacked(bits, logits.shape[1]))
    return torch.where(uploaded(allowed, logits.device), logits, NEVER)


def _masks_of(trees: DraftTrees, request: int, sampler: RequestSampler) -> Bits:
    assert sampler.grammar is not None
    first, end = trees.starts[request], trees.starts[request + 1]
    parents = [parent - first - 1 for parent in trees.parent_list[first + 1 : end]]
    return sampler.grammar.masks(trees.token_list[first + 1 : end], parents)


def forbid(row: Logits, bits: Bits, room: Logits | None = None) -> None:
    """Take the chance of all tokens whose bit is not set; `room` is as long as the bits, and is written over."""
    highest = np.take(_HIGHEST, bits.view(np.uint8), axis=0, out=room, mode="clip").reshape(-1)
    np.fmin(row, highest[: len(row)], out=row)  # a number that is none is none of a token that cannot come
