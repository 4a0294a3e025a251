"""Speculative rows of `foreword bench gpu`, on a model small enough for a CPU."""

import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from foreword.acceptance.params import SamplingParams
from foreword.acceptance.request import RequestSampler, TokenLimits
from foreword.acceptance.transfer import HostCopy
from foreword.backends.torch.decoder import TorchDecoder
from foreword.backends.torch.weights import weights_from
from foreword.bench.gpu import speculating
from foreword.bench.gpu.engines import measure_start
from foreword.bench.gpu.recorded import DEPTH, RecordedDrafter, scripted_runs
from foreword.bench.gpu.speculating import measure_controller, measure_heads, measure_speculation
from foreword.bench.random_models import SHAPES, RandomTensors
from foreword.bench.theory import break_even
from foreword.engine.config import EngineConfig
from foreword.models.config import ModelConfig
from foreword.speculation.draft import DeviceTokens, Draft
from foreword.speculation.drafting import Drafter, DraftRequest, DraftTask
from helpers.clocks import ScriptedClock


@pytest.fixture(autouse=True)
def one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured here is right or wrong the first time."""
    for name in ("WARM_UP", "RUNS", "WARM_UP_WINDOWS"):
        monkeypatch.setattr(speculating, name, 1)


def tiny(hidden: int) -> ModelConfig:
    whole = SHAPES["smollm2-135m"]
    attention = replace(whole.layer.attention, num_heads=hidden // 32, num_kv_heads=1, head_dim=32)
    layer = replace(whole.layer, attention=attention, mlp=replace(whole.layer.mlp, intermediate_size=64))
    return replace(whole, vocab_size=320, hidden_size=hidden, layers=(layer,) * 4, context_length=2048)


def decoder(hidden: int) -> TorchDecoder:
    config = tiny(hidden)
    tensors = RandomTensors(config, torch.float32, torch.device("cpu"))
    return TorchDecoder(config, weights_from(tensors, config))


def test_every_drafter_pays_and_its_guesses_are_right_as_often_as_wanted():
    told: list[str] = []
    speeds = measure_speculation(
        decoder(64),
        decoder(32),
        batches=[2],
        context=24,
        progress=lambda what, _place, _all: told.append(what),
    )
    assert [speed.drafter for speed in speeds] == ["free", "eagle3", "draft model"]
    assert told == ["free, batch 2", "eagle3, batch 2", "draft model, batch 2"]
    free, head, model = speeds
    assert 2.7 < free.tokens_per_pass < 3.3
    assert 3.5 < min(head.tokens_per_pass, model.tokens_per_pass) < 4.3
    assert all(speed.tokens_per_second > 0 for speed in speeds)


def test_recorded_tokens_replace_those_that_a_drafter_leaves_on_the_device():
    """As on a GPU, where a head's tokens are computed in inference mode and are not read by the host."""
    with torch.inference_mode():
        source = HostCopy(torch.arange(100, 106), torch.arange(100, 106))

    class OnDevice(Drafter):
        def propose(self, tasks: Sequence[DraftTask]) -> list[Draft]:
            places = [(0, 2, 4), (1, 3, 5)]
            return [
                Draft.on_device(DeviceTokens(source, own), len(task.request.tokens))
                for task, own in zip(tasks, places, strict=True)
            ]

    prompts = [(1, 2), (3, 4)]
    answers = {prompt: [*range(10 * prompt[0], 10 * prompt[0] + 9)] for prompt in prompts}
    drafter = RecordedDrafter(answers, DEPTH + 1, OnDevice())
    sampling = RequestSampler(SamplingParams(temperature=0), TokenLimits(320), (1,), 0).drafting()
    tasks = [
        DraftTask(DraftRequest(number, prompt, sampling, 2), 3, 3) for number, prompt in enumerate(prompts)
    ]
    drafts = drafter.propose(tasks)
    assert source.on_device.tolist() == [10, 30, 11, 31, 12, 32]
    assert [draft.tokens for draft in drafts] == [(10, 11, 12), (30, 31, 32)]


def test_heads_are_timed_as_they_run_and_in_torch():
    speeds = measure_heads(
        decoder(32), batches=[1], context=24, progress=lambda *_: None, methods=["p_eagle"]
    )
    assert [speed.drafter for speed in speeds] == ["p_eagle", "p_eagle in torch"]
    assert all(speed.draft_ms > 0 and speed.tokens_per_pass > 2.5 for speed in speeds)


def test_the_controller_is_timed_beside_plain_decoding():
    told: list[str] = []
    speeds = measure_controller(
        decoder(32), batches=[2], context=24, progress=lambda what, _place, _all: told.append(what), rounds=1
    )
    assert [(speed.batch, speed.offered) for speed in speeds] == [(2, 3.9), (2, 1.2)]
    assert told == ["batch 2, 3.9 offered", "batch 2, 1.2 offered"]
    assert all(speed.lowest <= speed.ratio and speed.tokens_per_pass >= 0.9 for speed in speeds)


@pytest.mark.parametrize("wanted", [1.5, 3.0, 3.9, 5.5])
def test_guesses_are_spoilt_at_the_rate_that_gives_the_wanted_tokens_per_pass(wanted: float):
    rate = break_even(DEPTH, wanted)
    assert rate is not None
    assert sum(rate**level for level in range(DEPTH + 1)) == pytest.approx(wanted)
    runs = scripted_runs(rate)
    assert 1 + sum(runs) / len(runs) == pytest.approx(wanted, abs=0.1)
    assert max(runs) <= DEPTH


def test_the_start_is_timed_part_by_part():
    config = EngineConfig(kv_cache_memory_bytes=1 << 22, max_num_seqs=2)
    timed: Any = decoder(32)
    stores: list[weakref.ref[Any]] = []
    allocate = timed.new_kv_store

    def new_store(*sizes: Any) -> Any:
        store = allocate(*sizes)
        stores.append(weakref.ref(store))
        return store

    timed.new_kv_store = new_store
    made, started = measure_start(lambda: timed, 24, lambda *_: None, config, ScriptedClock(tick=0.3))
    assert made is timed
    assert stores and not any(store() for store in stores), "what follows needs the memory"
    parts = (
        started.decoder_seconds,
        started.memory_seconds,
        started.prepare_seconds,
        started.profile_seconds,
        started.first_token_seconds,
    )
    assert started.seconds == pytest.approx(sum(parts)) and min(parts) >= 0
    assert started.second_token_seconds >= 0
    assert started.wanted == 0, "torch has nothing to prepare"
