"""Engines that capture before their first request, on a GPU."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from foreword.acceptance.params import SamplingParams
from foreword.backends.batch import ForwardBatch, ForwardOutput
from foreword.backends.interface import KvStore
from foreword.engine import preparing
from foreword.engine.assembly import make_core
from foreword.engine.config import EngineConfig
from foreword.engine.core import EngineCore
from foreword.engine.loader import load_model
from foreword.engine.messages import NewRequest
from foreword.engine.preparing import compile_passes, prepare_passes
from foreword.engine.step_pipeline import StepPipeline
from helpers.cuda import cuda_decoder, needs_cuda
from integration.test_cuda_head_chains import folder  # noqa: F401 - a fixture

pytestmark = needs_cuda

METHODS = ["eagle3", "eagle", "mtp", "p_eagle", "dflash", "dspark"]


def engine(path: Path, speculation: dict[str, Any] | None, *, eager: bool = False) -> EngineCore:
    """Not yet prepared."""
    loaded = load_model(str(path), dtype="float32", device="cpu", backend="torch")
    decoder: Any = cuda_decoder(path, enforce_eager=eager)
    decoder.sizes_to_prepare = lambda *_: ()
    sizes = EngineConfig(kv_cache_memory_bytes=1 << 26, max_num_seqs=4)
    core = make_core(replace(loaded, decoder=decoder), sizes, speculation)
    del decoder.sizes_to_prepare
    return core


def texts(core: EngineCore, count: int) -> list[list[int]]:
    requests = []
    for number in range(count):
        params = SamplingParams(max_tokens=30, ignore_eos=True, seed=number, temperature=number % 2)
        requests += core.add(NewRequest(f"r{number}", tuple(range(20 + number, 60 + number)), params))
    pipeline = StepPipeline(core)
    while core.has_requests or pipeline.is_busy:
        pipeline.advance()
    assert not core.faults
    return [request.output_ids for request in requests]


def test_nothing_is_captured_in_a_request(
    folder: Path,  # noqa: F811
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(
        preparing, "SECONDS", 600.0
    )  # kernels may have to be compiled first, beside other tests
    core = engine(folder / "target", None)
    prepared = prepare_passes(core, 4)
    assert prepared.cases == prepared.wanted_cases > 0 and not caplog.messages
    forward, were_cold = core.runner.decoder.forward, []

    def noted(batch: ForwardBatch, store: KvStore) -> ForwardOutput:
        output = forward(batch, store)
        were_cold.append(output.is_cold)
        return output

    monkeypatch.setattr(core.runner.decoder, "forward", noted)
    found = texts(core, 3)
    assert were_cold and not any(were_cold)
    assert found == texts(engine(folder / "target", None, eager=True), 3)


@pytest.mark.parametrize("method", METHODS)
def test_heads_are_prepared_and_say_the_same(
    folder: Path,  # noqa: F811
    method: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(preparing, "SECONDS", 3.0)
    config = {"method": method, "model": str(folder / method), "num_speculative_tokens": 4, "fixed": True}
    core = engine(folder / "target", config)
    prepared = prepare_passes(core, 2)
    assert prepared.cases > 0 and not caplog.messages
    assert not core.drafters.fault_counts()
    assert texts(core, 2) == texts(engine(folder / "target", config), 2)


def test_all_kernels_can_be_compiled_before(folder: Path):  # noqa: F811
    config = {
        "method": "eagle3",
        "model": str(folder / "eagle3"),
        "num_speculative_tokens": 4,
        "fixed": True,
    }
    core = engine(folder / "target", config)
    assert compile_passes(core, 2, lambda done, wanted: None) > 0
    assert core.kernels is not None and not core.kernels.pending
    before = core.stats()
    assert texts(core, 2) == texts(engine(folder / "target", config), 2)
    after = core.stats()
    assert after.kernels_loaded == before.kernels_loaded > 0 and after.kernels_pending == 0
    assert after.passes_captured > before.passes_captured
