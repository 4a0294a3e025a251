"""A GPU whose memory is full."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from foreword import EngineConfig
from foreword.acceptance.params import SamplingParams
from foreword.engine.config import EngineParts
from foreword.engine.core import EngineCore
from foreword.engine.messages import NewRequest
from foreword.engine.requests.request import Request
from foreword.engine.text import Vocabulary
from helpers.cuda import cuda_decoder, needs_cuda
from helpers.tiny_models import make_hf_model

pytestmark = needs_cuda

PARAMS = SamplingParams(max_tokens=24, ignore_eos=True, seed=3)


@contextmanager
def room_for(more: int) -> Iterator[None]:
    """No more bytes than these beside what is taken."""
    torch.cuda.empty_cache()
    whole = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + more) / whole)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def wide_engine(path: Path) -> EngineCore:
    """Its prompts need far more memory than its answers."""
    make_hf_model(path, "llama", tied=True, intermediate_size=16384, max_position_embeddings=4096)
    decoder = cuda_decoder(path)
    config = EngineConfig(
        kv_cache_memory_bytes=1 << 24, max_num_batched_tokens=2048, max_step_seconds=None, steps_ahead=2
    )
    return EngineCore(decoder, Vocabulary(decoder.config.vocab_size), EngineParts(config))


def add(core: EngineCore, length: int) -> Request:
    return core.add(NewRequest(f"{length}-{core.steps}", tuple([5, 6, 7, 8] * (length // 4)), PARAMS))[0]


def run(core: EngineCore) -> None:
    while core.has_requests:
        core.step()


def test_a_prompt_that_does_not_fit_costs_its_request_and_nobody_elses(tmp_path: Path):
    core = wide_engine(tmp_path)
    expected = add(core, 8)
    run(core)
    short = add(core, 8)
    core.step()
    with room_for(32 << 20):
        long = add(core, 2000)
        run(core)
    assert long.finish_reason == "error"
    assert "no memory left" in (long.answer.error or "")
    assert short.output_ids == expected.output_ids
    again = add(core, 2000)
    run(core)
    assert again.finish_reason == "length"


def test_where_nothing_can_be_captured_passes_run_without(tmp_path: Path):
    core = wide_engine(tmp_path)
    expected = add(core, 8)
    core.step()
    with room_for(4 << 20):
        run(core)
    found = add(core, 8)
    run(core)
    assert found.output_ids == expected.output_ids
    assert not core.faults
