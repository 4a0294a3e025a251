"""A pretend target that says what a script says, and a drafter that knows the script."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace

import numpy as np
import torch

from foreword.backends.batch import ForwardBatch, ForwardOutput
from foreword.kv.chunks import NO_STATES, StateSizes
from foreword.kv.spec import RowSpec
from foreword.speculation.draft import ROOT, Draft
from foreword.speculation.drafting import Drafter, DraftRequest, DraftTask
from helpers.pretend_store import PRETEND_ROWS, PretendStore

PROMPT_LEN = 3
"""Tokens that name the script, as digits of its number."""

LIKELY, NEXT_BEST = 20.0, 10.0
"""Logits of the script's token and of the one that comes out where that is forbidden."""


def prompt_of(script: int, vocab_size: int) -> tuple[int, ...]:
    """The prompt that asks for a script."""
    return tuple(script // vocab_size**place % vocab_size for place in range(PROMPT_LEN))


class ScriptedTarget:
    """Reads in its KV memory which script a row belongs to, and goes on with it at the row's position."""

    device = torch.device("cpu")

    def __init__(
        self, scripts: np.ndarray, seconds: np.ndarray, vocab_size: int, context_length: int
    ) -> None:
        """`scripts` and `seconds` are int64 [scripts, length]."""
        self.config = SimpleNamespace(
            num_layers=1, recurrent=None, vocab_size=vocab_size, context_length=context_length
        )
        self._scripts, self._seconds = scripts, seconds
        self._noise = torch.randn(256, vocab_size, generator=torch.Generator().manual_seed(0)).numpy()
        self._memory = np.empty(0, np.int64)
        self._digits = np.arange(PROMPT_LEN)
        self._powers = vocab_size**self._digits

    def kv_rows(self) -> RowSpec:
        return PRETEND_ROWS

    def state_spec(self) -> None:
        """It has no recurrent layers."""

    def new_kv_store(
        self, num_pages: int, page_size: int, extra: Sequence[RowSpec] = (), states: StateSizes = NO_STATES
    ) -> PretendStore:
        self._page_size = page_size
        self._memory = np.full(num_pages * page_size, -(10**9))
        return PretendStore(num_pages, page_size, extra)

    def logits(self, scripts: np.ndarray, places: np.ndarray) -> torch.Tensor:
        """What is said at these places of these scripts: float32 [rows, vocab]."""
        places = places.clip(0, self._scripts.shape[1] - 1)
        logits = self._noise[(31 * scripts + 7 * places) % 256]
        rows = np.arange(len(scripts))
        logits[rows, self._seconds[scripts, places]] = NEXT_BEST
        logits[rows, self._scripts[scripts, places]] = LIKELY
        return torch.from_numpy(logits)

    def forward(self, batch: ForwardBatch, store: object = None) -> ForwardOutput:
        arrays, memory = batch.arrays, self._memory
        memory[arrays.kv_copies[:, 1]] = memory[arrays.kv_copies[:, 0]]
        memory[arrays.slots] = arrays.token_ids
        starts = arrays.block_tables[:, 0].astype(np.int64) * self._page_size
        scripts = memory[starts[:, None] + self._digits] @ self._powers
        owner = np.searchsorted(arrays.row_starts, arrays.logit_rows, side="right") - 1
        places = arrays.positions[arrays.logit_rows] - (PROMPT_LEN - 1)
        return ForwardOutput(self.logits(scripts[owner], places), {})


class ScriptDrafter(Drafter):
    """Drafts what will come: whole chains, chains with a wrong guess in them, or trees with wrong branches."""

    def __init__(self, next_token: Callable[[DraftRequest, int], int], vocab_size: int, seed: int) -> None:
        """`next_token` knows what a request's answer has at a place, counted from its start."""
        self._next_token = next_token
        self._vocab_size = vocab_size
        self._rng = np.random.default_rng(seed)

    def propose(self, asks: Sequence[DraftTask]) -> list[Draft]:
        return [self._draft(ask) for ask in asks]

    def forget(self, request: DraftRequest) -> None:
        pass

    def _draft(self, ask: DraftTask) -> Draft:
        request = ask.request
        shorter = int(self._rng.integers(1, ask.max_depth + 1))
        length = ask.max_depth if self._rng.random() < 0.5 else shorter
        first = len(request.tokens) - request.prompt_len
        truth = [self._next_token(request, first + step) for step in range(length)]
        kind = self._rng.integers(4)
        if kind == 0:
            wrong = self._rng.integers(length)
            truth[wrong] = self._another(truth[wrong])
        tokens, parents = self._tree(truth) if kind == 1 else (truth, [ROOT, *range(length - 1)])
        tokens, parents = tokens[: ask.max_nodes], parents[: ask.max_nodes]
        return Draft(tuple(tokens), tuple(parents), len(request.tokens), request.epoch)

    def _tree(self, truth: list[int]) -> tuple[list[int], list[int]]:
        """The truth as one branch of a tree, with wrong nodes before and behind it."""
        tokens: list[int] = []
        parents: list[int] = []
        above = ROOT
        for token in truth:
            before, behind = self._rng.integers(2, size=2)
            level = [self._another(token)] * before + [token] + [self._another(token)] * behind
            true_node = len(tokens) + int(before)
            tokens += level
            parents += [above] * len(level)
            above = true_node
        return tokens, parents

    def _another(self, token: int) -> int:
        return (token + 1 + int(self._rng.integers(self._vocab_size - 1))) % self._vocab_size
