"""Steps in which a device compiles or captures something first: what they take is not what the next ones take."""

from collections import Counter
from typing import Any

import pytest
import torch

from foreword.acceptance.params import SamplingParams
from foreword.acceptance.request import RequestSampler, TokenLimits
from foreword.backends.cold import cold_runs, note_cold_run
from foreword.backends.cuda.graphs import GraphCache
from foreword.backends.torch.decoder import TorchDecoder
from foreword.backends.torch.weights import load_weights
from foreword.control.fixed import FixedPolicy
from foreword.engine.core import EngineCore
from foreword.engine.guessing.cost_profile import ROWS, measure_profile
from foreword.engine.requests.request import Request, RequestLimits
from foreword.engine.vocabulary import Vocabulary
from foreword.kv.paged_cache import PagedCache
from foreword.speculation.measured.costs import StepCosts
from foreword.speculation.report import DrafterCall, RequestReport, StageSeconds, StepReport
from foreword.speculation.requests import PassEntry
from foreword.speculation.step import Stepper
from foreword.speculation.verdict import Verdict
from helpers.clocks import ScriptedClock
from helpers.history_target import HistoryTarget
from helpers.mixed_configs import CONFIGS
from helpers.random_checkpoint import RandomCheckpoint
from helpers.requests import lone_request


def report(seconds: float, is_cold: bool) -> StepReport:
    calls = [DrafterCall("head", 1, 4, 4, 0, seconds=seconds / 2, is_cold=is_cold)]
    part = RequestReport(lone_request([1]), Verdict(), run=1)
    return StepReport([part], calls, StageSeconds(draft=seconds / 2, total=seconds), is_cold=is_cold)


def test_they_teach_nothing_of_costs():
    costs = StepCosts()
    for _ in range(4):
        costs.observe(report(9.0, is_cold=True))
    assert costs.step_seconds(1) is None
    for number in range(20):
        costs.observe(report(0.01 if number % 3 else 9.0, is_cold=not number % 3))
    assert costs.step_seconds(1) == pytest.approx(0.005)
    assert costs.draft_seconds("head", 4) == pytest.approx(0.005)


def test_a_step_says_whether_it_was_one():
    class Target(HistoryTarget):
        def forward(self, batch: Any, store: object = None) -> Any:
            if self.passes == 1:
                note_cold_run()
            return super().forward(batch, store)

    cache, params = PagedCache(8), SamplingParams(temperature=0, max_tokens=9)
    sampler = RequestSampler(params, TokenLimits(11), [1, 2], seed=0)
    request = Request(0, [1, 2], params, sampler, RequestLimits(64, frozenset()))
    request.kv = cache.open()
    stepper = Stepper(Target(), cache, FixedPolicy())
    found = [
        stepper.step([PassEntry.of(request, len(request.tokens) - request.kv.computed)]).is_cold
        for _ in range(3)
    ]
    assert found == [False, True, False]


def test_a_shape_is_cold_until_it_is_captured(monkeypatch: pytest.MonkeyPatch):
    graphs: GraphCache[str, int] = GraphCache(limit=1)

    class Graph:
        def replay(self) -> None: ...

    def captured(_self: Any, shape: str, _body: Any) -> Any:
        graphs._captured[shape] = Graph(), 7  # type: ignore[assignment]
        return graphs._captured[shape]

    monkeypatch.setattr(GraphCache, "_capture", captured)
    cold = []
    for shape in ("a", "a", "a", "b", "b", "b"):
        before = cold_runs()
        graphs.run(shape, lambda: 7)
        cold.append(cold_runs() - before)
    assert cold == [1, 1, 0, 1, 0, 0]  # there is no room for the capture of another


def test_a_profile_is_of_passes_that_are_ready():
    config, clock, seen = CONFIGS["experts"], ScriptedClock(), Counter[int]()

    class Device(TorchDecoder):
        def forward(self, batch: Any, store: Any) -> Any:
            rows = len(batch.token_ids)
            seen[rows] += 1
            if seen[rows] < 3:
                note_cold_run()
            clock.pass_by(30.0 if seen[rows] < 3 else 0.004 + rows * 1e-5)
            return super().forward(batch, store)

    weights = load_weights(RandomCheckpoint(config), torch.float32, torch.device("cpu"))
    core = EngineCore(Device(config, weights), Vocabulary(config.vocab_size))
    points = measure_profile(core, clock)
    assert [rows for rows, _ in points] == [rows for rows in ROWS if rows < core.max_model_len]
    assert [seconds for _, seconds in points] == pytest.approx([0.004 + rows * 1e-5 for rows, _ in points])
