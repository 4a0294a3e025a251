"""A head's chain on a GPU is the chain that it makes level by level; interpreted where there is no GPU."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from foreword.acceptance.params import SamplingParams
from foreword.backends.interface import KnownChains
from foreword.engine.assembly import make_core
from foreword.engine.config import EngineConfig
from foreword.engine.core import EngineCore
from foreword.engine.loader import load_model
from foreword.engine.messages import NewRequest
from helpers.cuda import cuda_decoder, has_gpu, needs_triton
from helpers.tiny_heads import TinyHead
from helpers.tiny_models import make_hf_model
from integration.test_head_chains import Listener

pytestmark = needs_triton

TOKENS = 24
STEPS = TOKENS if has_gpu else 2  # of the engine; interpreted, a pass takes seconds
LAYERS = 6 if has_gpu else 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chains")
    make_hf_model(folder / "target", num_hidden_layers=LAYERS)
    taps = {} if has_gpu else {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    TinyHead(360, draft_vocab=201).eagle3().save(folder / "eagle3", draft_vocab_size=201, **taps)
    TinyHead(360).eagle().save(folder / "eagle")
    TinyHead(360, bias=True).mtp().save(folder / "mtp", {"": "model.layers.6."})
    block = {"block_size": 6, "mask_token_id": 11}
    TinyHead(360, draft_vocab=201).p_eagle().save_speculators(
        folder / "p_eagle", "peagle", mask_token_id=11, eagle_aux_hidden_state_layer_ids=[1, 4, 6]
    )
    reduced = TinyHead(360, taps=2, layers=2, draft_vocab=201, qk_norm=True).dflash()
    reduced.save_speculators(folder / "dflash", "dflash", aux_hidden_state_layer_ids=[2, 4], **block)
    causal = TinyHead(360, taps=2, own_ends=False).dspark()
    causal.save(folder / "dspark", target_layer_ids=[1, 4], is_causal=True, **block)
    selecting = TinyHead(360, taps=2, own_ends=False).dflash2()
    selecting.save(folder / "dflash2", target_layer_ids=[1, 4], **block)
    return folder


def engine(folder: Path, method: str, quantization: str = "auto") -> EngineCore:
    config = {"method": method, "model": str(folder / method), "num_speculative_tokens": 4, "fixed": True}
    loaded = load_model(str(folder / "target"), dtype="float32", device="cpu", backend="torch")
    decoder = cuda_decoder(folder / "target", heads=quantization)
    sizes = EngineConfig(kv_cache_memory_bytes=1 << 24)
    return make_core(replace(loaded, decoder=decoder), sizes, config)


def decoded(
    folder: Path, method: str, in_one_call: bool, quantization: str = "auto"
) -> tuple[Listener, list[list[int]]]:
    core = engine(folder, method, quantization)
    store: Any = core.runner.store
    for kind in store.spec.extra:
        for memory in store.arrays(kind.name):
            memory[:, : store.spare_slot] = torch.nan  # what was never written must not be read
    guard: Any = core.drafters.default
    listener = Listener(guard.drafter._drafter, in_one_call)
    requests = []
    for number, temperature in enumerate((0.0, 1.3)):
        sampling = SamplingParams(
            max_tokens=TOKENS - number, ignore_eos=True, seed=number, temperature=temperature
        )
        requests += core.add(NewRequest(f"r{number}", tuple(range(20 + number, 24 + 5 * number)), sampling))
    for _ in range(STEPS):
        if core.has_requests:
            core.step()
    assert not guard.drafter.faults
    assert not core.faults
    return listener, [list(request.output_ids) for request in requests]


@pytest.mark.parametrize("quantization", ["auto", "fp8"])
@pytest.mark.parametrize(
    "method", ["eagle3", "eagle", "mtp", "p_eagle", "dflash", "dflash2", "dspark"] if has_gpu else ["eagle3"]
)
def test_a_chain_has_the_guesses_of_one_call_per_level(folder: Path, method: str, quantization: str):
    together, texts = decoded(folder, method, True, quantization)
    levels, same_texts = decoded(folder, method, False, quantization)
    assert texts == same_texts
    assert together.drafts == levels.drafts
    assert together.chains >= 1
    assert max(len(tokens) for drafts in together.drafts for tokens in drafts) > 1, "no second level"


def test_a_head_drafts_once_its_kernels_are_there(folder: Path):
    """Steps go on without its drafts until then, and nothing waits."""
    core = engine(folder, "eagle3")
    guard: Any = core.drafters.default
    runner = guard.drafter._drafter._runner
    compiled = runner._kernels = Compiled()
    runner._compiled.clear()  # on a GPU the engine has prepared some kinds of passes
    runner._run_counts.clear()
    drafts: list[int] = []
    propose = runner._chains

    def noted(*call: Any) -> Any:
        chains = propose(*call)
        drafts.append(0 if isinstance(chains, KnownChains) else 1)
        return chains

    runner._chains = noted
    core.add(NewRequest("r", tuple(range(20, 25)), SamplingParams(max_tokens=TOKENS, ignore_eos=True)))
    for is_ready in (False, False, True, True):
        compiled.is_ready = is_ready
        assert guard.drafter.is_ready == (is_ready or not compiled.requests)
        drafts.clear()
        core.step()
        assert set(drafts) <= {int(is_ready)}
    assert drafts and compiled.requests == len(runner._compiled), (
        "kernels are requested once for a kind of pass"
    )
    assert not guard.drafter.faults and not core.faults


class Compiled:
    """Kernels that are there when the test says so."""

    is_ready = none_at_launch = False
    requests = 0

    def request(self, variants: Any) -> None:
        self.requests += 1

    def are_ready(self, variants: Any) -> bool:
        return self.is_ready


def test_heads_take_turns_in_spare_rows(folder: Path, tmp_path: Path):
    other = TinyHead(360, draft_vocab=201, seed=1).eagle3()
    taps = {} if has_gpu else {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    heads = [folder / "eagle3", other.save(tmp_path / "other", draft_vocab_size=201, **taps)]
    loaded = load_model(str(folder / "target"), dtype="float32", device="cpu", backend="torch")
    loaded = replace(loaded, decoder=cuda_decoder(folder / "target"))
    core = make_core(loaded, EngineConfig(kv_cache_memory_bytes=1 << 24, spare_heads=1), None)
    keys, _ = core.runner.store.arrays("spare 1")
    keys.zero_()
    params = SamplingParams(temperature=0, max_tokens=STEPS + 1, ignore_eos=True)
    texts, written = [], []
    for head in (None, *heads):
        speculation = None if head is None else {"model": str(head), "fixed": True}
        (request,) = core.add(NewRequest("one", tuple(range(30, 64)), params, speculation=speculation))
        while core.has_requests:
            core.step()
        assert bool(request.accounting.acceptance.draft_requests) == (head is not None)
        texts.append(request.output_ids)
        written.append(float(keys.float().abs().sum()))
    assert texts[1:] == texts[:1] * 2
    assert written[0] == 0.0
    assert written[1] not in (0.0, written[2])
