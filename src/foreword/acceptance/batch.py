"""Inputs and results of acceptance for one pass."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
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
    """Result of sampling a token from a row of logits."""

    OK = 0
    NOT_FINITE = 1  # a logit is NaN or infinite
    ALL_MASKED = 2  # bad words, allowed tokens and grammar masks leave no token


_OK = int(RowStatus.OK)  # a plain int: enum members are slower to compare, and every row is compared

_MESSAGES = {
    int(
        RowStatus.NOT_FINITE
    ): "the model returned NaN or infinite logits for this request; try --dtype float32",
    int(RowStatus.ALL_MASKED): "no token is left to generate",
}
"""Error messages of requests whose accepted path ends in a row without a token, by RowStatus."""


@dataclass
class Judgement:
    """Input of acceptance for one step: logits, drafts, and the requests' parameters as arrays."""

    logits: Tensor  # float32 [rows, vocab], without padding columns, grammar masks applied; read-only
    trees: DraftTrees
    samplers: Sequence[RequestSampler]  # [requests], for ragged parameters (bias, bad words, seen tokens)
    records: Records  # [requests], RECORD
    wants_draws: bool = False  # sample the target's token after every row, under any rule
    sampler: native.NativeSampler = field(init=False)  # native sampler for these rows; None: torch
    row_records: Records = field(init=False)  # [rows], record of the row's request
    # [requests], number of alternatives with log-probabilities; -1: none requested
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
        """Build the input: cut padding off the vocabulary, apply grammar masks, and check the shapes.

        `pending` has each request's number of tokens that were sampled but are not committed yet; empty: none.
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
        unpadded = logits if logits.shape[1] == vocab_size else logits[:, :vocab_size]
        return Judgement(within_grammars(unpadded, trees, samplers), trees, samplers, records, wants_draws)

    def per_row(self, field: str) -> npt.NDArray[np.float64]:
        """Return a field of RECORD for each row's request, [rows]."""
        values: npt.NDArray[np.float64] = self.row_records[field]
        return values

    @property
    def positions(self) -> Ints:
        """Return the absolute position of the token that each row predicts, [rows]."""
        lengths: Ints = self.row_records["length"]
        return lengths if self.trees.is_plain else lengths + self.trees.depths


def _repeated(records: Records, starts: Sequence[int]) -> Records:
    """Return the record of each row's request, [rows]. Joining bytes is ten times as fast as NumPy's repeat."""
    raw, size = records.tobytes(), records.itemsize
    parts = [
        raw[request * size : (request + 1) * size] * (end - start)
        for request, (start, end) in enumerate(pairwise(starts))
    ]
    return np.frombuffer(bytearray().join(parts), records.dtype)


@dataclass(frozen=True)
class Verdicts:
    """The accepted nodes of every draft, and the target's own token after them."""

    paths: list[list[int]]  # [requests], indices of the accepted nodes in the draft, first level first
    target_tokens: list[int]  # [requests], correction or bonus token; NO_TOKEN if the request failed
    statuses: list[int]  # [requests], RowStatus of the row from which this token was sampled
    draws: Sequence[int] = ()  # [rows], the coupled rule's sample after every row; empty if not wanted

    @staticmethod
    def at(
        trees: DraftTrees,
        stops: Sequence[int],
        target_tokens: Sequence[int],
        statuses: Sequence[int],
        draws: Sequence[int] = (),
    ) -> "Verdicts":
        """Build verdicts from the last accepted row of every request, `stops` (the root if no node was accepted)."""
        parents = trees.parent_list
        paths = []
        for root, stop in zip(trees.starts, stops, strict=False):
            if trees.are_chains or parents[root + 1 : stop + 1] == list(range(root, stop)):
                paths.append(list(range(stop - root)))
            else:
                paths.append([row - root - 1 for row in trees.path_to(stop)])
        with_status = zip(target_tokens, statuses, strict=True)
        valid_tokens = [token if status == _OK else NO_TOKEN for token, status in with_status]
        return Verdicts(paths, valid_tokens, list(statuses), draws)

    def tokens(self, trees: DraftTrees, request: int) -> list[int]:
        """Return the tokens that a request commits: accepted ones, then the target's own unless the request failed."""
        tokens, target_token = [], self.target_tokens[request]
        if path := self.paths[request]:
            first, count = trees.starts[request] + 1, len(path)
            tokens = trees.token_list[first : first + path[-1] + 1]
            if path[-1] >= count:  # nodes of other branches lie in between
                tokens = [tokens[node] for node in path]
        if target_token != NO_TOKEN:
            tokens.append(target_token)
        return tokens

    def draws_of(self, trees: DraftTrees, request: int) -> tuple[int, ...]:
        """Return the request's part of `draws`: the sample after its committed text, then after each node."""
        return tuple(self.draws[trees.starts[request] : trees.starts[request + 1]])

    def error(self, request: int) -> str | None:
        """Return why a request cannot continue after its accepted tokens, or None."""
        return _MESSAGES.get(self.statuses[request])


