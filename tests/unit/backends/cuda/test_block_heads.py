"""Heads that guess all places at once: what is captured on a GPU says what the reference says, and keeps its rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from foreword.acceptance.noise import extend_keys, gumbel
from foreword.acceptance.request import RECORD
from foreword.backends.interface import ChainPlan, HeadCall, HeadInput, MedusaCall, PendingChains
from foreword.backends.torch.head_factory import TorchHeads
from foreword.kv.paged_cache import PAGE_SIZE, PagedCache
from foreword.kv.spec import RowSpec
from foreword.models.heads.opening import open_head
from foreword.speculation.draft import Draft
from foreword.speculation.layout import BatchBuffers, SequenceRows
from helpers.cuda import KERNEL_DEVICE, captures, cuda_decoder, has_gpu, needs_triton
from helpers.tiny_heads import HEAD_DIM, HIDDEN, KV_HEADS, TinyHead
from helpers.tiny_models import make_hf_model

pytestmark = needs_triton
VOCAB, MASK, BLOCK, ROUNDS = 360, 11, 4, 6 if has_gpu else 1
TEMPERATURES = (0.0, 1.3)
METHODS = ["p_eagle", "dflash", "dflash2", "dspark"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("blocks")
    make_hf_model(folder / "target", num_hidden_layers=6)
    sizes: dict[str, Any] = {"mask_token_id": MASK, "block_size": BLOCK}
    of_eagle = TinyHead(VOCAB, draft_vocab=201).p_eagle()
    ids = {"eagle_aux_hidden_state_layer_ids": [1, 4, 6], "mask_token_id": MASK}
    of_eagle.save_speculators(folder / "p_eagle", "peagle", **ids)
    seeing_all = TinyHead(VOCAB, layers=2, qk_norm=True, bias=True, draft_vocab=201).dflash()
    seeing_all.save_speculators(folder / "dflash", "dflash", aux_hidden_state_layer_ids=[1, 3, 5], **sizes)
    causal = TinyHead(VOCAB, own_ends=False).dspark()
    causal.save(folder / "dspark", target_layer_ids=[0, 2, 5], is_causal=True, **sizes)
    selecting = TinyHead(VOCAB, own_ends=False).dflash2()
    selecting.save(
        folder / "dflash2", dflash_config={"target_layer_ids": [0, 2, 5], "selector_top_k": 5}, **sizes
    )
    TinyHead(VOCAB).medusa(3, blocks=2).save(folder / "medusa")
    return folder


@dataclass(frozen=True)
class Passes:
    """One guess for some texts: rows of committed tokens that are not there yet, and those that guess."""

    before: HeadInput
    context: HeadInput | None
    blocks: HeadInput
    plan: ChainPlan
    slots: Tensor  # of all rows


def passes(method: str, seed: int, token_ids: Any, lengths: Sequence[int], steps: Sequence[int]) -> Passes:
    """Texts in pages that do not lie in order; three rows of each are still to be made."""
    cache, buffers = PagedCache(64), BatchBuffers()
    cache.reserve(cache.open(), 1 + seed * PAGE_SIZE)
    lag = 1 if method == "p_eagle" else 0
    generator = torch.Generator().manual_seed(seed)
    texts = [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in lengths]
    states = [torch.randn(length, 3 * HIDDEN, generator=generator) for length in lengths]
    kept = [cache.open() for _ in lengths]
    for kv, length in zip(kept, lengths, strict=True):
        cache.reserve(kv, length + BLOCK)
    starts = np.full(len(lengths), lag, np.int32)

    def rows(first: int, end: int, tails: Sequence[int] = (), wanted: int = 0) -> HeadInput:
        """Those from `first` to `end`, from the back, with masks behind them."""
        parts, features = [], []
        for place, (kv, text, known) in enumerate(zip(kept, texts, states, strict=True)):
            begin, stop = (lag if first is None else len(text) - first), len(text) - end
            draft = Draft.chain([MASK] * (tails[place] if tails else 0), len(text))
            parts.append(SequenceRows(kv, text, stop - begin, draft, run_logits=wanted, first=begin))
            features += [known[begin - lag : stop - lag], torch.zeros(len(draft), 3 * HIDDEN)]
        arrays = BatchBuffers().lay_out(cache, parts, ()).arrays
        return HeadInput(arrays, starts, torch.cat(features).to(KERNEL_DEVICE), are_own=False)

    if method == "p_eagle":
        before, context = rows(None, 3), None
        blocks = rows(3, 0, [count - 1 for count in steps], wanted=1)
    else:
        before, context = rows(None, 4), rows(4, 1)
        parts = [
            SequenceRows(kv, text, 1, Draft.chain([MASK] * (BLOCK - 1), len(text)), first=len(text) - 1)
            for kv, text in zip(kept, texts, strict=True)
        ]
        arrays = buffers.lay_out(cache, parts, ()).arrays
        if method != "dspark":
            arrays.ancestor_masks[:] = (1 << (BLOCK - 1)) - 1
        firsts = arrays.row_starts[:-1] + 1
        wanted = [np.arange(first, first + count) for first, count in zip(firsts, steps, strict=True)]
        arrays = arrays._replace(logit_rows=np.concatenate(wanted).astype(np.int32))
        blocks = HeadInput(arrays, starts, torch.empty(len(arrays.token_ids), 0), are_own=True)
    made = [given.arrays.slots for given in (before, context, blocks) if given is not None]
    slots = torch.from_numpy(np.concatenate(made)).long().to(KERNEL_DEVICE)
    return Passes(before, context, blocks, plan_of(lengths, steps, token_ids), slots)


def plan_of(lengths: Sequence[int], steps: Sequence[int], token_ids: Any) -> ChainPlan:
    records = np.zeros(len(lengths), RECORD)
    records["temperature"] = TEMPERATURES[: len(lengths)]
    records["stem"] = np.arange(7, 7 + len(lengths), dtype=np.uint64) << np.uint64(40)
    return ChainPlan(np.array(lengths, np.int32), np.array(steps, np.int32), records, token_ids, VOCAB)


def chosen(logits: Tensor, plan: ChainPlan, request: int, place: int) -> int:
    """What is drawn from one row: the largest of logit / temperature + noise of the target's id."""
    names = torch.arange(len(logits)) if plan.token_ids is None else torch.from_numpy(plan.token_ids).long()
    scores, temperature = logits.double().cpu(), float(plan.records["temperature"][request])
    if temperature > 0:
        position = np.array([int(plan.lengths[request]) + place])
        key = extend_keys(plan.records["stem"][request : request + 1], position).view(np.int64)
        scores = scores / temperature + gumbel(torch.from_numpy(key).expand(len(names)), names)
    return int(names[int(scores.argmax())])


