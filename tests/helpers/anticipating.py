"""A head whose chains follow passes that are still judged, as on a device; worked out at once."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from foreword.acceptance.transfer import HostCopy
from foreword.backends.batch import BatchArrays
from foreword.backends.interface import (
    ChainPlan,
    HeadCall,
    HeadInput,
    HeadOutput,
    KvStore,
    PendingChains,
    Unsettled,
)


class AnticipatingRunner:
    """Another runner, with what a device does to texts whose end only it knows: it makes rows for all that may come."""

    drafts_early = True

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self.anticipated = 0  # chains behind passes that were still judged
        self.anew = 0  # and behind known texts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def draft(self, call: HeadCall) -> PendingChains | HeadOutput:
        wanted, plan, store = call.rows, call.plan, call.store
        if plan is None:
            return self._runner.draft(call)
        judged = plan.unsettled
        self.anticipated += 0 if judged is None else len(plan.steps)
        self.anew += len(plan.steps) if judged is None else 0
        if judged is not None:
            wanted, plan = self._settled(wanted, plan, judged, store)
        chains = self._runner.draft(HeadCall(wanted, store, plan)).tokens
        firsts = np.cumsum([0, *map(len, chains)]).tolist()
        places = [range(first, first + len(chain)) for first, chain in zip(firsts, chains, strict=False)]
        tokens = torch.tensor([token for chain in chains for token in chain], dtype=torch.int64)
        return PendingChains(HostCopy(tokens, tokens), places)

    def _settled(
        self, wanted: HeadInput, plan: ChainPlan, judged: Unsettled, store: KvStore
    ) -> tuple[HeadInput, ChainPlan]:
        drawn, guesses = judged.drawn.tolist(), judged.drafted.tolist()
        tokens = wanted.arrays.token_ids
        tokens[:] = [drawn[-1 - token] for token in tokens]
        behind = []
        for first, places in zip(judged.first_rows, judged.draft_indices, strict=True):
            hits = [
                place >= 0 and max(guesses[place], 0) == drawn[first + i] for i, place in enumerate(places)
            ]
            behind.append([*hits, False].index(False))
        self._runner.draft(HeadCall(wanted, store))  # rows of what may come to nothing are written, too
        lengths = plan.lengths + np.array(behind, np.int32)
        steps = np.minimum(plan.steps, judged.row_ends - lengths + 1)
        kept = _kept(wanted, behind)
        return kept, replace(plan, lengths=lengths, steps=steps.astype(np.int32), unsettled=None)


def _kept(wanted: HeadInput, behind: list[int]) -> HeadInput:
    """The rows of what has become part of the texts."""
    arrays = wanted.arrays
    starts = arrays.row_starts[:-1].tolist()
    rows = [row for first, more in zip(starts, behind, strict=True) for row in range(first, first + more + 1)]
    bounds = np.cumsum([0, *(more + 1 for more in behind)]).astype(np.int32)
    kept: dict[str, Any] = {name: getattr(arrays, name)[rows].copy() for name in _BY_ROW}
    own = BatchArrays(
        **kept,
        row_starts=bounds,
        block_tables=arrays.block_tables,
        kv_lens=kept["prefix_lens"][bounds[1:] - 1],
        logit_rows=bounds[1:] - 1,
        kv_copies=arrays.kv_copies,
        hidden_rows=arrays.hidden_rows,
    )
    return HeadInput(own, wanted.starts, wanted.features[rows], wanted.are_head_states)


_BY_ROW = ("ancestor_masks", "token_ids", "positions", "slots", "prefix_lens")


def let_anticipate(drafter: Any) -> AnticipatingRunner:
    """Of a guarded head that guesses chains token by token."""
    head = drafter._drafter
    head._runner = AnticipatingRunner(head._runner)
    head.traits = drafter.traits = replace(head.traits, starts_early=True)
    return head._runner
