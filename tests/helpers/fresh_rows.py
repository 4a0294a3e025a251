"""KV rows of heads as one pass over the whole text makes them."""

from typing import Any

import torch

from foreword.backends.runner import ModelRunner
from foreword.drafters.config import SpeculationConfig
from foreword.drafters.heads.in_pages import RowRange
from foreword.engine.loader import LoadedModel
from foreword.engine.requests.request import Request
from foreword.kv.paged_cache import PAGE_SIZE, PagedCache
from foreword.kv.sequence import KvSequence
from foreword.speculation.draft import Draft
from foreword.speculation.drafting import Commit, KvMemory
from foreword.speculation.layout import BatchBuffers, SequenceRows
from foreword.speculation.requests import draft_request_of


class Fresh:
    """Another head of the same files, which reads whole texts in one pass."""

    def __init__(self, model: LoadedModel, form: dict[str, Any]) -> None:
        self._decoder = model.decoder
        self._drafter: Any = model.build_drafter(SpeculationConfig.parse(form))
        self.needs = self._drafter.traits.needs

    def rows(self, request: Request, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the first `count` rows; the first token has none."""
        pages = -(-len(request.tokens) // PAGE_SIZE)
        runner = ModelRunner.allocate(self._decoder, pages, PAGE_SIZE, self.needs.rows)
        cache = PagedCache(pages)
        kv = cache.open()
        cache.reserve(kv, count)
        rows = SequenceRows(kv, request.tokens, count, Draft(), run_logits=0, wants_hidden=True)
        batch = BatchBuffers(entries=0).lay_out(cache, [rows], (), self.needs.taps)
        hidden = runner.forward(batch).hidden
        cache.commit(kv, count, ())
        held = KvMemory(cache, runner.store).of(kv)
        commit = Commit(draft_request_of(request), 0, count, hidden, pages=held, settled=count)
        self._drafter.observe([commit])
        extra = kv.rows_of(self.needs.rows[0].name)
        if extra.end < count:  # a few rows are left to the next guess
            self._drafter._drafter._fill_rows([self._rest(held, extra, request, count)])
        return read(runner, kv, self.needs.rows[0].name, count)

    def _rest(self, held: Any, extra: Any, request: Request, count: int) -> Any:
        return RowRange(held, extra, request.tokens, extra.end, count, self._drafter._drafter._state_offset)


def read(runner: ModelRunner, kv: KvSequence, name: str, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [layers, heads, rows, numbers] of rows 1 .. count."""
    keys, values = runner.store.arrays(name)
    pages = kv.pages[: -(-count // PAGE_SIZE)]
    k = keys[:, pages].permute(0, 2, 1, 4, 3).flatten(2, 3)
    v = values[:, pages].permute(0, 2, 1, 3, 4).flatten(2, 3)
    return k[:, :, 1:count].clone(), v[:, :, 1:count].clone()
