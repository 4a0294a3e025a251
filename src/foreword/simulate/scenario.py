"""Parameters of a simulation: costs in seconds, acceptance, fleet, network, traffic and failures."""

import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

import numpy as np
import numpy.typing as npt

from foreword.bench.skeleton import check_least
from foreword.errors import RequestError


@dataclass(frozen=True)
class PassTimes:
    """Pass time by rows: piecewise linear, extrapolated beyond the last point."""

    points: tuple[tuple[int, float], ...]  # by rows, ascending

    @staticmethod
    def straight(first: float, per_row: float) -> "PassTimes":
        """Return times on a straight line: `first` for one row, and `per_row` for each further row."""
        return PassTimes(((1, first), (2, first + per_row)))

    @property
    def most_measured(self) -> int:
        """Number of rows beyond which times are extrapolated."""
        return self.points[-1][0]

    def seconds(self, rows: int) -> float:
        """Return the time of a pass with this number of rows."""
        points = self.points
        if len(points) == 1:
            return points[0][1]
        # The first point from `rows` on, but neither the first nor beyond the last: its line is extrapolated.
        upper = min(max(bisect_left(points, (rows, 0.0)), 1), len(points) - 1)
        (low, low_seconds), (high, high_seconds) = points[upper - 1], points[upper]
        seconds = low_seconds + (high_seconds - low_seconds) * (rows - low) / (high - low)
        return max(seconds, high_seconds) if rows > high else seconds  # a longer pass takes no less time


@dataclass(frozen=True)
class LevelTimes:
    """Drafting times of one device, in seconds."""

    level: float  # per level, for one request
    per_request: float = 0.0  # per further request that drafts in the same pass
    first: float = 0.0  # before the first level

    def seconds(self, requests: int) -> float:
        """Return the time of one level for `requests` requests."""
        return self.level + self.per_request * (requests - 1)

    def scaled(self, level: float) -> "LevelTimes":
        """Return the times scaled so that a level takes `level` seconds; `first` stays."""
        per_request = self.per_request * level / self.level if self.level else 0.0
        return LevelTimes(level, per_request, self.first)


@dataclass(frozen=True)
class SimulatedCosts:
    """All costs of a simulation, in seconds."""

    passes: PassTimes
    local: LevelTimes  # drafting on the target's device
    node: LevelTimes  # drafting on a draft node
    host: float = 0.0  # host time per step, without pass and draft
    drafting_host: float = 0.0  # additional host time of a step with drafts
    per_row: float = 0.0  # acceptance, per row of the pass
    remote: float = 0.0  # host time for notifying draft nodes per step, with one request
    remote_per_request: float = 0.0  # the same for each further request
    prompt: float = 0.0  # per prompt token on the target
    node_prompt: float = 0.0  # per prompt token on a draft node

    def step(self, requests: int, drafted: int, prompt_tokens: int = 0) -> float:
        """Return the seconds of a step without drafting; `drafted` is the number of verified draft tokens."""
        rows = requests + drafted
        seconds = self.passes.seconds(rows) + self.host + self.per_row * rows + self.prompt * prompt_tokens
        return seconds + self.drafting_host if drafted else seconds

    def notifying(self, requests: int) -> float:
        """Return the target's time for notifying draft nodes in a step."""
        return self.remote + self.remote_per_request * (requests - 1)


ILLUSTRATIVE = SimulatedCosts(
    passes=PassTimes.straight(15e-3, 15e-3 / 400),
    local=LevelTimes(0.8e-3, 0.8e-3 / 200),
    node=LevelTimes(0.8e-3, 0.8e-3 / 200),
    remote=0.1e-3,
    remote_per_request=0.2e-3 / 15,
    prompt=0.05e-3,
    node_prompt=0.005e-3,
)
"""Assumed costs of a large target and a draft model about twenty times as fast."""

MOST_LEVELS = 130  # maximum chain length including run-ahead

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class AcceptanceCurve:
    """Acceptance by level. Beyond the last given level, survival decays geometrically."""

    survival: tuple[float, ...]  # probability that a draft with this level is accepted up to it
    coverage: tuple[float, ...] = (1.0,)  # probability that a draft has this level

    @staticmethod
    def of_rate(alpha: float) -> "AcceptanceCurve":
        """Return the curve of a constant acceptance rate per level."""
        return AcceptanceCurve((alpha,))

    @cached_property
    def chances(self) -> tuple[float, ...]:
        """Probability that a draft is accepted up to a level, for all MOST_LEVELS levels."""
        before = self.survival[-2] if len(self.survival) > 1 else 1.0
        ratio = min(self.survival[-1] / before, 1.0) if before else 0.0
        more = range(1, MOST_LEVELS - len(self.survival) + 1)
        return (*self.survival, *(self.survival[-1] * ratio**level for level in more))

    @property
    def has_all_levels(self) -> bool:
        """Whether drafts always have every level."""
        return min(self.coverage) >= 1.0


