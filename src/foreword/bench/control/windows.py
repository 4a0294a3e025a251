"""Measures short windows of a full batch, interleaved between arms, by category and batch size."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from time import perf_counter

from foreword.acceptance.params import SamplingParams
from foreword.bench import skeleton
from foreword.bench.batch_runs import full_batch
from foreword.drafters.config import SpeculationSetting
from foreword.engine.core import EngineCore
from foreword.engine.messages import NewRequest
from foreword.errors import RequestError
from foreword.progress import StageProgress


@dataclass(frozen=True)
class ControlArm:
    """A compared speculation setting."""

    label: str
    setting: SpeculationSetting
    is_half: bool = False  # every other request decodes without drafts


@dataclass(frozen=True)
class MeasuredWindow:
    """Tokens and time of a full batch, without prefill."""

    tokens: int
    seconds: float

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


MOST_AHEAD = 1024  # maximum tokens that a request may gain before the last prompt of its batch is processed
MIXED = "mixed"  # category that mixes all others
MANY = 8  # batch size from which windows are shorter, since many requests make enough tokens


def tokens_at(batch: int, tokens: int) -> int:
    """Return the mean tokens per request in a window."""
    return tokens if batch <= MANY else max(tokens // 2, 1)


class Prompts:
    """Prompts by category, as token ids."""

    def __init__(self, by_kind: Mapping[str, Sequence[Sequence[int]]]) -> None:
        longest = max(map(len, by_kind.values()))
        mixed = [prompts[index % len(prompts)] for index in range(longest) for prompts in by_kind.values()]
        self._by_kind = {**by_kind, MIXED: mixed}

    @property
    def kinds(self) -> list[str]:
        return list(self._by_kind)

    def take(self, kind: str, number: int, how_many: int) -> list[Sequence[int]]:
        """Return the next `how_many` prompts; window `number` starts where the one before ended."""
        prompts = self._by_kind[kind]
        return [prompts[(number * how_many + index) % len(prompts)] for index in range(how_many)]


@dataclass
class EngineStation:
    """Runs windows on an otherwise idle engine."""

    engine: EngineCore
    prompts: Prompts
    tokens: int  # per request and window
    clock: Callable[[], float] = perf_counter
    ahead: int = MOST_AHEAD
    has_new_tenants: bool = False  # whether each window is a new tenant
    _numbers: "count[int]" = field(default_factory=count)

    def window(self, arm: ControlArm, kind: str, batch: int, number: int) -> MeasuredWindow:
        """Measure from the end of prefill until all answers together have gained their tokens.

        The batch stays full, and every arm generates the same number of tokens. Each arm has a tenant per category and
        batch size. So arms share no cache and no estimate, and an arm keeps its own from window to window.
        """
        engine, name = self.engine, f"window {next(self._numbers)}"
        tenant = name if self.has_new_tenants else f"{arm.label}, {kind}, batch {batch}"
        params = SamplingParams(temperature=0, max_tokens=self.tokens + self.ahead, ignore_eos=True)
        tokens = tokens_at(batch, self.tokens)
        wanted = [
            NewRequest(f"{name}-{index}", tuple(ids), params, tenant, arm.setting)
            for index, ids in enumerate(self.prompts.take(kind, number, batch))
        ]
        with full_batch(engine, wanted, engine.step) as requests:
            before, began = sum(len(request.tokens) for request in requests), self.clock()
            if any(request.room < tokens for request in requests):
                raise RequestError(f"answers end before all {batch} prompts are read; use smaller batches")
            gained = 0
            while gained < batch * tokens:
                engine.step()
                if any(request.finish_reason is not None for request in requests):
                    raise RequestError(f"a window of {kind} at batch {batch} failed")
                gained = sum(len(request.tokens) for request in requests) - before
            return MeasuredWindow(gained, self.clock() - began)


PLAIN_ARM = ControlArm(skeleton.PLAIN, False)
CONTROLLER = "controller"

CONFIDENCE = 0.95  # probability that all bounds of a benchmark hold together

LEAST_RATIO, LEAST_OF_BEST = 0.99, 0.96  # goals relative to plain decoding and to the best fixed setting


@dataclass(frozen=True)
class ControlCell:
    """Results of one category at one batch size."""

    kind: str  # category
    batch: int
    plain_rate: float  # mean tokens per second of plain decoding
    ratios: Mapping[str, skeleton.Interval]  # of every arm to plain
    best: skeleton.BestFixed  # plain decoding counts as a fixed setting
    windows: int
    learning: float | None = None  # ratio of the controller while learning

    @property
    def holds(self) -> bool:
        """Whether both goals are within the bounds of the measured ratios."""
        return self.ratios[CONTROLLER].high >= LEAST_RATIO and self.best.ratio.high >= LEAST_OF_BEST


def measure_cells(
    station: EngineStation,
    cells: Sequence[tuple[str, int]],
    arms: Sequence[ControlArm],
    windows: int,
    on_progress: StageProgress,
    learning_seconds: float = 0.0,
) -> list[ControlCell]:
    """Measure every cell (category, batch size) with all arms interleaved; the bounds of all cells hold together.

    The first round does not count. Then the controller learns for `learning_seconds`, and its rate in that time is
    reported separately.
    """
    if windows < 4:
        raise RequestError(
            f"--windows must be at least 4, not {windows}: half of them choose, the others compare"
        )
    controller = next(arm for arm in arms if arm.label == CONTROLLER)
    measured = []

    def window(arm: ControlArm, kind: str, batch: int, number: int) -> MeasuredWindow:
        return station.window(arm, kind, batch, number + 1)

    confidence = skeleton.joint_confidence(CONFIDENCE, len(cells))
    for index, (kind, batch) in enumerate(cells):
        windows_of = {arm.label: partial(window, arm, kind, batch) for arm in arms}
        show = skeleton.stage_of(on_progress, f"{kind}, batch {batch}", index, len(cells))
        skeleton.take_turns(windows_of, 0, alternate=True)  # warm-up
        learning = _learned(station, controller, (kind, batch), windows, learning_seconds)
        samples = skeleton.take_turns(windows_of, windows, show, warm_up=0, alternate=True)
        rates = {label: [sample.rate for sample in of_arm] for label, of_arm in samples.items()}
        measured.append(control_cell(kind, batch, rates, confidence, learning))
    return measured


def _learned(
    station: EngineStation, controller: ControlArm, cell: tuple[str, int], windows: int, seconds: float
) -> float | None:
    """Run the controller for this time on windows after the measured ones; return its tokens per second."""
    tokens, spent = 0, 0.0
    while spent < seconds:
        windows += 1
        window = station.window(controller, *cell, windows)
        tokens, spent = tokens + window.tokens, spent + window.seconds
    return tokens / spent if spent else None


def control_cell(
    kind: str,
    batch: int,
    rates: Mapping[str, Sequence[float]],
    confidence: float,
    learning: float | None = None,
) -> ControlCell:
    """Return the results of a cell; `rates` are tokens per second by arm and window, `learning` while learning."""
    plain = rates[skeleton.PLAIN]
    fixed = [label for label in rates if label != CONTROLLER]
    ratios = {
        label: skeleton.bootstrap(skeleton.ratios_by_round(of_arm, plain), confidence)
        for label, of_arm in rates.items()
        if label != skeleton.PLAIN
    }
    best = skeleton.against_best(rates, CONTROLLER, fixed, confidence)
    learned = None if learning is None else learning * len(plain) / sum(plain)
    return ControlCell(kind, batch, sum(plain) / len(plain), ratios, best, len(plain), learned)
