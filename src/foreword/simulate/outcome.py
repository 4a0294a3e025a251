"""What came of a run."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from foreword.simulate.world import World


@dataclass(frozen=True)
class Outcome:
    """After the warm-up, all targets together. None: there was nothing to measure it by."""

    tokens: int
    seconds: float
    tokens_per_second: float
    tokens_per_second_per_target: float
    tokens_per_pass: float | None  # of one request
    acceptance: float  # guesses accepted / guesses verified
    token_ms_p50: float | None  # by request, the mean time of a token
    token_ms_p95: float | None
    latency_p50: float | None  # seconds from a request's arrival to its end
    latency_p95: float | None
    requests: int  # that have ended
    waiting_share: float  # of the targets' time, between the beginning of a step and that of its pass
    drafted_per_used: float | None  # levels that nodes have drafted for each that was verified
    node_busy_share: float | None
    cost_per_million: float | None  # tokens, both pools paid by the hour
    moves: int  # requests that got another home
    waits_in_vain: int
    events: int
    tokens_over_time: tuple[float, ...]  # per second, in equal parts of the time
    nodes_over_time: tuple[int, ...]
    nodes_wanted: int | None  # by the autoscaler, at the end; None: there is none


def outcome_of(world: "World") -> Outcome:
    """Sum up."""
    scenario, tallies = world.scenario, [target.tally for target in world.targets]
    seconds = scenario.seconds - scenario.counts_from
    tokens = sum(tally.tokens for tally in tallies)
    used, passes = sum(tally.used for tally in tallies), sum(tally.request_passes for tally in tallies)
    times = [1e3 * one for tally in tallies for one in tally.token_seconds]
    latencies = [one for tally in tallies for one in tally.latencies]
    paid = sum(_paid(node.born, node.gone, scenario.seconds) for node in world.nodes)
    hours = (seconds * len(tallies) * scenario.prices.target) + 0.9 * paid * scenario.prices.node
    drafted = sum(target.chains.drafted for target in world.targets)
    return Outcome(
        tokens=tokens,
        seconds=seconds,
        tokens_per_second=tokens / seconds,
        tokens_per_second_per_target=tokens / seconds / len(tallies),
        tokens_per_pass=tokens / passes if passes else None,
        acceptance=sum(tally.accepted for tally in tallies) / max(used, 1),
        token_ms_p50=_percentile(times, 50),
        token_ms_p95=_percentile(times, 95),
        latency_p50=_percentile(latencies, 50),
        latency_p95=_percentile(latencies, 95),
        requests=len(latencies),
        waiting_share=sum(tally.waited for tally in tallies) / seconds / len(tallies),
        drafted_per_used=0.9 * drafted / used if world.nodes and used else None,
        node_busy_share=sum(node.busy_seconds for node in world.nodes) / paid if paid else None,
        cost_per_million=hours / 3600 / tokens * 1e6 if tokens else None,
        moves=sum(target.chains.moves for target in world.targets),
        waits_in_vain=sum(target.chains.waits_in_vain for target in world.targets),
        events=world.events,
        tokens_over_time=tuple(count * len(world.bins) / scenario.seconds for count in world.bins),
        nodes_over_time=tuple(world.node_bins),
        nodes_wanted=world.wanted,
    )


def _paid(born: float, gone: float | None, end: float) -> float:
    return min(end if gone is None else gone, end) - born


def _percentile(values: list[float], percent: float) -> float | None:
    return float(np.percentile(values, percent)) if values else None


def figure(value: float | None, form: str) -> str:
    """As people read it."""
    return "-" if value is None else format(value, form)
