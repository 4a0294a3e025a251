"""Every kind of work at every batch size, in every way of decoding."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from foreword.bench.control.statistics import (
    BestFixed,
    Interval,
    against_best,
    bootstrap,
    neighbours,
    together,
)
from foreword.bench.control.windows import Arm, Station
from foreword.errors import RequestError
from foreword.progress import StageProgress

PLAIN = Arm("plain", False)
CONTROLLER = "controller"

CONFIDENCE = 0.95
"""That all bounds of a run hold at once."""

LEAST_RATIO, LEAST_OF_BEST = 0.99, 0.96
"""What the controller promises, of plain decoding and of the best fixed setting."""


@dataclass(frozen=True)
class CellRates:
    """Tokens per second of every window, by arm."""

    kind: str
    batch: int
    rates: Mapping[str, Sequence[float]]
    learning: float | None = None  # tokens per second of the controller before they were counted


@dataclass(frozen=True)
class Cell:
    """One kind of work at one batch size."""

    kind: str
    batch: int
    plain_rate: float  # tokens per second, mean
    ratios: Mapping[str, Interval]  # of every arm but plain, to plain
    best: BestFixed  # plain decoding is a fixed setting, too
    windows: int
    learning: float | None = None  # the controller while it was learning, to plain

    @property
    def holds(self) -> bool:
        """Whether what is promised is within the bounds."""
        return self.ratios[CONTROLLER].high >= LEAST_RATIO and self.best.ratio.high >= LEAST_OF_BEST


def measure_cells(
    station: Station,
    cells: Sequence[tuple[str, int]],
    arms: Sequence[Arm],
    windows: int,
    on_progress: StageProgress,
    learning_seconds: float = 0.0,
) -> list[CellRates]:
    """All arms take turns, forwards and then backwards, so that what drifts favours none of them.

    A first round is not counted: prompts of a new kind, or another batch, are new to everyone. The controller then has
    so many seconds of the same work to find out what pays; how it does meanwhile is told apart.
    """
    if windows < 4:
        raise RequestError(
            f"--windows must be at least 4, not {windows}: half of them choose, the others compare"
        )
    own = next(arm for arm in arms if arm.label == CONTROLLER)
    found = []
    for place, (kind, batch) in enumerate(cells):
        rates: dict[str, list[float]] = {arm.label: [] for arm in arms}
        learning: float | None = None
        for number in range(-1, windows):
            if number == 0:
                learning = _learned(station, own, (kind, batch), windows, learning_seconds)
            done = place * (windows + 1) + number + 1
            on_progress(f"{kind}, batch {batch}", done, len(cells) * (windows + 1))
            for arm in arms if number % 2 else reversed(arms):
                window = station.window(arm, kind, batch, number + 1)
                if number >= 0:
                    rates[arm.label].append(window.rate)
        found.append(CellRates(kind, batch, rates, learning))
    return found


def _learned(station: Station, own: Arm, cell: tuple[str, int], windows: int, seconds: float) -> float | None:
    """Windows of the controller behind those that count, so many seconds of them; tokens per second."""
    tokens, spent = 0, 0.0
    while spent < seconds:
        windows += 1
        window = station.window(own, *cell, windows)
        tokens, spent = tokens + window.tokens, spent + window.seconds
    return tokens / spent if spent else None


def summarise(measured: Sequence[CellRates]) -> list[Cell]:
    """Ratios with bounds that hold for all cells together."""
    confidence = together(CONFIDENCE, len(measured))
    return [_cell(cell, confidence) for cell in measured]


def _cell(cell: CellRates, confidence: float) -> Cell:
    plain = cell.rates[PLAIN.label]
    fixed = [label for label in cell.rates if label != CONTROLLER]
    return Cell(
        cell.kind,
        cell.batch,
        sum(plain) / len(plain),
        {
            label: bootstrap(neighbours(rates, plain), confidence)
            for label, rates in cell.rates.items()
            if label != PLAIN.label
        },
        against_best(cell.rates, CONTROLLER, fixed, confidence),
        len(plain),
        None if cell.learning is None else cell.learning * len(plain) / sum(plain),
    )
