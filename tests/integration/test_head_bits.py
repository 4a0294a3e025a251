"""A head on the CPU kernels gives a row the same bits whatever runs beside it, on however many threads."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from foreword.acceptance.request import RECORD
from foreword.backends.cpu.decoder import CpuDecoder
from foreword.backends.interface import ChainPlan, HeadCall, HeadInput, HeadOutput, KnownChains, head_output
from foreword.backends.runner import ModelRunner
from foreword.kv.paged_cache import PAGE_SIZE, PagedCache
from foreword.kv.spec import RowSpec
from foreword.models.heads.opening import Head, open_head
from foreword.models.heads.spec import Join
from foreword.speculation.draft import Draft
from foreword.speculation.layout import BatchBuffers, SequenceRows
from helpers.cpu import cpu_decoder, needs_cpu_kernels
from helpers.tiny_heads import HEAD_DIM, HIDDEN, KV_HEADS, TinyHead
from helpers.tiny_models import make_hf_model

pytestmark = needs_cpu_kernels
ROWS = RowSpec("head", 2, KV_HEADS, HEAD_DIM)
LENGTHS = (40, 5, 17, 70)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bits")
    make_hf_model(folder / "target", num_hidden_layers=6)
    TinyHead(360, draft_vocab=201, layers=2).eagle3().save(folder / "eagle3", draft_vocab_size=201)
    block = {"block_size": 4, "mask_token_id": 11, "target_layer_ids": [0, 2, 5]}
    TinyHead(360, layers=2, qk_norm=True).dflash().save(folder / "dflash", **block)
    return folder


class Together:
    """Texts whose rows are made in one pass or in several, then one level of guesses."""

    def __init__(self, decoder: CpuDecoder, head: Head) -> None:
        self._head = decoder.heads.head(head, ROWS.name)
        self._is_block = head.spec.join is Join.CONTEXT
        self._runner = ModelRunner.allocate(decoder, 64, PAGE_SIZE, (ROWS,))
        self._cache, self._buffers = PagedCache(64), BatchBuffers()

    def run(self, texts: list[int], chunk: int) -> list[torch.Tensor]:
        """Logits and states of every text's last row, then of three guesses behind it; `chunk` rows at a time."""
        generator = torch.Generator()
        made = {}
        for number in texts:
            length = LENGTHS[number]
            generator.manual_seed(number)
            tokens = torch.randint(3, 360, (length,), generator=generator).tolist()
            features = torch.randn(length, 3 * HIDDEN, generator=generator)
            kv = self._cache.open()
            self._cache.reserve(kv, length + 3)
            made[number] = (kv, tokens, features)
        lag = 0 if self._is_block else 1
        for begin in range(lag, max(LENGTHS), chunk):
            parts, rows = [], []
            for kv, tokens, features in made.values():
                end = min(begin + chunk, len(tokens))
                if begin < end:
                    parts.append(SequenceRows(kv, tokens, end - begin, Draft(), run_logits=0, first=begin))
                    rows.append(features[begin - lag : end - lag])
            if parts:
                self._pass(parts, torch.cat(rows), are_head_states=False)
        draft = Draft((5, 6, 7), (-1, -1, 0))
        ends = [SequenceRows(kv, tokens, 1, draft, first=len(tokens) - 1) for kv, tokens, _ in made.values()]
        width = 0 if self._is_block else HIDDEN
        own = torch.cat([features[-4:, :width] for _, _, features in made.values()])
        output = self._pass(ends, own.contiguous(), are_head_states=True)
        for kv, _, _ in made.values():
            self._cache.close(kv)
        return [*output.logits.split(4), *output.states.split(4)]

    def _pass(self, parts: list[SequenceRows], features: torch.Tensor, are_head_states: bool) -> HeadOutput:
        arrays = self._buffers.lay_out(self._cache, parts, ()).arrays
        if self._is_block and are_head_states:
            arrays.ancestor_masks[:] = 7  # all rows see all of their block
        starts = np.full(len(parts), 0 if self._is_block else 1, np.int32)
        rows = HeadInput(arrays, starts, features, are_head_states)
        return head_output(self._head, rows, self._runner.store)


@pytest.mark.parametrize("form", ["int8", "float32"])
@pytest.mark.parametrize("method", ["eagle3", "dflash"])
def test_rows_have_the_same_bits_alone_and_together(folder: Path, method: str, form: str):
    decoder = cpu_decoder(folder / "target", form, threads=1)
    head = open_head(folder / method).fitted(decoder.config)
    numbers = list(range(len(LENGTHS)))
    whole = Together(decoder, head).run(numbers, chunk=100)
    for chunk in (1, 7):
        for ours, expected in zip(Together(decoder, head).run(numbers, chunk), whole, strict=True):
            assert torch.equal(ours, expected)
    for number in numbers:
        alone = Together(decoder, head).run([number], chunk=100)
        assert torch.equal(alone[0], whole[number])
        assert torch.equal(alone[1], whole[len(LENGTHS) + number])
    threaded = Together(cpu_decoder(folder / "target", form, threads=3), head).run(numbers, chunk=13)
    for ours, expected in zip(threaded, whole, strict=True):
        assert torch.equal(ours, expected)


def test_what_a_head_cannot_do_is_refused(folder: Path):
    """Before anything is written: a wrong call must not reach behind its arrays."""
    decoder = cpu_decoder(folder / "target", "int8", threads=1)
    runner, cache = ModelRunner.allocate(decoder, 64, PAGE_SIZE, (ROWS,)), PagedCache(64)
    heads = {
        name: decoder.heads.head(open_head(folder / name).fitted(decoder.config), ROWS.name)
        for name in ("eagle3", "dflash")
    }
    kv = cache.open()
    cache.reserve(kv, 8)
    rows = SequenceRows(kv, [5, 6, 7], 3, Draft(), run_logits=1)
    arrays, starts = BatchBuffers().lay_out(cache, [rows], ()).arrays, np.zeros(1, np.int32)
    own, theirs = (HeadInput(arrays, starts, torch.zeros(3, n), n == 0) for n in (0, 3 * HIDDEN))
    record = np.zeros(1, RECORD)
    record["top_k"], record["top_p"] = 201, 1.0  # all tokens
    plan = ChainPlan(np.array([3], np.int32), np.array([1], np.int32), record, None, 201)
    with pytest.raises(ValueError, match="has no blocks"):
        heads["eagle3"].draft(HeadCall(replace(own, features=torch.zeros(3, HIDDEN)), runner.store, plan))
    with pytest.raises(ValueError, match="a pass that only stores KV rows has no logits"):
        heads["dflash"].draft(HeadCall(theirs, runner.store))
    with pytest.raises(ValueError, match="do not fit"):
        heads["dflash"].draft(HeadCall(own, runner.store, plan, replace(theirs, features=own.features)))
    with pytest.raises(ValueError, match="does not fit its pages"):
        far = replace(plan, lengths=np.array([4000], np.int32))
        heads["dflash"].draft(HeadCall(own, runner.store, far))
    chains = heads["dflash"].draft(HeadCall(own, runner.store, plan))
    assert isinstance(chains, KnownChains) and chains.tokens
