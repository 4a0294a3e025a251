"""A head's chain in one native call is the chain that it makes level by level."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import softmax

from foreword.acceptance.params import SamplingParams
from foreword.acceptance.request import RECORD
from foreword.backends.interface import (
    ChainPlan,
    Chains,
    ChainStop,
    HeadCall,
    HeadInput,
    HeadOutput,
    KnownChains,
    head_output,
)
from foreword.engine.config import EngineConfig
from foreword.engine.llm import LLM
from foreword.engine.messages import NewRequest
from foreword.kv.paged_cache import PAGE_SIZE, PagedCache
from foreword.kv.spec import RowSpec
from foreword.models.heads.opening import open_head
from foreword.speculation.confidence import Stop, class_of
from foreword.speculation.draft import NO_DRAFT, Draft
from foreword.speculation.drafting import Drafter, DraftTask
from foreword.speculation.layout import BatchBuffers, SequenceRows
from helpers.cpu import cpu_decoder, needs_cpu_kernels
from helpers.tiny_heads import HEAD_DIM, HIDDEN, KV_HEADS, TinyHead
from helpers.tiny_models import make_hf_model

pytestmark = needs_cpu_kernels

SAMPLED = {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.01}
MIXED: list[dict[str, Any]] = [{"temperature": 0}, SAMPLED, {"temperature": 1.3}, {"temperature": 0}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chains")
    make_hf_model(folder / "target", num_hidden_layers=6)
    TinyHead(360, draft_vocab=201).eagle3().save(folder / "eagle3", draft_vocab_size=201)
    TinyHead(360).eagle().save(folder / "eagle")
    module = TinyHead(360, bias=True).mtp()
    module.save(folder / "mtp", {"": "model.layers.6."})
    block = {"block_size": 6, "mask_token_id": 11}
    reduced = TinyHead(360, taps=2, layers=2, draft_vocab=201, qk_norm=True).dflash()
    reduced.save_speculators(folder / "dflash", "dflash", aux_hidden_state_layer_ids=[2, 4], **block)
    causal = TinyHead(360, taps=2, own_ends=False).dspark()
    causal.save(folder / "dspark", target_layer_ids=[1, 4], is_causal=True, **block)
    selecting = TinyHead(360, taps=2, draft_vocab=201).dflash2()
    selecting.save_speculators(folder / "dflash2", "dflash2", aux_hidden_state_layer_ids=[2, 4], **block)
    return folder


class Listener(Drafter):
    """What a head's drafter says, in one call of its runner where it can or always level by level."""

    def __init__(self, drafter: Any, in_one_call: bool) -> None:
        self.drafts: list[tuple[tuple[int, ...], ...]] = []
        self.chains = 0
        self.kept = 0  # rows of context that blocks brought along
        self.passes = 0  # that guesses were drawn from outside of the runner
        self._propose, self._draft, self._in_one_call = drafter.propose, drafter._runner.draft, in_one_call
        drafter.propose, drafter._runner.draft = self.propose, self.draft

    def propose(self, asks: Sequence[DraftTask]) -> list[Draft]:
        drafts: list[Draft] = self._propose(asks)
        self.drafts.append(tuple(draft.tokens for draft in drafts))
        return drafts

    def draft(self, call: HeadCall) -> HeadOutput | Chains:
        output: HeadOutput | Chains = self._draft(call if self._in_one_call else replace(call, plan=None))
        if isinstance(output, HeadOutput):
            self.passes += len(call.rows.arrays.logit_rows) > 0
        else:
            self.chains += 1
            self.kept += 0 if call.context is None else len(call.context.arrays.token_ids)
        return output


def decoded(
    folder: Path, method: str, params: list[dict[str, Any]], in_one_call: bool, rule: str = "coupled"
) -> tuple[Listener, list[list[int]]]:
    """The drafts and texts of requests that are answered together, each to a length of its own."""
    config = {"method": method, "model": str(folder / method), "num_speculative_tokens": 5, "fixed": True}
    llm = LLM(
        str(folder / "target"),
        device="cpu",
        backend="cpu",
        speculation=config,
        config=EngineConfig(acceptance_rule=rule, max_step_seconds=None),  # the same passes, however fast
    )
    guard: Any = llm.engine.drafters.default
    listener = Listener(guard.drafter._drafter, in_one_call)
    requests = []
    for number, given in enumerate(params):
        sampling = SamplingParams(max_tokens=20 + 7 * number, ignore_eos=True, seed=number, **given)
        prompt = tuple(range(20 + number, 60 + 9 * number))
        requests += llm.engine.add(NewRequest(f"r{number}", prompt, sampling))
    while llm.engine.has_requests:
        llm.engine.step()
    assert not guard.drafter.faults
    return listener, [list(request.output_ids) for request in requests]


