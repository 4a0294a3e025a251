"""Passes that are run before the first request, on a backend whose first ones of a size are cold."""

import logging
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from foreword.acceptance.params import SamplingParams
from foreword.backends.cuda.graphs import PassCounts
from foreword.backends.interface import DecodeSize
from foreword.backends.torch.decoder import TorchDecoder
from foreword.backends.torch.weights import load_weights
from foreword.drafters.config import SpeculationConfig
from foreword.drafters.lookup.ngram import NgramConfig, NgramDrafter
from foreword.drafters.lookup.suffix import SuffixConfig, SuffixDrafter
from foreword.engine import preparing
from foreword.engine.config import EngineConfig, EngineParts
from foreword.engine.core import LOADING_SECONDS, EngineCore
from foreword.engine.messages import NewRequest
from foreword.engine.preparing import MEMORY_SHARE, SECONDS, prepare_passes
from foreword.engine.text import Vocabulary
from foreword.speculation.drafting import Drafter
from helpers.clocks import ScriptedClock
from helpers.mixed_configs import CONFIGS
from helpers.random_checkpoint import RandomCheckpoint

CONFIG = CONFIGS["experts"]
WEIGHTS = load_weights(RandomCheckpoint(CONFIG), torch.float32, torch.device("cpu"))
SIZES = [DecodeSize(1, 16), DecodeSize(3, 16), DecodeSize(2, 32)]


class Device(TorchDecoder):
    """Compiles in the first pass of a size, captures in the second; `fails_at` has no memory for that."""

    def __init__(self, sizes: list[DecodeSize] = SIZES, fails_at: tuple[int, int] | None = None) -> None:
        super().__init__(CONFIG, WEIGHTS)
        self.sizes, self.fails_at = sizes, fails_at
        self.asked: list[tuple[int, int]] = []
        self.seen: Counter[tuple[int, int]] = Counter()  # (requests, rows of all), decoding ones

    def sizes_to_prepare(self, requests: int, length: int, rows: int) -> list[DecodeSize]:
        self.asked.append((requests, rows))
        return [size for size in self.sizes if size.requests <= requests and size.length < length]

    def forward(self, batch: Any, store: Any) -> Any:
        size, is_cold = (len(batch.kv_lens), len(batch.token_ids)), False
        if len(batch.logit_rows):
            self.seen[size] += 1
            is_cold = self.seen[size] < 3
            if size == self.fails_at:
                raise torch.OutOfMemoryError("CUDA out of memory")
        return replace(super().forward(batch, store), is_cold=is_cold)


def engine(device: Device, guesses: int = 0, pages: int = 64, drafter: Drafter | None = None) -> EngineCore:
    memory = pages * 16 * device.kv_rows().bytes_per_row
    speculation = SpeculationConfig.parse({"method": "ngram", "num_speculative_tokens": max(1, guesses)})
    build = (lambda _: drafter or NgramDrafter(NgramConfig())) if guesses else None
    config = EngineConfig(kv_cache_memory_bytes=memory, steps_ahead=2)
    parts = EngineParts(config, build_drafter=build, speculation=speculation if guesses else None)
    return EngineCore(device, Vocabulary(CONFIG.vocab_size), parts)


def answer(core: EngineCore) -> list[int]:
    params = SamplingParams(max_tokens=6, ignore_eos=True, seed=1)
    (request,) = core.add(NewRequest("r", (4, 5, 6), params))
    while core.has_requests:
        core.step()
    return request.output_ids


@pytest.mark.parametrize("guesses", [0, 2])
def test_every_size_is_run_until_it_is_ready_and_nothing_else_changes(guesses: int):
    device, told = Device(), []
    core = engine(device, guesses)
    found = prepare_passes(core, 3, lambda done, total: told.append((done, total)))
    wanted = {(1, 1), (3, 3), (2, 2)} | ({(1, 3), (3, 9), (2, 6), (1, 2)} if guesses else set())
    assert wanted <= set(device.seen)
    assert all(device.seen[size] >= 3 for size in wanted)
    assert found.cases == found.wanted_cases == len(wanted)
    assert told == [(done, len(wanted)) for done in range(len(wanted) + 1)]
    assert core.cache.num_open == 0
    assert core.cache.free_pages == core.cache.pool.num_pages, "nobody finds these texts later"
    assert core.situation.costs.step_seconds(1) is None
    assert core.steps == 0 and not core.faults
    core.check_integrity()
    assert answer(core) == answer(engine(Device(), guesses))


