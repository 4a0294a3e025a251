"""Heads through the library: named later, offered beside others, prepared for by the engine's pages."""

from pathlib import Path

import pytest

from foreword import LLM, SamplingParams
from foreword.drafters.config import SpeculationConfig
from foreword.engine.drafting.drafter_pool import PagesLackRows
from foreword.errors import RequestError
from helpers.tiny_heads import TinyHead

PROMPT = {"prompt_token_ids": list(range(20, 50))}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
LAYERS = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}


@pytest.fixture
def heads(tmp_path: Path) -> dict[str, str]:
    eagle3 = TinyHead(360, draft_vocab=200).eagle3().save(tmp_path / "eagle3", draft_vocab_size=200, **LAYERS)
    return {"eagle3": str(eagle3), "eagle": str(TinyHead(360).eagle().save(tmp_path / "eagle"))}


@pytest.fixture
def llm(tiny_model: Path) -> LLM:
    return LLM(str(tiny_model), dtype="float32", device="cpu", backend="cpu", speculation=None)


def test_a_head_that_is_named_later_has_the_pages_laid_out_anew(llm: LLM, heads: dict[str, str]):
    plain = llm.generate(PROMPT, GREEDY)[0]
    before = llm.engine
    llm.speculate({"method": "ngram"})
    assert llm.engine is before, "a lookup needs no rows"
    llm.speculate({"model": heads["eagle3"], "fixed": True})
    answer = llm.generate(PROMPT, GREEDY)[0]
    assert answer.timings.draft_n > 0
    assert answer.outputs[0].token_ids == plain.outputs[0].token_ids
    after = llm.engine
    llm.speculate({"model": heads["eagle3"], "fixed": True, "num_speculative_tokens": 2})
    assert llm.engine is after, "they have room for it now"


def test_a_request_gets_a_head_only_where_pages_have_room_for_it(llm: LLM, heads: dict[str, str]):
    with pytest.raises(PagesLackRows, match="name it when the engine is started"):
        llm.generate(PROMPT, GREEDY, speculation={"model": heads["eagle3"], "fixed": True})
    configs = [{"method": method, "model": path, "fixed": True} for method, path in heads.items()]
    llm.offer([SpeculationConfig.parse(config) for config in configs])
    for config in configs:
        assert llm.generate(PROMPT, GREEDY, speculation=config)[0].timings.draft_n > 0
    assert llm.generate(PROMPT, GREEDY)[0].timings.draft_n == 0


def test_the_method_is_read_from_the_files(heads: dict[str, str], tiny_model: Path, tmp_path: Path):
    for method, path in heads.items():
        assert SpeculationConfig.parse({"model": path}).method == (method,)
    assert SpeculationConfig.parse({"model": str(tiny_model)}).method == ("draft_model",)
    with pytest.raises(RequestError, match="give a method"):
        SpeculationConfig.parse({"num_speculative_tokens": 3})


def test_a_head_of_another_kind_is_refused_by_name(llm: LLM, heads: dict[str, str]):
    with pytest.raises(RequestError, match="is a head for method 'eagle'"):
        llm.speculate({"method": "eagle3", "model": heads["eagle"]})
    with pytest.raises(RequestError, match=r"tree_width must be in 1 \.\. 64, not 0"):
        llm.speculate({"method": "eagle3", "model": heads["eagle3"], "tree_width": 0})
