"""What one call of `accept` is asked, and what it answers."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt
from torch import Tensor

from foreword.acceptance.request import RECORD, RequestSampler
from foreword.acceptance.trees import DraftTrees, Ints

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
        return "bad_words, min_tokens, logit_bias and allowed tokens leave no token to generate; allow more tokens"


@dataclass(frozen=True)
class Judgement:
    """The rows to be judged in one step: logits, drafts, and every request's parameters as arrays."""

    logits: Tensor  # float32 [rows, vocab], cut to the vocabulary; never written to
    trees: DraftTrees
    samplers: Sequence[RequestSampler]  # [requests], for the ragged parts (bias, bad words, seen tokens)
    records: Records  # [requests], RECORD
    row_mask: Tensor | None = None  # bool [rows, vocab], what a grammar allows after each row

    @staticmethod
    def of(logits: Tensor, trees: DraftTrees, samplers: Sequence[RequestSampler]) -> "Judgement":
        """The one place where a padded vocabulary is cut, and where rows and requests must agree."""
        vocab_size = max(sampler.vocab_size for sampler in samplers)
        rows = int(trees.row_starts[-1])
        if logits.ndim != 2 or logits.shape[0] != rows or logits.shape[1] < vocab_size:
            raise ValueError(f"logits {list(logits.shape)} for {rows} rows of at least {vocab_size} tokens")
        if len(samplers) != len(trees.roots):
            raise ValueError(f"{len(samplers)} samplers for {len(trees.roots)} requests")
        records = np.frombuffer(b"".join([sampler.record.tobytes() for sampler in samplers]), RECORD)
        return Judgement(logits[:, :vocab_size], trees, samplers, records)

    def per_row(self, field: str) -> npt.NDArray[np.float64]:
        """[rows], a field of the row's request."""
        values: npt.NDArray[np.float64] = self.records[field][self.trees.request_of_row]
        return values

    @property
    def positions(self) -> Ints:
        """[rows], absolute position of the token that the row's logits are about."""
        lengths: Ints = self.records["length"][self.trees.request_of_row]
        return lengths + self.trees.depths


@dataclass(frozen=True)
class Verdicts:
    """What survives of every request's draft, and the token of the target's own behind it."""

    stop_rows: Ints  # [requests], the last accepted row, the root if no node was accepted
    paths: Ints  # [requests, deepest], accepted node indices, then -1
    own_tokens: Ints  # [requests], correction or bonus; -1 where the request failed
    status: Ints  # [requests], RowStatus of the rows on the taken path

    def path(self, request: int) -> list[int]:
        """The accepted nodes of one request, from the first level down."""
        return [int(node) for node in self.paths[request] if node >= 0]

    def tokens(self, trees: DraftTrees, request: int) -> list[int]:
        """What one request commits: its accepted tokens, then the target's own."""
        first = int(trees.roots[request]) + 1
        accepted = [int(trees.tokens[first + node]) for node in self.path(request)]
        return [*accepted, int(self.own_tokens[request])]

    def error(self, request: int) -> str | None:
        """Why a request cannot go on, or None."""
        status = RowStatus(int(self.status[request]))
        return None if status is RowStatus.OK else status.message()
