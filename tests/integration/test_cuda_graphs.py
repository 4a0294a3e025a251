"""Captured passes of the CUDA backend."""

from pathlib import Path

import pytest

from foreword import EngineConfig
from foreword.acceptance.params import SamplingParams
from foreword.engine.config import EngineParts
from foreword.engine.core import EngineCore
from foreword.engine.messages import NewRequest
from foreword.engine.step_pipeline import StepPipeline
from foreword.engine.text import Vocabulary
from helpers.cuda import cuda_decoder, needs_cuda
from helpers.tiny_models import make_hf_model

pytestmark = needs_cuda  # in the interpreter nothing is captured


def text(decoder, ahead: int) -> list[list[int]]:
    """Of an engine with memory of its own."""
    config = EngineConfig(kv_cache_memory_bytes=1 << 22, steps_ahead=ahead)
    core = EngineCore(decoder, Vocabulary(decoder.config.vocab_size), EngineParts(config))
    params = SamplingParams(max_tokens=40, ignore_eos=True, seed=3)
    requests = [
        core.add(NewRequest(str(length), tuple(range(5, 5 + length)), params))[0] for length in (3, 9)
    ]
    pipeline = StepPipeline(core)
    while core.has_requests or pipeline.is_busy:
        pipeline.advance()
    assert not core.faults
    return [request.output_ids for request in requests]


@pytest.mark.parametrize("ahead", [1, 2])
def test_engines_that_share_a_decoder_have_memory_of_their_own(ahead: int, tmp_path: Path):
    """A capture that goes on reading the first engine's memory would show in the second's text."""
    path = make_hf_model(tmp_path, "llama", tied=True)
    shared = cuda_decoder(path)
    first, second = text(shared, ahead), text(shared, ahead)
    assert first == second == text(cuda_decoder(path), 1)
