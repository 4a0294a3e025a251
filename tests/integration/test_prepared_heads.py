"""A head beside a backend that prepares passes: its drafts are prepared with them."""

from pathlib import Path
from typing import Any

import pytest

from foreword.acceptance.params import SamplingParams
from foreword.backends.interface import DecodeSize
from foreword.engine.assembly import make_core
from foreword.engine.config import EngineConfig
from foreword.engine.core import EngineCore
from foreword.engine.loader import load_model
from foreword.engine.messages import NewRequest
from foreword.engine.preparing import prepare_passes
from helpers.tiny_heads import TinyHead
from helpers.tiny_models import make_hf_model
from integration.test_head_chains import Listener


def engine(folder: Path) -> EngineCore:
    config = {
        "method": "eagle3", "model": str(folder / "eagle3"), "num_speculative_tokens": 3, "fixed": True
    }  # fmt: skip
    loaded = load_model(str(folder / "target"), dtype="float32", device="cpu", backend="torch")
    return make_core(loaded, EngineConfig(kv_cache_memory_bytes=1 << 23), config)


def text(core: EngineCore) -> list[int]:
    params = SamplingParams(max_tokens=8, ignore_eos=True, seed=1)
    (request,) = core.add(NewRequest("r", tuple(range(20, 30)), params))
    while core.has_requests:
        core.step()
    return request.output_ids


@pytest.mark.filterwarnings("ignore")
def test_a_head_drafts_for_every_size_and_keeps_nothing_of_it(tmp_path: Path):
    make_hf_model(tmp_path / "target", num_hidden_layers=6)
    TinyHead(360, draft_vocab=201).eagle3().save(tmp_path / "eagle3", draft_vocab_size=201)
    core = engine(tmp_path)
    decoder: Any = core.target
    decoder.sizes_to_prepare = lambda requests, *_: [DecodeSize(requests, 32)]
    guard: Any = core.drafters.default
    head = guard.drafter._drafter
    listener = Listener(head, in_one_call=True)
    found = prepare_passes(core, 2)
    assert found.cases == found.wanted_cases == 3, "plain, with three guesses, alone with one"
    drafted = {tuple(map(len, drafts)) for drafts in listener.drafts}
    assert {(3, 3), (1,)} <= drafted
    assert not guard.drafter.faults and core.cache.num_open == 0
    assert core.cache.free_pages == core.cache.pool.num_pages
    assert text(core) == text(engine(tmp_path))
