"""Parameters of a simulation."""

import re
from dataclasses import dataclass, field
from enum import StrEnum

from foreword.errors import RequestError
from foreword.simulate.costs import ILLUSTRATIVE, AcceptanceCurve, SimulatedCosts


class DraftPlacement(StrEnum):
    """The place of drafting."""

    PLAIN = "plain"  # speculation is off
    LOCAL = "local"  # on each target's own device
    REMOTE = "remote"  # draft nodes


class WaitRule(StrEnum):
    """The rule for waiting for levels in flight."""

    WORTH = "worth"  # while the expected gain is positive, like the drafter `remote`
    ALL = "all"  # for all wanted levels
    NONE = "none"  # not at all


class FailureKind(StrEnum):
    """Failures of draft nodes."""

    KILL = "kill"  # connections end immediately
    HANG = "hang"  # silent; connections end after 30 s
    PARTITION = "partition"  # silent for targets of other zones
    SLOW = "slow"  # ten times as slow


MOST_REQUESTS = 1e6
"""Maximum number of simulated requests."""


@dataclass(frozen=True)
class Failure:
    """A failure of some nodes for some time."""

    kind: FailureKind
    nodes: int
    at: float
    seconds: float

    @staticmethod
    def parse(text: str) -> "Failure":
        """Parse `kill:2@10+5`: two nodes die at 10 s and are back 5 s later."""
        found = re.fullmatch(r"(\w+):(\d+)@([\d.]+)(?:\+([\d.]+))?", text)
        try:
            if found is None or found[1] not in list(FailureKind):
                raise ValueError(text)
            return Failure(FailureKind(found[1]), int(found[2]), float(found[3]), float(found[4] or "inf"))
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
    zones: int = 1  # targets and nodes are distributed in turn
    batch: int = 16  # concurrent requests per target
    capacity: int = 256  # requests per node, of all targets
    round_batch: int = 64  # requests per round


@dataclass(frozen=True)
class Network:
    """Round trips between targets and nodes, in seconds."""

    round_trip: float = 0.3e-3  # within a zone
    zone_round_trip: float = 2e-3  # between zones
    jitter: float = 0.1  # standard deviation of the log
    tail_chance: float = 0.002  # probability of an additional `tail_seconds`
    tail_seconds: float = 0.02


@dataclass(frozen=True)
class Traffic:
    """Requests: always full batches, or at given rates."""

    rates: tuple[
        float, ...
    ] = ()  # requests per second of the fleet, in equal parts of the time; none: always full
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
    kinds: tuple[AcceptanceCurve, ...] = (
        AcceptanceCurve.of_rate(0.8),
    )  # of work; requests are of each in turn
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
        for name, value, least in (
            ("--targets", fleet.targets, 1),
            ("--nodes", fleet.nodes, 0),
            ("--zones", fleet.zones, 1),
            ("--batch", fleet.batch, 1),
            ("--k", self.k, 1),
        ):
            if value < least:
                raise RequestError(f"{name} must be at least {least}, not {value}")
        if self.k > 60:
            raise RequestError(f"--k must be at most 60, not {self.k}")
        if not 0 < self.seconds < 1e6:
            raise RequestError(f"--seconds must be above 0 and below 1e6, not {self.seconds:g}")
        if self.autoscale is not None and not fleet.nodes:
            raise RequestError("--autoscale begins with the nodes that there are: --nodes must be at least 1")
        for rate in self.traffic.rates:
            if not 0 < rate * self.seconds <= MOST_REQUESTS:
                raise RequestError(
                    f"--rate takes requests per second, each above 0 and at most {MOST_REQUESTS:g} in all, not {rate:g}"
                )
        for failure in self.failures:
            if not failure.nodes or not failure.seconds or failure.at >= self.seconds:
                given = f"{failure.kind}:{failure.nodes}@{failure.at:g}+{failure.seconds:g}"
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
                    "--fail partition: cuts zones off from each other, so --zones must be 2 or more"
                )

    @property
    def counts_from(self) -> float:
        """End of the warm-up."""
        return self.seconds / 10