def test_drafters_remember_nothing_of_it():
    drafter = SuffixDrafter(SuffixConfig())
    prepare_passes(engine(Device(), 2, drafter=drafter), 3)
    assert drafter.memory_bytes() == 0


def test_a_backend_that_has_nothing_to_prepare_runs_nothing():
    device, told = Device([]), []
    assert prepare_passes(engine(device), 3, lambda *at: told.append(at)).wanted_cases == 0
    assert not device.seen and not told


def test_requests_rows_and_pages_bound_what_is_asked_for():
    device = Device()
    found = prepare_passes(engine(device, 2), 2)
    assert device.asked == [(2, 1), (2, 3), (1, 2)], "with fewer guesses a single one"
    assert found.wanted_cases == 5
    assert prepare_passes(engine(Device(), pages=7), 3).wanted_cases == 2, "three do not fit beside the texts"


def test_the_rest_is_left_to_its_first_request_when_the_time_is_up():
    clock = ScriptedClock(tick=SECONDS / 4)
    device = Device([DecodeSize(count, 16) for count in (1, 2, 3, 4, 5, 6)])
    found = prepare_passes(engine(device), 6, clock=clock)
    assert 0 < found.cases < found.wanted_cases == 6
    assert max(device.seen) == (found.cases, found.cases)


def test_the_rest_is_left_out_when_half_of_the_free_memory_is_gone(monkeypatch: pytest.MonkeyPatch):
    left = iter([100, 100, 70, 100 * (1 - MEMORY_SHARE) - 1])
    monkeypatch.setattr(preparing, "free_memory", lambda _: next(left))
    assert prepare_passes(engine(Device()), 3).cases == 2


def test_out_of_memory_costs_a_line_and_no_engine(caplog: pytest.LogCaptureFixture):
    device = Device(fails_at=(3, 3))
    core = engine(device)
    with caplog.at_level(logging.WARNING, "foreword"):
        found = prepare_passes(core, 3)
    assert (found.cases, found.wanted_cases) == (1, 3)
    (line,) = caplog.messages
    assert line.startswith("no memory is left to prepare more passes")
    assert core.cache.num_open == 0
    core.check_integrity()
    assert answer(core) == answer(engine(Device()))


class Kernels:
    """Kernels that are compiled when they are waited for, unless there is a bound."""

    def __init__(self) -> None:
        self.requested, self.waited = 0, list[bool]()

    def request(self, variants: Any) -> None:
        self.requested += 1

    def wait(self, variants: Any, until: float | None = None) -> bool:
        self.waited.append(until is None)
        return until is None


def test_plain_decoding_waits_for_its_kernels_and_the_rest_only_until_the_time_is_over():
    core, kernels = engine(Device()), Kernels()

    core.kernels = kernels  # type: ignore[assignment]
    prepared = prepare_passes(core, 4)
    assert kernels.waited == [True, False]
    assert (prepared.cases, prepared.wanted_cases) == (1, 3), (
        "the others are compiled while requests are answered"
    )
    assert kernels.requested == 2, "sizes with the same kernels are recorded once, then prompts"


def test_kernels_that_were_compiled_meanwhile_are_loaded_between_steps():
    core, loads = engine(Device()), list[float]()
    kernels: Any = SimpleNamespace(pending=2, loaded=5, passes=PassCounts(3, 4, 5))
    kernels.advance = loads.append
    core.kernels = kernels
    core.add(NewRequest("r", (1, 2, 3), SamplingParams(max_tokens=3, ignore_eos=True)))
    core.step()
    assert loads == [LOADING_SECONDS]
    kernels.pending = 0
    core.step()
    core.use_idle_time()
    assert loads == [LOADING_SECONDS]
    stats = core.stats()
    assert (stats.kernels_loaded, stats.kernels_pending) == (5, 0)
    assert (stats.passes_captured, stats.passes_eager, stats.passes_cold) == (3, 4, 5)