NEVER = -float("inf")
"""Logit of a forbidden token."""

Logits = npt.NDArray[np.float32]

_BYTES = np.arange(256, dtype=np.uint8)[:, None]
_UPPER_BOUNDS: Logits = np.where(
    np.unpackbits(_BYTES, axis=1, bitorder="little"), np.float32(np.inf), np.float32(NEVER)
)
"""Upper bounds (inf or -inf) of eight logits for each value of a mask's byte, [256, 8].

A table lookup is faster than a search for set bits, and takes the same time for every mask.
"""


def within_grammars(logits: Tensor, trees: DraftTrees, samplers: Sequence[RequestSampler]) -> Tensor:
    """Return the logits [rows, vocab] with tokens that a grammar forbids set to -inf; unchanged without grammars.

    The masks are computed on the host, without waiting for logits on a device. On a CPU, `logits` is changed in place.
    """
    if all(sampler.grammar is None for sampler in samplers):
        return logits
    masks = {  # by the first row of a request
        trees.starts[request]: _masks_of(trees, request, sampler)
        for request, sampler in enumerate(samplers)
        if sampler.grammar is not None
    }
    if placement_of(logits.device).is_host:
        rows = logits.numpy()
        # All masks have the same number of 32-bit words; a word's four bytes stand for eight logits each.
        scratch = np.empty((next(iter(masks.values())).shape[1] * 4, 8), np.float32)
        for first, bits in masks.items():
            for offset, row_bits in enumerate(bits):
                forbid(rows[first + offset], row_bits, scratch)
        return logits
    allowed = torch.ones(logits.shape, dtype=torch.bool)
    for first, bits in masks.items():
        allowed[first : first + len(bits)] = torch.from_numpy(unpacked(bits, logits.shape[1]))
    return torch.where(uploaded(allowed, logits.device), logits, NEVER)


def _masks_of(trees: DraftTrees, request: int, sampler: RequestSampler) -> Bits:
    """Return the grammar's masks for the rows of a request, one bit per token, [rows, words]."""
    assert sampler.grammar is not None
    first, end = trees.starts[request], trees.starts[request + 1]
    parents = [parent - first - 1 for parent in trees.parent_list[first + 1 : end]]
    return sampler.grammar.masks(trees.token_list[first + 1 : end], parents)


def forbid(row: Logits, bits: Bits, scratch: Logits | None = None) -> None:
    """Set the logits of tokens whose bit is 0 to -inf, in place; `scratch` is memory [bytes of `bits`, 8]."""
    bounds = np.take(_UPPER_BOUNDS, bits.view(np.uint8), axis=0, out=scratch, mode="clip").reshape(-1)
    np.fmin(row, bounds[: len(row)], out=row)  # fmin also turns the NaN of a forbidden token into -inf