class Dice:
    """Samples the length and the acceptance of drafts in a batch with several kinds of work.

    Each kind has an acceptance curve.
    """

    def __init__(self, kinds: Sequence[AcceptanceCurve], requests: int) -> None:
        self._kinds = kinds
        self._kind_of = np.arange(requests) % len(kinds)  # index into `kinds`, [request slot]
        self._next_kind = requests % len(kinds)
        self._have_all_levels = all(kind.has_all_levels for kind in kinds)
        self._survival = np.array([kind.chances for kind in kinds])  # [kind, level]
        self._num_covered = max(len(kind.coverage) for kind in kinds)
        self._coverage = np.array([self._padded_coverage(kind) for kind in kinds])  # [kind, level]

    def _padded_coverage(self, kind: AcceptanceCurve) -> npt.NDArray[np.float64]:
        """Return the coverage of `_num_covered` levels: drafts of a kind end with its last level, or never."""
        missing = self._num_covered - len(kind.coverage)
        return np.pad(kind.coverage, (0, missing), constant_values=1.0 if kind.has_all_levels else 0.0)

    @cached_property
    def chances(self) -> tuple[float, ...]:
        """Mean survival by level over all kinds of work: the estimate that a target has."""
        return tuple(self._survival.mean(0).tolist())

    def renew(self, slot: int) -> None:
        """Replace the request of a slot by one of the next kind."""
        self._kind_of[slot] = self._next_kind
        self._next_kind = (self._next_kind + 1) % len(self._kinds)

    def correct_levels(self, rng: np.random.Generator) -> Counts:
        """Sample the number of levels of each request that the target accepts, if the draft has them."""
        return _sampled_levels(self._survival, self._kind_of, rng)

    def lengths(self, rng: np.random.Generator, most: int) -> Counts:
        """Sample the number of levels, at most `most`, that the draft of each request has."""
        if self._have_all_levels:
            return np.full(len(self._kind_of), most)
        levels = _sampled_levels(self._coverage, self._kind_of, rng)
        # A draft that has the last covered level has all further ones, too.
        return np.minimum(np.where(levels == self._num_covered, most, levels), most)


def _sampled_levels(chances: npt.NDArray[np.float64], kinds: Counts, rng: np.random.Generator) -> Counts:
    """Sample a number of levels per request; `chances[kind, level]` is the probability of having that level."""
    drawn = rng.random(len(kinds))
    if len(chances) == 1:  # the same by bisection, which is faster: the negated chances ascend
        return np.searchsorted(-chances[0], -drawn)
    levels: Counts = (chances[kinds] > drawn[:, None]).sum(1)
    return levels


class DraftPlacement(StrEnum):
    """Machine that drafts."""

    PLAIN = "plain"  # speculation is off
    LOCAL = "local"  # on each target's own device
    REMOTE = "remote"  # draft nodes


class WaitRule(StrEnum):
    """When a pass waits for draft levels in flight."""

    WORTH = "worth"  # while waiting has an expected gain, like the drafter `remote`
    ALL = "all"  # for all wanted levels
    NONE = "none"  # not at all


class FailureKind(StrEnum):
    """Failures of draft nodes."""

    KILL = "kill"  # connections end immediately
    HANG = "hang"  # silent; connections end after 30 s
    PARTITION = "partition"  # silent for targets of other zones
    SLOW = "slow"  # ten times as slow


MOST_REQUESTS = 1e6  # maximum number of simulated requests


@dataclass(frozen=True)
class Failure:
    """A failure of some nodes for some time."""

    kind: FailureKind
    nodes: int
    at: float  # start, in simulated seconds
    seconds: float | None = None  # duration; None: until the end

    @staticmethod
    def parse(text: str) -> "Failure":
        """Parse `kill:2@10+5`: two nodes die at 10 s and are back 5 s later."""
        match = re.fullmatch(r"(\w+):(\d+)@([\d.]+)(?:\+([\d.]+))?", text)
        try:
            if match is None:
                raise ValueError(text)
            kind, nodes, at, seconds = match.groups()
            return Failure(
                FailureKind(kind), int(nodes), float(at), None if seconds is None else float(seconds)
            )
        except ValueError:
            kinds = ", ".join(FailureKind)
            raise RequestError(
                f"--fail takes KIND:NODES@SECONDS+DURATION such as kill:2@10+5 (kinds: {kinds}), not {text!r}"
            ) from None