@pytest.mark.parametrize("method", ["eagle3", "eagle", "mtp", "dflash", "dflash2", "dspark"])
def test_one_call_gives_the_guesses_of_one_call_per_level(folder: Path, method: str):
    together, texts = decoded(folder, method, MIXED, in_one_call=True)
    levels, same_texts = decoded(folder, method, MIXED, in_one_call=False)
    assert texts == same_texts
    assert together.drafts == levels.drafts
    asked = [
        step for step in together.drafts if any(step)
    ]  # before the first token there is nothing to go on
    assert together.chains == len(asked) > 20
    assert not together.passes and levels.passes
    assert together.kept <= sum(map(len, texts)), "every token of an answer is kept once"
    assert together.kept > 0 or method not in ("dflash", "dflash2", "dspark")
    assert {len(tokens) for step in together.drafts for tokens in step} >= {1, 2, 3, 4, 5}, "ends are shorter"


@pytest.mark.parametrize(
    ("params", "rule"),
    [([{"temperature": 0, "logit_bias": {7: 5.0}}], "coupled"), ([{"temperature": 0.8}], "token")],
)
@pytest.mark.parametrize("method", ["eagle3", "dspark"])
def test_guesses_that_need_more_than_logits_are_made_level_by_level(
    folder: Path, method: str, params: list[dict[str, Any]], rule: str
):
    listener, _ = decoded(folder, method, params, in_one_call=True, rule=rule)
    assert not listener.chains
    assert any(map(len, (tokens for step in listener.drafts for tokens in step)))


class Stopping(Drafter):
    """Asks a head three times for the same: as always, to say how sure it is, and to stop where it is not."""

    RATES = (0.55, 0.75, 0.8, 0.85, 0.9, 0.95, 0.96, 0.97)
    LEAST = (0.6, 0.5, 0.45, 0.0)

    def __init__(self, drafter: Any) -> None:
        self._drafter, self._propose = drafter, drafter.propose
        self.cuts: list[tuple[int, int]] = []  # guesses of a draft without a stop, and with it
        self.sure: list[float] = []
        drafter.propose = self.propose

    def propose(self, asks: Sequence[DraftTask]) -> list[Draft]:
        expected = [self.first_share(ask) for ask in asks]
        plain: list[Draft] = self._propose(asks)
        told = self._propose([ask._replace(stop=Stop(self.RATES)) for ask in asks])
        cut = self._propose([ask._replace(stop=Stop(self.RATES, self.LEAST)) for ask in asks])
        for draft, said, short, share in zip(plain, told, cut, expected, strict=True):
            assert said.tokens == draft.tokens and not draft.confidence
            assert len(said.confidence) == len(said.tokens)
            if share is None:
                continue
            assert said.confidence[0] == pytest.approx(share, rel=1e-4)
            end = self.end(said.confidence)
            assert (short.tokens, short.confidence) == (said.tokens[:end], said.confidence[:end])
            self.cuts.append((len(said), end))
            self.sure.append(said.confidence[0])
        return plain

    def end(self, confidence: Sequence[float]) -> int:
        chance = 1.0
        for level, (one, least) in enumerate(zip(confidence, self.LEAST, strict=False), start=1):
            chance *= self.RATES[class_of(one)]
            if chance < least:
                return level
        return len(confidence)

    def first_share(self, ask: DraftTask) -> float | None:
        """What the head gives its first guess, by its logits."""
        run = self._drafter._missing_range(ask)
        if run is None:
            return None
        rows = self._drafter._rows_from_target([run], num_logits=1)
        output = head_output(self._drafter._rows_runner, rows, run.pages.store)
        temperature = float(ask.request.sampling.record["temperature"]) or 1.0
        (draft,) = self._propose([ask])
        ids = self._drafter._vocabulary.token_ids
        column = draft.tokens[0] if ids is None else ids.tolist().index(draft.tokens[0])
        share: float = softmax(output.logits[0].double() / temperature, dim=0)[column].item()
        return share