def expected(head: Any, given: Passes, store: Any, is_dependent: bool) -> list[list[int]]:
    """Pass by pass, row by row."""
    if given.context is not None:
        head.draft(HeadCall(given.context, store))
    output = head.draft(HeadCall(given.blocks, store))
    found, row = [], 0
    arrays = given.blocks.arrays
    for request, count in enumerate(given.plan.steps.tolist()):
        before, tokens = int(arrays.token_ids[arrays.row_starts[request]]), []
        for place in range(count):
            logits, states = (rows[row : row + 1] for rows in (output.logits, output.states))
            if is_dependent:
                logits = head.logits_after([before], logits, states)
            before = chosen(logits[0], given.plan, request, place)
            tokens.append(before)
            row += 1
        found.append(tokens)
    return found


def torch_heads(decoder: Any) -> TorchHeads:
    return TorchHeads(decoder.config, decoder.weights, bucketed=True)


@pytest.mark.parametrize("method", METHODS)
def test_a_block_in_one_call_is_the_reference_s(folder: Path, method: str):
    decoder = cuda_decoder(folder / "target")
    head = open_head(folder / method).fitted(decoder.config)
    spec = RowSpec("head", len(head.spec.layers), KV_HEADS, HEAD_DIM)
    ours, theirs = decoder.heads.head(head, "head"), torch_heads(decoder).head(head, "head")
    token_ids = None if head.token_ids is None else head.token_ids.to(torch.int32).cpu().numpy()
    stores = [decoder.new_kv_store(64, PAGE_SIZE, (spec,)) for _ in range(2)]
    for store in stores:
        for memory in store.arrays("head"):
            memory[:, : store.spare_slot] = torch.nan  # what nobody wrote must not be read
    for seed in range(ROUNDS):
        lengths, steps = ((40 + seed, 19), (3, 2)) if seed % 2 == 0 else ((22, 9 + seed), (3, 1))
        given = passes(method, seed, token_ids, lengths, steps)
        for runner, store in zip((ours, theirs), stores, strict=True):
            runner.draft(HeadCall(given.before, store))
        guesses = ours.draft(HeadCall(given.blocks, stores[0], given.plan, given.context))
        assert arrived(guesses) == expected(theirs, given, stores[1], method in ("dspark", "dflash2"))
        for kind in (0, 1):
            mine, other = (store.arrays("head")[kind][:, given.slots] for store in stores)
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)
        if not has_gpu and method != "dspark":
            continue  # the same pass again; an interpreter takes seconds for it
        again, reference = (
            runner.draft(HeadCall(given.blocks, store))
            for runner, store in zip((ours, theirs), stores, strict=True)
        )
        torch.testing.assert_close(again.logits, reference.logits, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(again.states, reference.states, rtol=1e-4, atol=1e-4)
    if captures:
        assert ours._passes.of(stores[0]).captured == 4, "two shapes, with draws and without"


def arrived(chains: PendingChains) -> list[list[int]]:
    return [[chains.tokens.numbers[place] for place in places] for places in chains.token_indices]


def test_medusa_in_one_call_is_the_reference_s(folder: Path):
    decoder = cuda_decoder(folder / "target")
    head = open_head(folder / "medusa").fitted(decoder.config)
    ours, theirs = decoder.heads.medusa(head), torch_heads(decoder).medusa(head)
    for seed in range(ROUNDS):
        states = torch.randn(2, HIDDEN, generator=torch.Generator().manual_seed(seed)).to(KERNEL_DEVICE)
        plan = plan_of((12 + seed, 30), (2, 3) if seed % 2 == 0 else (3, 1), None)
        logits = theirs.draft(MedusaCall(states)).logits
        torch.testing.assert_close(ours.draft(MedusaCall(states)).logits, logits, rtol=1e-4, atol=1e-4)
        assert arrived(ours.draft(MedusaCall(states, plan))) == [
            [chosen(logits[request, place], plan, request, place) for place in range(count)]
            for request, count in enumerate(plan.steps.tolist())
        ]
    if captures:
        assert ours._graphs.captured == 2, "one with draws, one without"