@dataclass(frozen=True)
class FleetSize:
    """Number of machines and capacities."""

    targets: int = 8
    nodes: int = 2
    zones: int = 1  # targets and nodes are assigned to zones in turn
    batch: int = 16  # concurrent requests per target
    capacity: int = 256  # requests per node, of all targets
    round_batch: int = 64  # requests per drafting pass of a node


@dataclass(frozen=True)
class Network:
    """Round trips between targets and nodes, in seconds."""

    round_trip: float = 0.3e-3  # within a zone
    zone_round_trip: float = 2e-3  # between zones
    jitter: float = 0.1  # standard deviation of the round trip's logarithm
    tail_chance: float = 0.002  # probability of an additional `tail_seconds`
    tail_seconds: float = 0.02


@dataclass(frozen=True)
class Traffic:
    """Requests: always full batches, or at given rates."""

    # Requests per second of the fleet, each rate for an equal part of the simulated time.
    # Empty: batches are always full.
    rates: tuple[float, ...] = ()
    prompt: int = 512  # tokens
    answer: float = 256.0  # mean tokens, geometrically distributed


@dataclass(frozen=True)
class HourlyPrices:
    """Prices per hour."""

    target: float = 10.0
    node: float = 1.0


@dataclass(frozen=True)
class Autoscale:
    """Autoscaling of draft nodes by the ratio formula (`cluster/pools/scaling.py`)."""

    boot: float = 60.0  # seconds until a new node drafts; it costs meanwhile
    up_after: float = 10.0
    down_after: float = 300.0
    least: int = 1
    most: int = 1000


@dataclass(frozen=True)
class Scenario:
    """One simulation run."""

    fleet: FleetSize = field(default_factory=FleetSize)
    network: Network = field(default_factory=Network)
    traffic: Traffic = field(default_factory=Traffic)
    prices: HourlyPrices = field(default_factory=HourlyPrices)
    costs: SimulatedCosts = ILLUSTRATIVE
    kinds: tuple[AcceptanceCurve, ...] = (AcceptanceCurve.of_rate(0.8),)  # assigned to requests in turn
    drafting: DraftPlacement = DraftPlacement.REMOTE
    waiting: WaitRule = WaitRule.WORTH
    runs_ahead: bool = True
    k: int = 5
    failures: tuple[Failure, ...] = ()
    autoscale: Autoscale | None = None
    seconds: float = 20.0  # simulated time; the first tenth is warm-up
    seed: int = 0

    def __post_init__(self) -> None:
        fleet = self.fleet
        check_least(0, nodes=fleet.nodes)
        check_least(1, targets=fleet.targets, zones=fleet.zones, batch=fleet.batch, k=self.k)
        if self.k > 60:
            raise RequestError(f"--k must be at most 60, not {self.k}")
        if not 0 < self.seconds < 1e6:
            raise RequestError(f"--seconds must be above 0 and below 1e6, not {self.seconds:g}")
        if self.autoscale is not None and not fleet.nodes:
            raise RequestError("--autoscale starts from --nodes, which must be at least 1")
        for rate in self.traffic.rates:
            if not 0 < rate * self.seconds <= MOST_REQUESTS:
                raise RequestError(
                    f"--rate takes requests per second, each above 0 and at most {MOST_REQUESTS:g} in all, not {rate:g}"
                )
        for failure in self.failures:
            if not failure.nodes or failure.seconds == 0 or failure.at >= self.seconds:
                given = f"{failure.kind}:{failure.nodes}@{failure.at:g}"
                given += "" if failure.seconds is None else f"+{failure.seconds:g}"
                raise RequestError(
                    f"--fail {given} changes nothing: it needs a node, a duration, and a beginning before the end of "
                    f"the {self.seconds:g} s that are simulated"
                )
            if failure.nodes > fleet.nodes:
                raise RequestError(
                    f"--fail {failure.kind}: there are {fleet.nodes} nodes, not {failure.nodes}"
                )
            if failure.kind is FailureKind.PARTITION and fleet.zones < 2:
                raise RequestError(
                    "--fail partition cuts zones off from each other: --zones must be at least 2"
                )

    @property
    def counts_from(self) -> float:
        """End of the warm-up, in simulated seconds."""
        return self.seconds / 10
