"""The report: per pair of drafter and cohort, and of the whole engine. Plain data that any process can read."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

BANDS = (0, 16, 64, 256, 1024)
"""First tokens of the parts of an answer that acceptance is reported for."""


@dataclass(frozen=True)
class Bounds:
    """A ratio to plain decoding, and between what it lies (95%)."""

    low: float
    mean: float
    high: float


@dataclass(frozen=True)
class Band:
    """Acceptance in a part of the answers."""

    first: int  # token of the answer, 0 is the first
    reached: int  # draft tokens whose predecessors were accepted
    accepted: int


@dataclass(frozen=True)
class DecisionReport:
    """Something was switched, or moved to another stage."""

    ago_seconds: float
    what: str  # "on", "off" or a stage
    reason: str
    gain: float | None = None  # ratio to plain decoding that was expected


@dataclass(frozen=True)
class PairReport:
    """A drafter in a cohort."""

    drafter: str
    cohort: str
    state: str = "on"  # off, shadow, verify, canary, on or held
    in_use: bool = False  # whether its draft tokens are verified at present
    reason: str = ""
    percent: float = 100.0  # of the requests, those that may use it
    since_seconds: float | None = None  # for how long it is in this state; None: since the engine began
    predicted: Bounds | None = None
    measured: Bounds | None = None
    depth: int = 0  # levels that are asked for
    kept: int = 0  # of these, the ones that are worth verifying
    depths: tuple[int, ...] = ()  # [depth], drafts that were verified
    acceptance_by_level: tuple[float, ...] = ()
    acceptance_by_position: tuple[Band, ...] = ()
    coverage: float | None = None  # of the asks, those that had an answer
    asks: int = 0
    draft_ms: float = 0.0  # of an ask
    network_ms: float | None = None  # of these, on the way; None: the drafter is here
    break_even: float | None = None  # least acceptance with which it would pay now; None: no acceptance would
    run_p50: float = 0.0  # draft tokens that one pass accepted
    run_p90: float = 0.0
    faults: int = 0
    switched: int = 0  # times that it was turned on or off
    is_model: bool = False  # it computes its drafts; else it looks them up
    decisions: tuple[DecisionReport, ...] = ()

    def aged(self, seconds: float) -> "PairReport":
        since = None if self.since_seconds is None else self.since_seconds + seconds
        decisions = (replace(one, ago_seconds=one.ago_seconds + seconds) for one in self.decisions)
        return replace(self, since_seconds=since, decisions=tuple(decisions))

    @property
    def tokens_per_draft(self) -> float:
        """Tokens that a pass with a draft of this pair is expected to make."""
        total, chance = 1.0, 1.0
        for rate in self.acceptance_by_level[: max(self.kept, 1)]:
            chance *= rate
            total += chance
        return total


@dataclass(frozen=True)
class Usage:
    """How busy the devices were, and what that costs."""

    wall_seconds: float = 0.0  # since the engine began
    draft_seconds: float = 0.0
    target_seconds: float = 0.0  # passes and judging
    tokens: int = 0
    draft_price: float | None = None  # of an hour
    target_price: float | None = None

    @property
    def device_seconds(self) -> float:
        """Of both together."""
        return self.draft_seconds + self.target_seconds

    @property
    def draft_utilisation(self) -> float:
        return self.draft_seconds / self.wall_seconds if self.wall_seconds else 0.0

    @property
    def target_utilisation(self) -> float:
        return self.target_seconds / self.wall_seconds if self.wall_seconds else 0.0

    def cost_per_million(self, reserved: bool = False) -> float | None:
        """Of the time that was worked, or of all of it, which is what is paid; None without prices or tokens."""
        if self.target_price is None or not self.tokens:
            return None
        target = self.wall_seconds if reserved else self.target_seconds
        draft = self.wall_seconds if reserved else self.draft_seconds
        spent = (target * self.target_price + draft * (self.draft_price or 0.0)) / 3600
        return 1e6 * spent / self.tokens


@dataclass(frozen=True)
class ControlReport:
    """The state of speculation."""

    enabled: bool = True
    policy_file: str | None = None
    pairs: tuple[PairReport, ...] = ()
    batch: float = 0.0  # tokens that the last pass would have made without drafts
    step_ms: float = 0.0  # that it would have taken
    row_ms: float = 0.0  # and what one more row would have added
    probe_share: float = 0.0  # of the time of all steps, spent on drafts that were only compared
    probe_seconds: float = 0.0
    reference_passes: int = 0
    host_share: float = 0.0  # of the time of steps, what is neither drafting nor the target's pass
    provisional_pages: int = 0  # KV pages that the last pass held for draft tokens alone
    provisional_peak: int = 0
    kv_pages: int = 0
    kv_usage: float = 0.0
    preemptions_guessing: float = 0.0  # per second of steps with drafts
    preemptions_plain: float = 0.0  # per second of steps without
    mismatches: int = 0  # requests that came out differently when they were decoded again
    usage: Usage = Usage()

    def aged(self, seconds: float) -> "ControlReport":
        """Return the same, reported so much later by an engine that had nothing to do meanwhile."""
        usage = replace(self.usage, wall_seconds=self.usage.wall_seconds + seconds)
        return replace(self, usage=usage, pairs=tuple(pair.aged(seconds) for pair in self.pairs))


def counts_of(drafts: int, per_position: Sequence[int]) -> "Counter[int]":
    """How many drafts came so far, from how many came at least to each position."""
    counts = enumerate(pairwise((drafts, *per_position, 0)))
    return Counter({length: here - further for length, (here, further) in counts if here > further})


def run_percentile(runs: "Counter[int]", share: float) -> float:
    """The accepted run that this share of all runs does not exceed."""
    wanted, seen = share * runs.total(), 0
    for length in sorted(runs):
        seen += runs[length]
        if seen >= wanted:
            return float(length)
    return 0.0
