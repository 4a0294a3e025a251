"""Data classes of reports: for each drafter in a cohort, and for the whole engine."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

BANDS = (0, 16, 64, 256, 1024)
"""First token positions of the answer's bands; acceptance is reported for each band."""


@dataclass(frozen=True)
class Bounds:
    """A ratio to plain decoding with its 95% bounds."""

    low: float
    mean: float
    high: float


@dataclass(frozen=True)
class Band:
    """Acceptance in one band of answer positions."""

    first: int  # position of the first token
    reached: int  # draft tokens whose predecessors were accepted
    accepted: int


@dataclass(frozen=True)
class DecisionReport:
    """A decision to turn a drafter on or off, or a change of its roll-out stage."""

    ago_seconds: float
    what: str  # "on", "off" or a stage
    reason: str
    gain: float | None = None  # expected ratio to plain decoding


@dataclass(frozen=True)
class PairReport:
    """State of a drafter in a cohort."""

    drafter: str
    cohort: str
    state: str = "on"  # off, shadow, verify, canary, on or held
    in_use: bool = False  # whether its draft tokens are verified at present
    reason: str = ""  # of the latest decision or change of stage
    percent: float = 100.0  # percentage of requests that may use it
    since_seconds: float | None = None  # time in this state; None: since the engine started
    predicted: Bounds | None = None  # None: no decision yet
    measured: Bounds | None = None  # None: too few measurements
    depth: int = 0  # requested levels
    kept: int = 0  # levels with a net benefit
    depths: tuple[int, ...] = ()  # number of verified drafts by depth
    acceptance_by_level: tuple[float, ...] = ()  # acceptance rate, if all earlier levels are accepted
    acceptance_by_position: tuple[Band, ...] = ()
    coverage: float | None = None  # fraction of draft requests that got a draft
    asks: int = 0  # draft requests
    draft_ms: float = 0.0  # per draft request
    network_ms: float | None = None  # network part of draft_ms; None: local drafter
    # Minimum acceptance rate with a gain at present; None: no rate has a gain.
    break_even: float | None = None
    run_p50: float = 0.0  # median of the accepted draft tokens per pass
    run_p90: float = 0.0  # 90th percentile of the accepted draft tokens per pass
    faults: int = 0  # failed draft requests
    switched: int = 0  # how often it was turned on or off
    is_model: bool = False  # whether it runs a model; False: a lookup
    decisions: tuple[DecisionReport, ...] = ()

    def aged(self, seconds: float) -> "PairReport":
        """Return the report as of `seconds` later, if nothing happens until then."""
        since = None if self.since_seconds is None else self.since_seconds + seconds
        decisions = [replace(old, ago_seconds=old.ago_seconds + seconds) for old in self.decisions]
        return replace(self, since_seconds=since, decisions=tuple(decisions))

    @property
    def tokens_per_draft(self) -> float:
        """Expected tokens of a pass with a draft of this pair."""
        expected, probability = 1.0, 1.0
        for rate in self.acceptance_by_level[: max(self.kept, 1)]:
            probability *= rate
            expected += probability
        return expected


@dataclass(frozen=True)
class Usage:
    """Device time of drafting and of the target, and its cost."""

    wall_seconds: float = 0.0  # since the engine started
    draft_seconds: float = 0.0
    target_seconds: float = 0.0  # passes and acceptance
    tokens: int = 0
    draft_price: float | None = None  # per hour
    target_price: float | None = None

    @property
    def device_seconds(self) -> float:
        """Device time of drafting and target together."""
        return self.draft_seconds + self.target_seconds

    @property
    def draft_utilisation(self) -> float:
        return self.draft_seconds / self.wall_seconds if self.wall_seconds else 0.0

    @property
    def target_utilisation(self) -> float:
        return self.target_seconds / self.wall_seconds if self.wall_seconds else 0.0

    def cost_per_million(self, reserved: bool = False) -> float | None:
        """Return the cost of the busy time (of all time if `reserved`) per million tokens; None if unknown."""
        if self.target_price is None or not self.tokens:
            return None
        target = self.wall_seconds if reserved else self.target_seconds
        draft = self.wall_seconds if reserved else self.draft_seconds
        cost = (target * self.target_price + draft * (self.draft_price or 0.0)) / 3600
        return 1e6 * cost / self.tokens


@dataclass(frozen=True)
class ControlReport:
    """State of speculation in the whole engine."""

    enabled: bool = True
    policy_file: str | None = None
    pairs: tuple[PairReport, ...] = ()
    batch: float = 0.0  # tokens of the last pass without its drafts
    step_ms: float = 0.0  # expected time of the last pass without its drafts
    row_ms: float = 0.0  # expected time of one more token in the pass
    probe_share: float = 0.0  # fraction of step time spent on exploration
    probe_seconds: float = 0.0  # step time spent on exploration
    reference_passes: int = 0  # plain passes that measure plain decoding
    host_share: float = 0.0  # fraction of step time that is neither drafting nor the target's pass
    provisional_pages: int = 0  # KV pages that the last pass held only for draft tokens
    provisional_peak: int = 0  # maximum of provisional_pages
    kv_pages: int = 0  # all KV pages
    kv_usage: float = 0.0  # fraction of KV pages in use
    preemptions_guessing: float = 0.0  # preemptions per second of steps with drafts
    preemptions_plain: float = 0.0  # preemptions per second of steps without drafts
    mismatches: int = 0  # requests with a different answer when decoded again
    usage: Usage = Usage()

    def aged(self, seconds: float) -> "ControlReport":
        """Return the report as of `seconds` later, if the engine is idle until then."""
        usage = replace(self.usage, wall_seconds=self.usage.wall_seconds + seconds)
        return replace(self, usage=usage, pairs=tuple(pair.aged(seconds) for pair in self.pairs))


def counts_of(drafts: int, per_position: Sequence[int]) -> "Counter[int]":
    """Return the number of drafts by length; `per_position` has the number of drafts that reach each position."""
    counts: Counter[int] = Counter()
    # `reached` drafts have at least `length` tokens, and `longer` of these have more.
    for length, (reached, longer) in enumerate(pairwise((drafts, *per_position, 0))):
        if reached > longer:
            counts[length] = reached - longer
    return counts


def run_percentile(drafts: "Counter[int]", share: float) -> float:
    """Return a percentile of accepted lengths; `drafts` has the number of drafts by accepted length."""
    rank, seen = share * drafts.total(), 0
    for length in sorted(drafts):
        seen += drafts[length]
        if seen >= rank:
            return float(length)
    return 0.0