@pytest.mark.parametrize("method", ["eagle3", "eagle"])
def test_a_chain_ends_where_the_head_is_no_longer_sure_enough(folder: Path, method: str):
    config = {"method": method, "model": str(folder / method), "num_speculative_tokens": 5, "fixed": True}
    llm = LLM(str(folder / "target"), device="cpu", backend="cpu", speculation=config)
    guard: Any = llm.engine.drafters.default
    stopping = Stopping(guard.drafter._drafter)
    assert guard.drafter.traits.stops_itself
    # A head with random weights is sure of little: a low temperature makes it surer.
    for number, given in enumerate([*MIXED, {"temperature": 0.1}, {"temperature": 0.2}]):
        sampling = SamplingParams(max_tokens=24, ignore_eos=True, seed=number, **given)
        llm.engine.add(NewRequest(f"r{number}", tuple(range(20 + number, 60 + number)), sampling))
    while llm.engine.has_requests:
        llm.engine.step()
    assert not guard.drafter.faults
    assert len({end for _, end in stopping.cuts}) >= 3, "drafts of several lengths"
    assert any(end < length for length, end in stopping.cuts)
    assert 0 < min(stopping.sure) < max(stopping.sure) <= 1


def test_one_that_needs_more_than_logits_does_not_take_the_chains_of_the_others(folder: Path):
    params: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 0, "logit_bias": {7: 5.0}}, SAMPLED]
    together, texts = decoded(folder, "eagle3", params, in_one_call=True)
    levels, same_texts = decoded(folder, "eagle3", params, in_one_call=False)
    assert texts == same_texts
    assert together.drafts == levels.drafts
    assert together.chains and together.passes


@pytest.fixture(scope="module")
def planned(folder: Path) -> Callable[..., KnownChains]:
    """Chains of three tokens after one text, greedy, for a plan of which some fields are given."""
    decoder = cpu_decoder(folder / "target", "float32", threads=1)
    rows = RowSpec("head", 1, KV_HEADS, HEAD_DIM)
    runner = decoder.heads.head(open_head(folder / "eagle3").fitted(decoder.config), rows.name)
    store, cache = decoder.new_kv_store(8, PAGE_SIZE, (rows,)), PagedCache(8)
    kv = cache.open()
    cache.reserve(kv, 8)
    part = SequenceRows(kv, [5, 6, 7], 2, NO_DRAFT, run_logits=1, first=1)
    arrays = BatchBuffers().lay_out(cache, [part], ()).arrays
    features = torch.randn(2, 3 * HIDDEN, generator=torch.Generator().manual_seed(0))
    given = HeadInput(arrays, np.ones(1, np.int32), features, are_own=False)
    record = np.zeros(1, RECORD)
    record["top_k"], record["top_p"] = 360, 1.0  # all tokens

    def call(**fields: Any) -> KnownChains:
        lengths, steps = np.array([3], np.int32), np.array([3], np.int32)
        plan = ChainPlan(lengths, steps, record, np.arange(201, dtype=np.int32), 360)
        chains = runner.draft(HeadCall(given, store, replace(plan, **fields)))
        assert isinstance(chains, KnownChains)
        return chains

    return call


def test_an_id_that_equals_the_vocabulary_s_size_is_not_drawn(planned: Callable[..., KnownChains]):
    first = planned().tokens[0][0]
    assert first > 0
    assert max(planned(vocab_size=first).tokens[0]) < first
    assert planned(vocab_size=first + 1).tokens[0][0] == first


def test_a_confidence_on_an_edge_is_of_the_class_above(planned: Callable[..., KnownChains]):
    least = np.array([[0.5, 0.0, 0.0]], np.float32)

    def stop(edge: float) -> ChainStop:
        return ChainStop(np.array([edge], np.float32), np.array([[0.0, 1.0]], np.float32), least)

    (confidence,) = planned(stop=stop(0.0)).confidence or ()
    assert len(planned(stop=stop(confidence[0])).tokens[0]) == 3
    assert len(planned(stop=stop(np.nextafter(np.float32(confidence[0]), 1))).tokens[0]) == 1
