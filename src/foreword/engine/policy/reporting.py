"""The whole report: what the policy has measured, what the books say, and how far roll-outs have come."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from foreword.control.measured import MeasuredPolicy
from foreword.control.reporting.books import SpeculationBooks
from foreword.control.reporting.describe import describe_pairs
from foreword.control.reporting.figures import ControlReport, DecisionTold, PairReport, Usage
from foreword.control.rollout.pair import PairRollout
from foreword.engine.policy.health import is_of
from foreword.engine.policy.steering import Steering
from foreword.speculation.measured.situation import Situation
from foreword.speculation.report import StageSeconds

MOST_PAIRS = 64
"""That are told, those that were asked most."""


@dataclass(frozen=True)
class Load:
    """What the engine knows of itself."""

    wall_seconds: float
    seconds: StageSeconds
    kv_pages: int
    kv_pages_used: int
    faults: Mapping[str, int]  # by drafter and kind


def control_report(
    policy: MeasuredPolicy | None,
    situation: Situation,
    books: SpeculationBooks,
    steering: Steering | None,
    load: Load,
) -> ControlReport:
    """How guessing stands."""
    here = None if policy is None else policy.here
    plain, guessing = books.preemption_rates()
    seconds = load.seconds
    host = seconds.total - seconds.draft - seconds.verify
    return ControlReport(
        enabled=situation.speculating,
        policy_file=None if steering is None else str(steering.path),
        pairs=_pairs(policy, situation, books, steering, load),
        batch=0.0 if here is None else here.drawn,
        step_ms=0.0 if here is None else 1e3 * here.plain,
        row_ms=0.0 if here is None else 1e3 * (here.after(1) - here.plain),
        probe_share=0.0 if policy is None else policy.bank.share,
        probe_seconds=0.0 if policy is None else policy.bank.spent,
        reference_passes=0 if policy is None else policy.reference.passes,
        host_share=host / seconds.total if seconds.total else 0.0,
        provisional_pages=books.provisional_pages,
        provisional_peak=books.provisional_peak,
        kv_pages=load.kv_pages,
        kv_usage=load.kv_pages_used / load.kv_pages if load.kv_pages else 0.0,
        preemptions_plain=plain,
        preemptions_guessing=guessing,
        mismatches=0 if steering is None else sum(p.mismatches for p in steering.rollouts.pairs.values()),
        usage=_usage(books, steering, load),
    )


def _usage(books: SpeculationBooks, steering: Steering | None, load: Load) -> Usage:
    prices = None if steering is None else steering.document.prices
    return Usage(
        wall_seconds=load.wall_seconds,
        draft_seconds=load.seconds.draft,
        target_seconds=load.seconds.verify + load.seconds.accept,
        tokens=books.tokens,
        draft_price=None if prices is None else prices.draft,
        target_price=None if prices is None else prices.target,
    )


def _pairs(
    policy: MeasuredPolicy | None,
    situation: Situation,
    books: SpeculationBooks,
    steering: Steering | None,
    load: Load,
) -> tuple[PairReport, ...]:
    found = describe_pairs(policy, books.pairs, situation)
    if steering is not None:
        found = _with_rollouts(found, steering)
    told = [_with_faults(pair, steering, load) for pair in found.values()]
    told.sort(key=lambda pair: (-pair.asks, pair.drafter, pair.cohort))
    return tuple(told[:MOST_PAIRS])


def _with_rollouts(
    found: dict[tuple[str, str], PairReport], steering: Steering
) -> dict[tuple[str, str], PairReport]:
    """Also pairs that nobody was asked about yet, or is any more."""
    told = dict(found)
    now = steering.rollouts.clock()
    for (drafter, cohort), pair in list(steering.rollouts.pairs.items()):
        parts = [key for key in found if key[0] == drafter and is_of(key[1], cohort)] or [(drafter, cohort)]
        for key in parts:
            told[key] = _rolled(found.get(key, PairReport(*key)), pair, now)
    return told


def _rolled(report: PairReport, pair: PairRollout, now: float) -> PairReport:
    moves = [DecisionTold(now - move.at, move.stage.value, move.reason) for move in pair.moves]
    own = report.decisions if pair.percent else ()  # what nobody uses is not switched
    return replace(
        report,
        state=pair.stage.value,
        in_use=report.in_use and pair.percent > 0,
        reason=pair.reason,
        percent=pair.percent,
        since_seconds=now - pair.since,
        decisions=tuple(sorted([*own, *moves], key=lambda one: one.ago_seconds)[:20]),
    )


def _with_faults(pair: PairReport, steering: Steering | None, load: Load) -> PairReport:
    faults = None if steering is None else steering.faults(pair.drafter)
    if faults is None:
        parts = pair.drafter.split("+")
        faults = sum(count for kind, count in load.faults.items() if kind.partition("/")[0] in parts)
    return replace(pair, faults=faults)
