"""Steps in which a device compiles or captures something first: what they take is not what the next ones take."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from foreword.acceptance.params import SamplingParams
from foreword.acceptance.request import RequestSampler, TokenLimits
from foreword.backends.cuda.graphs import GraphCache, _Capture
from foreword.backends.torch.decoder import TorchDecoder
from foreword.backends.torch.weights import load_weights
from foreword.control.fixed import FixedPolicy
from foreword.drafters.model.autoregressive import AutoregressiveDrafter, DraftingSize
from foreword.engine.core import EngineCore
from foreword.engine.profiles import ROWS, measure_profile
from foreword.engine.requests.answer import RequestLimits
from foreword.engine.requests.request import Request
from foreword.engine.text import Vocabulary
from foreword.kv.paged_cache import PagedCache
from foreword.speculation.draft import Draft, mark_cold
from foreword.speculation.drafting import Drafter, DraftRequest, DraftTask
from foreword.speculation.measured.costs import StepCosts
from foreword.speculation.report import DrafterCall, RequestReport, StageSeconds, StepReport
from foreword.speculation.requests import PassEntry, Verdict, draft_request_of
from foreword.speculation.step import Stepper
from helpers.clocks import ScriptedClock
from helpers.history_target import HistoryTarget
from helpers.mixed_configs import CONFIGS
from helpers.random_checkpoint import RandomCheckpoint
from helpers.requests import lone_request

pytestmark = pytest.mark.usefixtures("whole_profiles")


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
    assert costs.draft_seconds("head", 4) == pytest.approx(0.005, rel=0.01)


class ColdTarget(HistoryTarget):
    def forward(self, batch: Any, store: object = None) -> Any:
        is_cold = self.passes == 1
        return replace(super().forward(batch, store), is_cold=is_cold)


class ColdDrafter(Drafter):
    """Captures in its second call."""

    def __init__(self) -> None:
        self.calls = 0

    def propose(self, asks: Sequence[DraftTask]) -> list[Draft]:
        self.calls += 1
        drafts = [Draft.chain([3], len(ask.request.tokens)) for ask in asks]
        return list(mark_cold(drafts, self.calls == 2))

    def forget(self, request: DraftRequest) -> None: ...


@pytest.mark.parametrize(
    ("target", "policy"),
    [(ColdTarget(), FixedPolicy()), (HistoryTarget(), FixedPolicy(ColdDrafter(), 1, 1))],
)
def test_a_step_says_whether_it_was_one(target: HistoryTarget, policy: FixedPolicy):
    cache, params = PagedCache(8), SamplingParams(temperature=0, max_tokens=9)
    sampler = RequestSampler(params, TokenLimits(11), [1, 2], seed=0)
    request = Request(0, [1, 2], params, sampler, RequestLimits(64, frozenset()))
    request.kv = cache.open()
    stepper = Stepper(target, cache, policy)
    reports = [
        stepper.step([PassEntry.of(request, len(request.tokens) - request.kv.computed)]) for _ in range(3)
    ]
    assert [report.is_cold for report in reports] == [False, True, False]
    assert [call.is_cold for report in reports for call in report.calls] in ([], [False, True, False])


@pytest.mark.parametrize("width", [1, 2])
def test_a_draft_model_says_whether_its_passes_were(width: int):
    config = CONFIGS["experts"]
    weights = load_weights(RandomCheckpoint(config), torch.float32, torch.device("cpu"))
    decoder: Any = TorchDecoder(config, weights)
    drafter = AutoregressiveDrafter(decoder, 11, DraftingSize(width, kv_tokens=64))
    ask = DraftTask(draft_request_of(lone_request([1, 2, 3])), 4, 2)
    assert [draft.is_cold for draft in drafter.propose([ask])] == [False]
    forward, passes = decoder.forward, count()
    decoder.forward = lambda *batch: replace(forward(*batch), is_cold=next(passes) == 1)
    assert [drafter.propose([ask])[0].is_cold for _ in range(2)] == [True, False]


def test_a_shape_is_cold_until_it_is_captured(monkeypatch: pytest.MonkeyPatch):
    graphs: GraphCache[str, int] = GraphCache(limit=1)

    monkeypatch.setattr(GraphCache, "_capture", lambda *_: _Capture(Mock(), 7))
    cold = [graphs.run(shape, lambda: 7)[1] for shape in ("a", "a", "a", "b", "b", "b")]
    assert cold == [True, True, False, True, False, False]  # there is no room for the capture of another


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("CUDA error: out of memory")]
)
def test_no_memory_for_a_capture_costs_the_capture_alone(
    error: RuntimeError, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    @contextmanager
    def capturing(*_: object, **__: object) -> Iterator[None]:
        yield
        raise error

    for name in ("CUDAGraph", "graph_pool_handle"):
        monkeypatch.setattr(torch.cuda, name, object)
    monkeypatch.setattr(torch.cuda, "graph", capturing)
    graphs: GraphCache[str, int] = GraphCache()
    assert [graphs.run(shape, lambda: 7)[0] for shape in ("a", "a", "a", "b", "b")] == [7] * 5
    assert caplog.messages == ["no GPU memory is left to capture a; such passes run without a CUDA graph"]
    assert graphs.captured == 0


def test_a_capture_that_fails_for_another_reason_is_not_hidden(monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    for name in ("CUDAGraph", "graph_pool_handle"):
        monkeypatch.setattr(torch.cuda, name, object)
    monkeypatch.setattr(torch.cuda, "graph", refuse)
    graphs: GraphCache[str, int] = GraphCache()
    graphs.run("a", lambda: 7)
    with pytest.raises(RuntimeError, match="not permitted"):
        graphs.run("a", lambda: 7)


def test_a_profile_is_of_passes_that_are_ready():
    config, clock, seen = CONFIGS["experts"], ScriptedClock(), Counter[int]()

    class Device(TorchDecoder):
        def forward(self, batch: Any, store: Any) -> Any:
            rows = len(batch.token_ids)
            seen[rows] += 1
            is_cold = seen[rows] < 3
            clock.pass_by(30.0 if is_cold else 0.004 + rows * 1e-5)
            return replace(super().forward(batch, store), is_cold=is_cold)

    weights = load_weights(RandomCheckpoint(config), torch.float32, torch.device("cpu"))
    core = EngineCore(Device(config, weights), Vocabulary(config.vocab_size))
    points = measure_profile(core, clock)
    assert [rows for rows, _ in points] == [rows for rows in ROWS if rows < core.max_model_len]
    assert [seconds for _, seconds in points] == pytest.approx([0.004 + rows * 1e-5 for rows, _ in points])
